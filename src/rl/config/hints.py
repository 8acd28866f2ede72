"""Guesses what an unknown key was meant to be. A doubtful guess is not shown."""

from difflib import SequenceMatcher

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
