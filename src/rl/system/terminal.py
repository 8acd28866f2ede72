"""Text from elsewhere on a terminal: what it must not do there, and how much of it is shown."""

import unicodedata
from collections.abc import Sequence

HARMLESS = "\n\t\u200c\u200d"
"""Control and format characters that text needs; the joiners are part of words and of emoji."""
BARS = "▁▂▃▄▅▆▇█"


def visible(text: str) -> str:
    """The text with each character that would act on a terminal, or that hides, written as Python does: ESC as `\\x1b`.

    These are control and format characters (among them those that turn the direction of text), other line ends and lone surrogates.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(escaped, text))


def escaped(character: str) -> str:
    """The character, or its escape if it is not harmless."""
    acts = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in HARMLESS
    return character.encode("unicode_escape").decode() if acts else character


def cut_middle(text: str, max_characters: int, max_lines: int) -> str:
    """The beginning and the end of a long text, and between them how much is left out."""
    lines = text.split("\n")
    if len(lines) > max_lines:
        head = max_lines // 2
        tail = max_lines - head
        text = "\n".join([*lines[:head], f"[... {len(lines) - max_lines:,} lines ...]", *lines[len(lines) - tail :]])
    if len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[len(text) - half :]}"
    return text


def clip(text: str, width: int) -> str:
    """The text in at most `width` columns, its cut end marked."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[:width]


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """A bar for each value, its height between those of `low` and `high`; a blank for None."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round(min(max(value - low, 0.0), high - low) * scale)] for value in values)
