"""Guesses what an unknown key was meant to be. A doubtful guess is not shown."""

import difflib

from rl.config.fields import field_tree, models_in, tags
from rl.config.foreign import known_elsewhere
from rl.config.run import ALIASES, RUN_WIDE, SECTIONS, RLConfig

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
    in_section = alike(plain) if "." in plain else []
    if not in_section and (elsewhere := known_elsewhere(plain)):
        return elsewhere
    meant = in_section or below_a_section(plain) or same_last_part(plain) or alike(plain)
    return f"did you mean {' or '.join(meant[:2])}?" if meant else "see --help all"


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


def below_a_section(key: str) -> list[str]:
    """Returns the known keys that end with this dotted key: `optim.lr` matches trainer.optim.lr."""
    return [name for name in field_tree(RLConfig) if "." in key and name.endswith(f".{key}")]


def same_last_part(key: str) -> list[str]:
    """Returns known keys with the same last part as a key without a section, or with a wrong
    section of rl, least nested first; empty if the part is too common."""
    first, _, rest = key.partition(".")
    words = {name.split(".")[-1] for name in field_tree(RLConfig)}
    last = key.split(".")[-1]
    if last in ALIASES and first in (*SECTIONS, *RUN_WIDE):
        return [ALIASES[last]]
    close = (
        [last]
        if last in words
        else difflib.get_close_matches(
            last, {word for word in words if len(word) > 4}, n=1, cutoff=SURE
        )
    )
    found = [
        name
        for name in (*field_tree(RLConfig), *ALIASES)
        if close and name.split(".")[-1] == close[0]
    ]
    if len(found) > MOST or (rest and first not in (*SECTIONS, *RUN_WIDE)):
        return []
    return sorted(found, key=lambda name: name.count("."))


def alike(key: str) -> list[str]:
    """Returns the known key whose parts all match this one's up to misspelling, as a list of at
    most one."""
    parts = key.split(".")
    for name in (*field_tree(RLConfig), *ALIASES):
        others = name.split(".")
        if len(others) == len(parts) and all(map(same_word, parts, others)):
            return [name]
    return []


def same_word(word: str, known: str) -> bool:
    """Returns whether a word equals a known one or is a misspelling of it."""
    return word == known or difflib.SequenceMatcher(None, word, known).ratio() >= ALIKE
