"""`rl compare`: prints two runs side by side, from their files: differing settings, curves,
evaluations."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.options import take
from rl.launch.children import Children
from rl.records.comparison import eval_points, setting_diffs
from rl.records.run import Run
from rl.run_dir.numbers import Curve
from rl.system.terminal import clip, digits, sparkline, visible

HELP = """usage: rl compare A B

Prints two runs side by side, alive or dead: settings that differ, curves of the usual metrics, and
the evaluations of all versions that either run evaluated. A and B are run directories, or run names
under outputs/. A curve shows the mean over each of several intervals of steps, and a line of bars
on the same scale for both runs. For the difference between two evaluations with its confidence
interval, on the same examples, use: rl eval --policy A@best --compare B@best
"""
NAMES = ("A", "B")
METRICS = (
    ("orchestrator", "reward/mean"),
    ("trainer", "loss/mean"),
    ("trainer", "validation/loss"),
    ("trainer", "entropy/mean"),
    ("orchestrator", "rollouts/length_mean"),
    ("orchestrator", "rollouts/truncated"),
    ("orchestrator", "rollouts/errored"),
    ("orchestrator", "rollouts/zero_advantage"),
    ("orchestrator", "rollouts/missing"),
    ("orchestrator", "lag/mean"),
    ("trainer", "mismatch_kl/mean"),
    ("trainer", "optim/grad_norm"),
    ("trainer", "time/step"),
)
"""Source and name of the metrics to show, if a run has them; rewards of several environments
replace the first, their mix."""
SHAPES = ((6, 24), (6, 12), (4, 12), (3, 8), (2, 4))
"""Numbers of intervals to print as numbers and as bars: the first pair that fits the terminal;
without a terminal, the first."""
VALUE_WIDTHS = (10, 60)
"""Minimum and maximum width of a differing setting's value; longer values are cut."""
SAME_SEED = (
    "it decides the order of tasks and the draws of evaluations; training rollouts are "
    "sampled without a seed, so the runs differ from "
    "their first batch on, even with equal settings"
)
SAME_SEED_SFT = (
    "it decides the order of the examples; with equal settings, data and number of threads the "
    "weights are equal, too"
)
"""What a common seed says about two runs; see docs/reliability.md."""
Stretches = list[tuple[int, int]]
"""First and last step of each interval."""


def main(args: list[str], _children: Children) -> int:
    _, rest = take("rl compare", args, (), HELP)
    if len(rest) != 2 or any(word.startswith(("-", "@")) for word in rest):
        fail(
            "rl compare",
            "which runs? Give two directories or names: rl compare outputs/x outputs/y",
        )
    roots = [named_run(spec) for spec in rest]
    runs = [Run(root) for root in roots]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    named = zip(NAMES, roots, runs, strict=True)
    of = (
        "" if run.config.sft and run.config.sft.epochs else f" of {run.config.max_steps}"
        for run in runs
    )
    whose = (f", {run.origin}" if run.origin else "" for run in runs)
    about = [
        f"{name}  {root}: {run.step}{last} steps{branch}"
        for (name, root, run), last, branch in zip(named, of, whose, strict=True)
    ]
    print("\n".join([*map(visible, about), ""]))
    for part in (settings(runs, width), curves(runs, width), evaluations(runs)):
        print("\n".join([*(clip(line, width or len(line)) for line in map(visible, part)), ""]))
    return 0


def settings(runs: list[Run], width: int | None) -> list[str]:
    """Returns a table of the settings that differ, except the run's location, and what a common
    seed says."""
    changed = setting_diffs([run.config for run in runs])
    if not changed:
        return ["no setting differs", *seed_lines(runs, width)]
    least, most = VALUE_WIDTHS
    if width:
        most = max(
            least, min(most, (width - max(len(one.key) for one in changed)) // len(runs) - 2)
        )
    rows = [
        [one.key, *(clip("-" if value is None else value, most) for value in one.values)]
        for one in changed
    ]
    return table(["settings that differ", *NAMES], rows, left=3) + seed_lines(runs, width)


def seed_lines(runs: list[Run], width: int | None) -> list[str]:
    """Returns what it says about two runs of one kind that they have the same seed; nothing for
    other runs."""
    first, second = (run.config for run in runs)
    if first.seed != second.seed or bool(first.sft) != bool(second.sft):
        return []
    text = f"both have seed {first.seed}: {SAME_SEED_SFT if first.sft else SAME_SEED}"
    return textwrap.wrap(text, width) if width else [text]


def stretches(last: int, count: int) -> Stretches:
    """Divides the steps from 1 to `last` into at most `count` intervals of nearly equal length:
    (first, last) of each."""
    count = min(count, last)
    ends = [round(last * i / count) for i in range(count + 1)]
    return [(before + 1, end) for before, end in pairwise(ends)]


def means(points: Curve, parts: Stretches) -> list[float | None]:
    """Returns the mean of a curve over each interval; None where it has no value."""
    steps, values = points
    inside = (values[(steps >= first) & (steps <= last)] for first, last in parts)
    return [float(part.mean()) if len(part) else None for part in inside]


def curves(runs: list[Run], width: int | None) -> list[str]:
    """Returns a table of both runs' metrics over the steps of the longer run."""
    last = max(
        [
            0,
            *(
                step
                for run in runs
                for source in ("trainer", "orchestrator")
                for step in run.numbers.steps(source)[-1:]
            ),
        ]
    )
    if not last:
        return ["neither run has trained a step"]
    found = metric_curves(runs)
    lines: list[str] = []
    for numbers, bars in SHAPES:
        lines = curve_table(found, stretches(last, numbers), stretches(last, bars))
        if width is None or max(map(len, lines)) <= width:
            break
    return lines


def curve_table(
    found: list[tuple[str, list[Curve]]], parts: Stretches, bars: Stretches
) -> list[str]:
    """Returns the lines of the curves: means over `parts` as numbers, and over `bars` as bars."""
    rows = []
    for name, both in found:
        values = np.concatenate([values for _, values in both])
        for run, points in zip(NAMES, both, strict=True):
            cells = ["-" if value is None else digits(value, 4) for value in means(points, parts)]
            drawn = sparkline(means(points, bars), float(values.min()), float(values.max()))
            rows.append([name if run == NAMES[0] else "", run, *cells, drawn])
    heads = [str(first) if first == end else f"{first}-{end}" for first, end in parts]
    return table(["steps", "", *heads, ""], rows, left=2)


def metric_curves(runs: list[Run]) -> list[tuple[str, list[Curve]]]:
    """Returns name and both curves of each metric that at least one run has and that is not 0
    throughout."""
    names = sorted({name for run in runs for name in run.numbers.names})
    rewards = [name for name in names if name.startswith("reward/") and name.count("/") > 1]
    by_env, parts = (
        [name for name in rewards if name.endswith("/mean")],
        [name for name in rewards if not name.endswith("/mean")],
    )
    # the loss is informative only for SFT
    shown = [(source, name) for source, name in METRICS if "epoch" in names or name != "loss/mean"]
    several = len(by_env) > 1
    shown[0 if several else 1 : 1] = [
        ("orchestrator", name) for name in [*(by_env if several else []), *parts]
    ]
    found = [(name, [run.numbers.curve(name, source) for run in runs]) for source, name in shown]
    return [(name, both) for name, both in found if any(values.any() for _, values in both)]


def evaluations(runs: list[Run]) -> list[str]:
    """Returns a table of each evaluation's mean reward by version, and B's minus A's."""
    rows, before = [], ""
    for point in eval_points(runs):
        a, b = point.means
        gap = "" if a is None or b is None else f"{b - a:+.3f}"
        rows.append(
            [
                point.name if point.name != before else "",
                str(point.version),
                *map(with_error, point.means, point.errors),
                gap,
            ]
        )
        before = point.name
    return (
        table(["evaluation", "version", *NAMES, "B - A"], rows, left=1)
        if rows
        else ["neither run has an evaluation"]
    )


def with_error(value: float | None, error: float | None) -> str:
    """Formats a mean with its standard error over examples: `0.512 ± 0.021`."""
    return (
        "-" if value is None else f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], left: int) -> list[str]:
    """Returns lines with aligned columns: the first `left` and the column of bars to the left,
    the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    aligned = [
        [
            cell.ljust(width) if i < left or not heads[i] else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [heads, *rows]
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]
