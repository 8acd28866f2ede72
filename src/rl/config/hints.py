"""What was probably meant by a key that is not known. A doubtful guess is none."""

import difflib

from rl.config.fields import field_tree, models_in, tags
from rl.config.foreign import known_elsewhere
from rl.config.run import RUN_WIDE, SECTIONS, RLConfig

ALIASES = {"steps": "max_steps", "learning_rate": "trainer.optim.lr", "trainer.learning_rate": "trainer.optim.lr"}
ALIKE = 0.8
"""Likeness (difflib's ratio) above which two words count as one, misspelt."""
SURE = 0.85
"""The same, where nothing else of a key says what is meant."""
MOST = 4
"""Keys that may share a last part for it to say which is meant; `name` alone says nothing."""


def without_numbers(key: str) -> str:
    """A dotted key without the numbers that pick an element of a list: the key of its field."""
    return ".".join(part for part in key.split(".") if not part.isdigit())


def hint(key: str) -> str:
    """What to do about an unknown key: what it is called here, which `type` has it, which known keys it resembles, or where all are."""
    plain = without_numbers(key)
    if kinds := types_with(plain):
        return kinds
    in_section = alike(plain) if "." in plain else []
    if not in_section and (elsewhere := known_elsewhere(plain)):
        return elsewhere
    meant = in_section or below_a_section(plain) or same_last_part(plain) or alike(plain)
    return f"did you mean {' or '.join(meant[:2])}?" if meant else "see --help all"


def types_with(key: str) -> str:
    """For a key that only some classes of a union have, the types that have it, in a sentence; empty for any other key."""
    section, _, name = key.rpartition(".")
    info = field_tree(RLConfig).get(section)
    kinds = [tag for model in (models_in(info.annotation) if info else ()) if name in model.model_fields for tag in tags(model)]
    return f"goes with {section}.type = {' or '.join(filter(None, [', '.join(kinds[:-1]), *kinds[-1:]]))}" if kinds else ""


def below_a_section(key: str) -> list[str]:
    """Known keys that end as this one does from a dot on: `optim.lr` is trainer.optim.lr."""
    return [name for name in field_tree(RLConfig) if "." in key and name.endswith(f".{key}")]


def same_last_part(key: str) -> list[str]:
    """Known keys with the last part of one that is given without a section, or with a wrong one of ours; the general first. None if the
    part is common."""
    first, _, rest = key.partition(".")
    words = {name.split(".")[-1] for name in field_tree(RLConfig)}
    last = key.split(".")[-1]
    if last in ALIASES and first in (*SECTIONS, *RUN_WIDE):
        return [ALIASES[last]]
    close = [last] if last in words else difflib.get_close_matches(last, {word for word in words if len(word) > 4}, n=1, cutoff=SURE)
    found = [name for name in (*field_tree(RLConfig), *ALIASES) if close and name.split(".")[-1] == close[0]]
    if len(found) > MOST or (rest and first not in (*SECTIONS, *RUN_WIDE)):
        return []
    return sorted(found, key=lambda name: name.count("."))


def alike(key: str) -> list[str]:
    """The known key that differs from this one by a misspelt part or two, if there is one."""
    parts = key.split(".")
    for name in (*field_tree(RLConfig), *ALIASES):
        others = name.split(".")
        if len(others) == len(parts) and all(map(same_word, parts, others)):
            return [name]
    return []


def same_word(word: str, known: str) -> bool:
    """Whether a word is a known one, or it misspelt."""
    return word == known or difflib.SequenceMatcher(None, word, known).ratio() >= ALIKE
