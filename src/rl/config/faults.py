"""Describes faults of a configuration in the user's terms: key, value, where it was given, and
the remedy. Of an unknown key it guesses what was meant; a doubtful guess is not shown.
"""

import reprlib
from difflib import SequenceMatcher
from typing import Any

from pydantic_core import ErrorDetails

from rl.config.fields import accepts_switch, field_tree, models_in, tags, type_name
from rl.config.foreign import known_elsewhere
from rl.config.run import ALIASES, RUN_WIDE, SECTIONS, RLConfig
from rl.system.credentials import hidden, is_secret_key
from rl.system.errors import ConfigError

ALIKE = 0.8
"""Similarity (difflib's ratio) above which one word counts as a misspelling of another."""
SURE = 0.85
"""The same, where no other part of the key supports the guess."""
MOST = 4
"""Most keys that may share a last part for it to be a useful hint; one like `name` is too
common."""


def without_numbers(key: str) -> str:
    """Returns a dotted key without list indices: the key of its field."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def hint(key: str) -> str:
    """Returns the remedy for an unknown key: its name here, the `type` that has it, similar
    known keys, or the list of all keys."""
    plain = without_numbers(key)
    if remedy := types_with(plain):
        return remedy
    path = plain.split(".")
    meant = ending_like(path, ALIKE) if len(path) > 1 else []
    if not meant and (elsewhere := known_elsewhere(plain)):
        return elsewhere
    if not meant and (len(path) == 1 or path[0] in (*SECTIONS, *RUN_WIDE)):
        meant = ending_like(path[-1:], SURE)
    return f"did you mean {' or '.join(meant[:2])}?" if meant else "see --help all"


def ending_like(words: list[str], cutoff: float) -> list[str]:
    """Returns the known keys whose last parts are these words up to misspelling, least nested
    first; empty if there are too many."""
    keys = []
    for name in (*field_tree(RLConfig), *ALIASES):
        path = name.split(".")[-len(words) :]
        if len(path) == len(words) and all(
            SequenceMatcher(None, word, part).ratio() >= cutoff
            for word, part in zip(words, path, strict=True)
        ):
            keys.append(ALIASES.get(name, name))
    keys = sorted(dict.fromkeys(keys), key=lambda name: name.count("."))
    return keys if len(keys) <= MOST else []


def types_with(key: str) -> str:
    """Returns a sentence that lists the types with this key, if only some classes of a union
    have it; otherwise empty."""
    section, _, name = key.rpartition(".")
    info = field_tree(RLConfig).get(section)
    kinds = [
        tag
        for model in (models_in(info.annotation) if info else ())
        if name in model.model_fields
        for tag in tags(model)
    ]
    return (
        f"is only valid with {section}.type = "
        f"{' or '.join(filter(None, [', '.join(kinds[:-1]), *kinds[-1:]]))}"
        if kinds
        else ""
    )


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
