"""Draws the curve.png of recipes from their recipe.toml, and writes the table of docs/recipes.md.

`uv run scripts/recipe_curves.py [NAME ...]`; without a name, draws all of them. One that was never
run has nothing to draw.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rl.commands.recipe import RECIPES, Recipe, names, read
from rl.config.command_line import read_toml
from rl.system.errors import ConfigError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
HEAD = "| name | task | model | minutes | seeds | before -> after |\n|---|---|---|---|---|---|\n"


def model(name: str, recipe: Recipe) -> str:
    """The model that the first stage with a file starts from, without its owner."""
    words = next(words for words in map(shlex.split, recipe.stages) if "@" in words)
    return read_toml(str(RECIPES / name / words[words.index("@") + 1]))["model"]["name"].rpartition(
        "/"
    )[2]


def table() -> str:
    """The rows of all recipes."""
    rows = []
    for name in names():
        recipe = read(name)
        link = f"[`{name}`](../configs/recipes/{name}/README.md)"
        rows.append(
            f"| {link} | {recipe.title} | {model(name, recipe)} | {recipe.time} | "
            f"{len(recipe.seeds)} | {recipe.ends} |\n"
        )
    return "".join(rows)


def drawn_from(recipe: Recipe) -> str:
    """What the picture notes of the numbers that it shows, by which a test sees that it is of
    the present ones."""
    return repr((recipe.measure, recipe.curves))


def draw(name: str, recipe: Recipe) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    panel = figure.subplots()
    for seed, values in recipe.seeds.items():
        panel.plot(recipe.steps, values, marker="o", label=f"seed {seed}")
    panel.set_title(recipe.title, fontsize=10)
    panel.set_xlabel("step")
    panel.set_ylabel(recipe.measure, fontsize=8)
    panel.set_ylim(
        bottom=min(0.0, *(value for values in recipe.seeds.values() for value in values))
    )
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    figure.savefig(
        RECIPES / name / "curve.png", dpi=100, metadata={"Description": drawn_from(recipe)}
    )


def with_range(values: Sequence[float]) -> str:
    """The mean of several seeds and their range, or one seed's value."""
    return f"{fmean(values):.2f}" + f" ({min(values):.2f} to {max(values):.2f})" * (len(values) > 1)


def write_table(head: str, rows: str) -> None:
    """Puts these rows below the one table of the page with this head."""
    text, found = re.subn(rf"{re.escape(head)}(\|.*\n)*", lambda _: head + rows, PAGE.read_text())
    assert found == 1, f"{PAGE} has {found} tables with this head: {head}"
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()
    for name in args.names or names():
        try:
            recipe = read(name)
        except ConfigError as error:
            parser.error(str(error))
        if recipe.curves:
            draw(name, recipe)
        print(
            RECIPES / name / "curve.png" if recipe.curves else f"{name} was never run: no picture"
        )
    write_table(HEAD, table())


if __name__ == "__main__":
    main()
