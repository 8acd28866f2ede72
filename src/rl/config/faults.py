"""Describes faults of a configuration in the user's terms: key, value, where it was given, and
the remedy."""

import reprlib
import types
import typing
from collections.abc import Iterable
from typing import Any

from pydantic_core import ErrorDetails

from rl.config.fields import accepts_switch, field_tree, models_in, tags, type_name
from rl.config.foreign import known_elsewhere
from rl.config.hints import hint, types_with, without_numbers
from rl.config.run import RLConfig
from rl.system.credentials import hidden, is_secret_key
from rl.system.errors import ConfigError

SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxdict = SHORT.maxlist = 12

Spelled = dict[str, tuple[Any, str]]
"""Settings as the user gave them: dotted key -> (value, the file, variable or flag)."""


def raise_all(faults: list[str]) -> None:
    """Raises a ConfigError that counts and lists the faults, if there are any."""
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError(
            "\n".join([f"{count} in the configuration", *(f"  {fault}" for fault in faults)])
        )


def setting_text(key: str, value: Any) -> str:
    """Returns `key = value` on one line, shortened and without secrets."""
    return f"{key if key.isprintable() else repr(key)} = {SHORT.repr(hidden(key, value))}"


def key_of(location: Iterable[int | str]) -> str:
    """Returns the dotted key of a pydantic error location, without the union tags and type names
    that pydantic inserts."""
    tree, parts = field_tree(RLConfig), list[str]()
    for part in map(str, location):
        info = tree.get(without_numbers(".".join(parts)))
        tag = info and any(part in tags(model) for model in models_in(info.annotation))
        a_type = (
            info
            and not models_in(info.annotation)
            and typing.get_origin(info.annotation) in (typing.Union, types.UnionType)
        )
        if not tag and (part.isdigit() or not a_type):
            parts.append(part)
    return ".".join(parts)


def without_value(settings: Spelled) -> dict[str, str]:
    """Returns faults by key for bools where another type is needed: pydantic would read `--seed`
    without a value as 1."""
    tree, faults = field_tree(RLConfig), {}
    for key, (value, place) in settings.items():
        info = tree.get(without_numbers(key))
        if isinstance(value, bool) and info and not accepts_switch(info.annotation):
            faults[key] = f"{key} ({place})\n    needs a value: {type_name(info.annotation)}"
    return faults


def too_large(settings: Spelled) -> dict[str, str]:
    """Returns faults by key for whole numbers beyond 64 bits, which the processes of a run
    cannot send each other."""
    tree = field_tree(RLConfig)
    return {
        key: f"{setting_text(key, value)} ({place})\n    is too large; give a number below 2^63"
        for key, (value, place) in settings.items()
        if isinstance(value, int) and abs(value) >= 2**63 and without_numbers(key) in tree
    }


def below(key: str, other: str) -> bool:
    """Returns whether a dotted key equals `other` or lies in its section."""
    return f"{key}.".startswith(f"{other}.")


def place_of(key: str, settings: Spelled) -> str:
    """Returns where a key, its section or one of its own keys was given, as ` (file, variable or
    flag)`; empty if nowhere."""
    for same in (str, without_numbers):  # a list's only element may be addressed without its index
        for name, (_, place) in settings.items():
            if below(same(key), same(name)) or below(same(name), same(key)):
                return f" ({place})"
    return ""


REMEDIES = {
    "dict_type": "give a table, {{ key = value }}, or its keys one by one: --{key}.KEY VALUE",
    "model_type": "is a section; give its keys: --{key}.KEY VALUE",
    "model_attributes_type": "is a section; give its keys: --{key}.KEY VALUE",
    "list_type": "give a list: [a, b]",
    "string_type": "must be a string; write it in quotes",
    "missing": "is missing; set it",
}
"""Pydantic error type -> remedy, where pydantic's own message is in Python terms."""


def remedy_for(finding: ErrorDetails, key: str) -> str:
    """Returns the remedy for a pydantic error about `key`."""
    kind = finding["type"]
    if kind == "union_tag_invalid":
        elsewhere = known_elsewhere(f"{key}.{finding['ctx']['tag']}")
        return (
            f"{elsewhere}: " * bool(elsewhere)
            + "give one of "
            + finding["ctx"]["expected_tags"].replace("'", "")
        )
    if kind == "extra_forbidden":
        secret = (
            is_secret_key(key)
            and "secrets are read from environment variables: WANDB_API_KEY, HF_TOKEN"
        )
        return types_with(without_numbers(key)) or f"unknown key; {secret or hint(key)}"
    if kind.startswith(("greater_", "less_")):
        about = field_tree(RLConfig)[without_numbers(key)].description or ""
        return f"{finding['msg']}. {' '.join(about.split())}"
    return REMEDIES.get(kind, "").format(key=key) or finding["msg"].removeprefix("Value error, ")


def fault_lines(finding: ErrorDetails, settings: Spelled) -> dict[str, str]:
    """Converts a pydantic error into faults by key, each with key, value, place and remedy. An
    unknown section yields one fault for each setting given in it."""
    key, value = key_of(finding["loc"]), finding["input"]
    if finding["type"] == "union_tag_invalid":
        key, value = f"{key}.type", finding["ctx"]["tag"]
    if finding["type"] == "missing":
        return {key: f"{key}{place_of(key, settings)}\n    {remedy_for(finding, key)}"}
    given = {key: value}
    if (
        finding["type"] == "extra_forbidden"
        and isinstance(value, dict)
        and not types_with(without_numbers(key))
    ):
        given = {
            name: inner for name, (inner, _) in settings.items() if name != key and below(name, key)
        } or given
    return {
        name: f"{setting_text(name, inner)}{place_of(name, settings)}\n    "
        f"{remedy_for(finding, name)}"
        for name, inner in given.items()
    }
