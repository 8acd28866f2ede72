"""Faults of a configuration in the user's words: key, value, where it stands, and what to do about it."""

import difflib
import reprlib
from collections.abc import Collection, Iterable
from typing import Any

from pydantic import ValidationError

from rl.config.fields import accepts_switch, field_tree, models_in, tags, type_name
from rl.config.run import RLConfig
from rl.system.credentials import hidden, is_secret_key
from rl.system.errors import ConfigError

ALIASES = {"steps": "max_steps", "learning_rate": "trainer.optim.lr", "trainer.learning_rate": "trainer.optim.lr"}
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxdict = SHORT.maxlist = 12

Spelled = dict[str, tuple[Any, str]]
"""Settings as the user gave them: dotted key -> (value, where it stands)."""


def raise_all(faults: list[str]) -> None:
    """Raises a ConfigError that says how many faults there are, if any, and each of them."""
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError("\n".join([f"{count} in the configuration", *(f"  {fault}" for fault in faults)]))


def setting_text(key: str, value: Any) -> str:
    """`key = value` in one line, not too long, and without secrets."""
    return f"{key if key.isprintable() else repr(key)} = {SHORT.repr(hidden(key, value))}"


def without_numbers(key: str) -> str:
    """A dotted key without the numbers that pick an element of a list: the key of its field."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def did_you_mean(key: str) -> str:
    """The known keys closest to an unknown one: with the same last part, else spelled alike; else where all are listed."""
    known, plain = [*field_tree(RLConfig), *ALIASES], without_numbers(key)
    last = plain.split(".")[-1]
    close = sorted((name for name in known if name.split(".")[-1] == last), key=lambda name: name.count("."))  # the general first
    close = close or difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    if not close:
        by_last_part = {name.split(".")[-1]: name for name in reversed(known)}
        close = [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, n=1, cutoff=0.7)]
    return f"did you mean {' or '.join(close[:2])}?" if close else "see --help all"


def key_of(location: Iterable[int | str]) -> str:
    """The dotted key of a place that pydantic names: in a union it puts the `type` of the class among the keys."""
    tree, parts = field_tree(RLConfig), list[str]()
    for part in map(str, location):
        info = tree.get(without_numbers(".".join(parts)))
        if not (info and any(part in tags(model) for model in models_in(info.annotation))):
            parts.append(part)
    return ".".join(parts)


def without_value(settings: Spelled) -> dict[str, str]:
    """Faults by key of settings that are true or false but want another type: pydantic would take `--seed` without a value for 1."""
    tree, faults = field_tree(RLConfig), {}
    for key, (value, place) in settings.items():
        info = tree.get(without_numbers(key))
        if isinstance(value, bool) and info and not accepts_switch(info.annotation):
            faults[key] = f"{key} ({place})\n    needs a value: {type_name(info.annotation)}"
    return faults


def below(key: str, other: str) -> bool:
    """Whether a dotted key is another one, or lies in its section."""
    return f"{key}.".startswith(f"{other}.")


def place_of(key: str, settings: Spelled) -> str:
    """Where a key, or what is above or below it, was given: ` (file, variable or flag)`; empty if nowhere."""
    for same in (str, without_numbers):  # a setting of the only element of a list is given without a number
        for name, (_, place) in settings.items():
            if below(same(key), same(name)) or below(same(name), same(key)):
                return f" ({place})"
    return ""


def fault_lines(error: ValidationError, settings: Spelled, known: Collection[str]) -> list[str]:
    """Pydantic's findings in the user's terms: key, value, place, remedy. Without those about `known` keys."""
    lines = []
    for finding in error.errors():
        key = key_of(finding["loc"])
        if any(below(key, name) for name in known):
            continue
        text, remedy = setting_text(key, finding["input"]), finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "union_tag_invalid":
            text = setting_text(f"{key}.type", finding["ctx"]["tag"])
            remedy = "give one of " + finding["ctx"]["expected_tags"].replace("'", "")
        elif finding["type"] == "extra_forbidden":
            secret = is_secret_key(key) and "secrets are read from environment variables: WANDB_API_KEY, HF_TOKEN"
            remedy = f"unknown key; {secret or did_you_mean(key)}"
        elif finding["type"] == "missing":
            text, remedy = key, "is missing; set it"
        lines.append(f"{text}{place_of(key, settings)}\n    {remedy}")
    return lines
