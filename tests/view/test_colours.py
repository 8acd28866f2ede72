"""The colours of both themes: WCAG's AA, 4.5, wherever the style sheets put text on a ground. What pages make of it test_page.py sees."""

import re
from itertools import product

import pytest

from rl.view.server import PAGE

STYLE, PARTS = ((PAGE / name).read_text() for name in ("style.css", "parts.css"))
GROUNDS = {
    "--ink": ("--paper", "--card", "--hover", "--accent-soft", "--bad-soft", "--good-soft", "--warn-soft"),
    "--faint": ("--paper", "--card", "--hover", "--accent-soft"),
    "--accent": ("--paper", "--card", "--hover", "--accent-soft"),
    "--good": ("--card", "--good-soft"),
    "--bad": ("--card", "--bad-soft"),
    "--warn": ("--card", "--warn-soft"),
    "--card": ("--accent",),
    **{f"--c{i}": ("--card",) for i in range(8)},
}
"""Text by its colour, and what it stands on: curves' numbers have the colours of their lines."""
Colour = tuple[float, ...]


def themes() -> dict[str, dict[str, str]]:
    """The colours by name. Dark is there twice, as chosen and as the system has it."""
    found = [dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{([^{}]*--paper: #[^{}]*)\}", STYLE)]
    light, dark, chosen = found
    assert dark == chosen and light.keys() == dark.keys()
    return {"light": light, "dark": dark}


def rgb(colour: str) -> Colour:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def mixed(colour: Colour, share: float, ground: Colour) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(colour, ground, strict=True))


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's ratio of relative luminances."""

    def light(colour: Colour) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme):
    colours = {name: rgb(colour) for name, colour in themes()[theme].items()}
    pairs = [pair for text, grounds in GROUNDS.items() for pair in product([text], grounds)]
    assert {pair: ratio for pair in pairs if (ratio := contrast(*(colours[name] for name in pair))) < 4.5} == {}
    tokens = re.findall(r"\.([qsv]-?\d) \{ background: color-mix\(in srgb, var\((--c\d)\) (\d+)%, transparent\)", PARTS)
    assert len(tokens) == 19
    behind = {name: mixed(colours[colour], int(share) / 100, colours["--card"]) for name, colour, share in tokens}
    assert {name: ratio for name, ground in behind.items() if (ratio := contrast(colours["--ink"], ground)) < 4.5} == {}
