"""Shows untrusted text on a terminal: escapes control characters and shortens long text."""

import os
import signal
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TextIO

HARMLESS = "\n\t\u200c\u200d"
"""Control and format characters that text needs; the joiners are part of words and emoji."""
BARS = "▁▂▃▄▅▆▇█"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MOST_LISTED = 20
"""Most known words that a message lists."""


def visible(text: str) -> str:
    """Returns the text with invisible characters and those that would control the terminal escaped
    as in Python: ESC as `\\x1b`.

    These are control and format characters (including those that change the text direction), other
    line ends and lone surrogates.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(escaped, text))


def escaped(character: str) -> str:
    """Returns the character, or its escape if it is not harmless."""
    acts = (
        unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and character not in HARMLESS
    )
    return character.encode("unicode_escape").decode() if acts else character


def cut_middle(text: str, max_characters: int, max_lines: int) -> str:
    """Returns the beginning and the end of a long text, with a note between them of how much is
    left out."""
    lines = text.split("\n")
    if len(lines) > max_lines:
        head = max_lines // 2
        tail = max_lines - head
        text = "\n".join(
            [
                *lines[:head],
                f"[... {len(lines) - max_lines:,} lines ...]",
                *lines[len(lines) - tail :],
            ]
        )
    if len(text) > max_characters:
        half = max_characters // 2
        text = (
            f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[len(text) - half :]}"
        )
    return text


def clip(text: str, width: int) -> str:
    """Returns the text in at most `width` columns, with an ellipsis if it was cut."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"[:width]


def digits(value: float, count: int = 3) -> str:
    """Returns a number with `count` significant digits, or whole below a billion: `1020`, not
    `1.02e+03`."""
    return f"{value:.0f}" if 10**count - 0.5 <= abs(value) < 1e9 else f"{value:.{count}g}"


def span(seconds: float) -> str:
    """Formats a duration: `90 s`, `15 min` or `2.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(num_bytes: float) -> str:
    """Formats a number of bytes: 1610612736 is `1.5 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{digits(num_bytes)} {UNITS[unit]}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the known word that `word` may be a misspelling of; empty if none has at least the
    similarity `cutoff` (difflib's ratio)."""
    return next(iter(get_close_matches(word, [*known], 1, cutoff)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the remedy for a word that is not among the known ones: the nearest of them, or
    all."""
    known = [*known]
    if near := nearest(word, known):
        return f"did you mean {near}?"
    rest = f" and {len(known) - MOST_LISTED} more" if len(known) > MOST_LISTED else ""
    return f"there are {', '.join(known[:MOST_LISTED]) or 'none'}{rest}"


def with_error(value: float | None, error: float | None) -> str:
    """Formats a mean with its standard error: `0.512 ± 0.021`."""
    if value is None:
        return "-"
    return f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Returns lines with aligned columns: the first `left` and those without a heading to the
    left, the others to the right."""
    columns = zip(heads, *rows, strict=True)
    aligned = []
    for i, cells in enumerate(columns):
        width = max(map(len, cells))
        align = str.ljust if i < left or not cells[0] else str.rjust
        aligned.append([align(cell, width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """Returns one bar per value, scaled from `low` to `high`; a blank for None."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if value is None else BARS[round(min(max(value - low, 0.0), high - low) * scale)]
        for value in values
    )


def say(text: str) -> None:
    """Prints a line to stderr; stdout is reserved for the result of a command."""
    print(visible(text), file=sys.stderr, flush=True)


def discard_output() -> int:
    """Has further output go nowhere, because its reader, such as `head`, has exited. Returns the
    exit code for that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


class Lines:
    """Writes lines to a stream. A full disk behind `rl > log` loses lines but does not end the
    run; the next line written says how many."""

    def __init__(self, out: TextIO):
        self.out, self.lost = out, 0

    def say(self, text: str) -> None:
        """Writes a line. Raises BrokenPipeError if the reader has closed the stream."""
        try:
            if self.lost:
                print(
                    f"({self.lost} lines could not be written here; is the disk full?)",
                    file=self.out,
                )
            print(text, file=self.out, flush=True)
            self.lost = 0
        except BrokenPipeError:
            raise
        except OSError:
            self.lost += 1
