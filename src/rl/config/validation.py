"""Validates layers of settings into an RLConfig and finds as many faults as possible: removes
faulty settings and checks the rest again."""

import re
from functools import partial

from pydantic import ValidationError

from rl.config.base import Fault
from rl.config.faults import Spelled, below, fault_lines, key_of
from rl.config.fields import field_tree
from rl.config.hints import without_numbers
from rl.config.run import RLConfig

PASSES = 5
"""Times that the remaining settings are checked again; a fault can hide another one below it,
but rarely many in a row."""
MODES = ("sft", "serve", "trainer.data", "trainer.data.fake")
"""Settings that decide the kind of run. With a fault in one of them, combinations of other
settings cannot be checked."""


def validate(layers: list[Spelled], faults: dict[str, str]) -> RLConfig | None:
    """Returns the configuration without faulty settings, or None if nothing valid is left. Adds
    to the faults by key."""
    from rl.config.sources import Edit, load, place_value, take_out, together, without_replaced

    layers = without_replaced(layers)
    settings = together(layers)
    edits: list[Edit] = [partial(take_out, keys=key.split(".")) for key in faults]
    for _ in range(PASSES):
        try:
            return load(layers, faults, edits)
        except ValidationError as error:
            found = error.errors()
        known = list(faults)
        for finding in found:
            key = key_of(finding["loc"])
            if finding["type"] == "missing":
                # so that the rest can be checked
                edits.append(partial(place_value, keys=key.split("."), value="?"))
            else:
                faulty = f"{key}.type" if finding["type"] == "union_tag_invalid" else key
                edits.append(partial(take_out, keys=faulty.split(".")))
            follows = any(below(key, name) for name in known) or follows_from_type(
                finding["type"], key, known
            )
            if not follows:
                faults |= {
                    name: line
                    for name, line in fault_lines(finding, settings).items()
                    if name not in faults
                }
    return None


def follows_from_type(kind: str, key: str, faulty: list[str]) -> bool:
    """Returns whether a key is unknown only because the `type` of its section is invalid:
    another class has it."""
    section = key.rpartition(".")[0]
    return (
        kind == "extra_forbidden"
        and f"{section}.type" in faulty
        and without_numbers(key) in field_tree(RLConfig)
    )


def in_doubt(faults: dict[str, str]) -> set[str]:
    """Returns the faulty keys and those that a remedy suggests. A `type` stands for its whole
    section, whose keys depend on it."""
    tree = field_tree(RLConfig)
    meant = (
        word
        for line in faults.values()
        for word in re.findall(r"[\w.]*[._][\w.]*\w", line.splitlines()[-1])
        if word in tree
    )
    return {name.removesuffix(".type") for name in (*faults, *meant)}


def holds_anyway(fault: Fault, doubtful: set[str]) -> bool:
    """Returns whether a fault between settings holds whatever the doubtful ones were meant to
    be: none of them is its key, decides the kind of run, or is named in its remedy."""
    key, _, remedy = fault
    for name in doubtful:
        last, place = (
            name.rpartition(".")[2],
            key if name != without_numbers(name) else without_numbers(key),
        )
        # a run-wide key such as `name` is an ordinary word in a remedy
        plain_word = name == last and "_" not in name
        if any(below(mode, name) for mode in MODES) or below(place, name) or below(name, place):
            return False
        if not plain_word and re.search(rf"\b{re.escape(last)}\b", remedy):
            return False
    return True
