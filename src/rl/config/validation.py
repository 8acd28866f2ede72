"""From nested settings to an RLConfig, with every fault that can be known: what is faulty is taken out, and the rest is looked at again."""

import copy
import re
from typing import Any

from pydantic import ValidationError

from rl.config.check import Fault
from rl.config.faults import Spelled, below, fault_lines, key_of
from rl.config.fields import field_tree
from rl.config.hints import without_numbers
from rl.config.run import RLConfig

PASSES = 5
"""Times that what is left is looked at again; a fault can hide another one below it, but not many in a row."""
MODES = ("sft", "trainer.data", "trainer.data.fake")
"""Settings that decide what a run is. With a fault in one of them nothing can be said about the others together."""


def validate(nested: dict[str, Any], settings: Spelled, faults: dict[str, str]) -> RLConfig | None:
    """The configuration, or what is left of it without the faulty settings; None if nothing sound is left. Adds to the faults by key."""
    rest: Any = copy.deepcopy(nested)
    for key in faults:
        take_out(rest, key.split("."))
    for _ in range(PASSES):
        try:
            return RLConfig.model_validate(rest)
        except ValidationError as error:
            found = error.errors()
        known = list(faults)
        for finding in found:
            key = key_of(finding["loc"])
            if finding["type"] == "missing":
                put_in(rest, key.split("."))
            else:
                take_out(rest, [*key.split("."), *(["type"] if finding["type"] == "union_tag_invalid" else [])])
            follows = any(below(key, name) for name in known) or follows_from_type(finding["type"], key, known)
            if not follows:
                faults |= {name: line for name, line in fault_lines(finding, settings).items() if name not in faults}
    return None


def follows_from_type(kind: str, key: str, faulty: list[str]) -> bool:
    """Whether a key is unknown only because the `type` of its section is: another class has it."""
    section = key.rpartition(".")[0]
    return kind == "extra_forbidden" and f"{section}.type" in faulty and without_numbers(key) in field_tree(RLConfig)


def take_out(table: Any, keys: list[str]) -> None:
    """Removes a setting from nested tables, if it is there: of a list of values, such as betas, the whole list."""
    first, *rest = keys
    if isinstance(table, list) and first.isdigit() and int(first) < len(table):
        return take_out(table[int(first)], rest) if rest else table.clear()
    if isinstance(table, list) and len(table) == 1:
        return take_out(table[0], keys)
    if isinstance(table, dict):
        if first.isdigit() and first not in table:  # a table that stands for a list of one
            return take_out(table, rest) if rest else None
        if not rest or (all(part.isdigit() for part in rest) and not holds_tables(table.get(first))):
            table.pop(first, None)
        else:
            take_out(table.get(first), rest)
    return None


def holds_tables(value: Any) -> bool:
    """Whether a value is a list of tables, or the one table that may stand for it."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))


def put_in(table: Any, keys: list[str]) -> None:
    """Gives a missing setting some text, so that the rest can be looked at."""
    first, *rest = keys
    if isinstance(table, list):
        if first.isdigit() and rest and int(first) < len(table):
            put_in(table[int(first)], rest)
    elif isinstance(table, dict) and rest:
        if first.isdigit() and first not in table:
            return put_in(table, rest)
        if table.get(first) is True or first not in table:
            table[first] = {}
        put_in(table[first], rest)
    elif isinstance(table, dict):
        table[first] = "?"
    return None


def in_doubt(faults: dict[str, str]) -> set[str]:
    """The faulty keys, and those that a remedy says were meant by them. Of a `type` its whole section: it says which keys that has."""
    tree = field_tree(RLConfig)
    meant = (word for line in faults.values() for word in re.findall(r"[\w.]*[._][\w.]*\w", line.splitlines()[-1]) if word in tree)
    return {name.removesuffix(".type") for name in (*faults, *meant)}


def holds_anyway(fault: Fault, doubtful: set[str]) -> bool:
    """Whether a fault between settings is one whatever the doubtful ones were meant to be: none of them is its key or decides what the
    run is, and its remedy names none of them."""
    key, _, remedy = fault
    for name in doubtful:
        last, place = name.rpartition(".")[2], key if name != without_numbers(name) else without_numbers(key)
        plain_word = name == last and "_" not in name  # a run-wide key such as `name`: in a remedy it is a word like any other
        if any(below(mode, name) for mode in MODES) or below(place, name) or below(name, place):
            return False
        if not plain_word and re.search(rf"\b{re.escape(last)}\b", remedy):
            return False
    return True
