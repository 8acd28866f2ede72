"""Keeps secrets in environment variables: a configuration names the variable (`env:NAME`), the
process that needs the value looks it up, and everything that leaves a process (logs, rollouts,
error messages) has `[$NAME]` in its place.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from rl.system.errors import ConfigError

REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
RESOLVED = ("inference.vllm.", ".args.", ".set_kwargs.")
"""Parts of a dotted key below which references are resolved: tables whose keys belong to other
packages."""
SECRET_VARIABLE = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)"
    r"(?!.*_(FILE|PATH|DIR|URL)$)(_|$)",
    re.I,
)
SECRET_KEY = re.compile(
    r"(^|_)(api_?key|(access|auth|bearer|refresh|hf|hub)_?token|(access|private|secret)_?key"
    r"|secret|password|passwd|credentials?)$"
    r"|^token$",
    re.I,
)
"""Configuration keys whose values are secret. Not every `token` or `key` is a secret: they also
name symbols and columns."""
SECRET_SHAPE = re.compile(
    r"\b(sk-|hf_|ghp_|github_pat_|glpat-|xox[abp]-|gsk_|AKIA|AIza)"
    r"(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{16,}"
)
"""API keys of common services, recognized by their prefix."""
CREDENTIALS_IN_URL = re.compile(r"://[^/@\s:]*:[^/@\s]+@")
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
SHORTEST = 8
"""Minimum characters of a secret; shorter values (`none`, `EMPTY`) are not secrets."""
HIDDEN = "(hidden)"

resolved_names: set[str] = set()
"""Variables that this process has looked up for a reference: secret, whatever their names."""


def secret_variables() -> dict[str, str]:
    """Returns value -> name of the environment variables that hold secrets, longest value first.
    Ordinary words do not count as secrets."""
    names = {}
    for name, value in os.environ.items():
        # a setting, such as trainer.loss.token_mask, which is checked like other settings
        if name.startswith("RL__") or len(value) < SHORTEST:
            continue
        if len(value) < 12 and re.fullmatch("[a-z]*", value):
            continue
        if name in resolved_names or (SECRET_VARIABLE.search(name) and not is_path(value)):
            names[value] = name
    # so that it is replaced before any shorter value inside it
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def is_path(value: str) -> bool:
    """Returns whether a value is an absolute path as far as this machine shows: a secret in
    base64 may begin with a slash, too."""
    return value.startswith("/") and os.path.isdir("/" + value.lstrip("/").partition("/")[0])


def redact(text: str) -> str:
    """Returns the text with secret values replaced by the names of their variables."""
    return without(secret_variables(), text)


def without(secrets: dict[str, str], text: str) -> str:
    for value, name in secrets.items():
        text = text.replace(value, f"[${name}]")
    return text


def redact_json(encoded: bytes) -> bytes:
    """Does the same as `redact` for the strings of encoded JSON. Numbers with a secret's digits
    stay as they are."""
    secrets = secret_variables()
    if not any(msgspec.json.encode(value)[1:-1] in encoded for value in secrets):
        return encoded
    return JSON_STRING.sub(
        lambda string: msgspec.json.encode(without(secrets, msgspec.json.decode(string[0]))),
        encoded,
    )


class Redacting:
    """A text stream that redacts secrets and writes to another stream."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def resolve(value: Any, where: str) -> Any:
    """Returns a value or table with references replaced by the variables' values. `where` is its
    key, for error messages.

    Raises ConfigError if a variable is not set. The result must not be written to any file.
    """
    if isinstance(value, dict):
        return {key: resolve(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, where) for item in value]
    if not isinstance(value, str) or not (match := REFERENCE.fullmatch(value)):
        return value
    if not os.environ.get(match[1]):
        raise ConfigError(
            f"{where} = {value!r}: the environment variable {match[1]} is not set in this "
            "process; export it first"
        )
    resolved_names.add(match[1])
    return os.environ[match[1]]


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, string) for every string in nested tables, including the names of
    keys."""
    if isinstance(value, dict):
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            yield key, str(name)
            yield from strings(item, inner)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from strings(item, key if isinstance(item, str) else f"{key}.{i}")
    elif isinstance(value, str):
        yield key, value


def is_secret_key(key: str) -> bool:
    """Returns whether the last part of a dotted key names a secret."""
    return bool(SECRET_KEY.search(key.rpartition(".")[2].replace("-", "_")))


def hidden(key: str, value: Any) -> Any:
    """Returns a configuration value with its secrets replaced by HIDDEN."""
    if isinstance(value, dict):
        return {name: hidden(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(key, item) for item in value]
    return HIDDEN if isinstance(value, str) and is_secret(key, value) else value


def is_secret(key: str, value: str) -> bool:
    """Returns whether a string in a configuration is a secret, judged by its key, its form, or
    an environment variable that holds it."""
    if not value or REFERENCE.fullmatch(value):
        return False
    by_key = is_secret_key(key) and len(value) >= SHORTEST
    by_form = SECRET_SHAPE.search(value) or CREDENTIALS_IN_URL.search(value)
    return by_key or bool(by_form) or redact(value) != value


def secret_faults(table: dict[str, Any]) -> list[tuple[str, object, str]]:
    """Returns (key, HIDDEN, remedy) for each secret that a configuration contains."""
    faults: dict[str, tuple[str, object, str]] = {}
    for key, value in strings(table):
        if not is_secret(key, value):
            continue
        names = [name for known, name in secret_variables().items() if known in value] or ["NAME"]
        remedy = " (WANDB_API_KEY, HF_TOKEN, or one that teacher.api_key_var names)"
        if any(part in key + "." for part in RESOLVED):
            remedy = f' and write "env:{names[0]}" here'
        text = (
            "is a secret, and this configuration is written into the run directory: put it into "
            f"an environment variable{remedy}"
        )
        faults.setdefault(key, (key, HIDDEN, text))
    return list(faults.values())
