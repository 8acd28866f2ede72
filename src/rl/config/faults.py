"""Describes faults of a configuration in the user's terms: key, value, where it was given, and
the remedy."""

import reprlib
from typing import Any

from pydantic_core import ErrorDetails

from rl.config.fields import accepts_switch, field_tree, type_name
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
        raise ConfigError("\n  ".join([f"{count} in the configuration", *faults]))


def setting_text(key: str, value: Any) -> str:
    """Returns `key = value` on one line, shortened and without secrets."""
    return f"{key if key.isprintable() else repr(key)} = {SHORT.repr(hidden(key, value))}"


def misread(settings: Spelled) -> dict[str, str]:
    """Returns faults by key of what pydantic would accept: a bool as the number 1, and whole
    numbers that the processes of a run cannot send each other."""
    tree, faults = field_tree(RLConfig), {}
    for key, (value, origin) in settings.items():
        info = tree.get(without_numbers(key))
        if isinstance(value, bool) and info and not accepts_switch(info.annotation):
            faults[key] = f"{key} ({origin})\n    needs a value: {type_name(info.annotation)}"
        elif isinstance(value, int) and info and abs(value) >= 2**63:
            text = setting_text(key, value)
            faults[key] = f"{text} ({origin})\n    is too large; give a number below 2^63"
    return faults


def below(key: str, other: str) -> bool:
    """Returns whether a dotted key equals `other` or lies in its section."""
    return f"{key}.".startswith(f"{other}.")


def place_of(key: str, settings: Spelled) -> str:
    """Returns where a key, its section or one of its own keys was given, as ` (file, variable or
    flag)`; empty if nowhere."""
    places = settings if key not in settings else {key: settings[key]}
    for same in (str, without_numbers):  # a list's only element may be addressed without its index
        for name, (_, origin) in places.items():
            if below(same(key), same(name)) or below(same(name), same(key)):
                return f" ({origin})"
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
    kind, plain = finding["type"], without_numbers(key)
    if kind == "union_tag_invalid":
        choices = f"give one of {finding['ctx']['expected_tags']}".replace("'", "")
        elsewhere = known_elsewhere(f"{key}.{finding['ctx']['tag']}")
        return f"{elsewhere}: {choices}" if elsewhere else choices
    if kind == "extra_forbidden":
        if is_secret_key(key):
            return (
                "unknown key; secrets are read from environment variables: WANDB_API_KEY, HF_TOKEN"
            )
        return types_with(plain) or f"unknown key; {hint(key)}"
    if kind.startswith(("greater_", "less_")):
        about = field_tree(RLConfig)[plain].description or ""
        return f"{finding['msg']}. {' '.join(about.split())}"
    return REMEDIES.get(kind, "").format(key=key) or finding["msg"].removeprefix("Value error, ")


def fault_lines(finding: ErrorDetails, settings: Spelled) -> dict[str, str]:
    """Converts a pydantic error into faults by key, each with key, value, place and remedy. An
    unknown section yields one fault for each setting given in it."""
    tree, kind, value = field_tree(RLConfig), finding["type"], finding["input"]
    key = ""
    for part in map(str, finding["loc"]):  # without the tags and type names that pydantic inserts
        longer = f"{key}.{part}".lstrip(".")
        is_unknown = kind == "extra_forbidden" and part == str(finding["loc"][-1])
        if part.isdigit() or is_unknown or without_numbers(longer) in tree:
            key = longer
    if kind == "union_tag_invalid":
        key, value = f"{key}.type", finding["ctx"]["tag"]
    values = {key: value}
    if kind == "extra_forbidden" and isinstance(value, dict) and not types_with(key):
        values = {
            name: inner for name, (inner, _) in settings.items() if name != key and below(name, key)
        } or values
    return {
        name: (name if kind == "missing" else setting_text(name, inner))
        + f"{place_of(name, settings)}\n    {remedy_for(finding, name)}"
        for name, inner in values.items()
    }
