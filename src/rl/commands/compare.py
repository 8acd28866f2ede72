"""`rl compare`: prints two runs side by side, from their files: differing settings, curves,
evaluations, cost."""

import shutil
import sys
import textwrap
from itertools import pairwise

import numpy as np

from rl.commands.options import runs_given
from rl.launch.children import Children
from rl.records.comparison import eval_points, setting_diffs
from rl.records.run import Run
from rl.run_dir.cost import totals
from rl.run_dir.numbers import Curve
from rl.system.terminal import clip, digits, sparkline, table, visible, with_error

HELP = """usage: rl compare A B

Prints two runs side by side, alive or dead: settings that differ, curves of the usual metrics, the
evaluations of all versions that either run evaluated, and what they cost. A and B are run
directories, or run names under outputs/. A curve shows the mean over each of several intervals of
steps, and a line of bars on the same scale for both runs. For the difference between two
evaluations with its confidence interval, on the same examples, use: rl eval --policy A@best
--compare B@best
"""
NAMES = ("A", "B")
METRICS = (
    "loss/mean",
    "validation/loss",
    "entropy/mean",
    "rollouts/length_mean",
    "rollouts/truncated",
    "rollouts/errored",
    "rollouts/zero_advantage",
    "rollouts/missing",
    "lag/mean",
    "mismatch_kl/mean",
    "optim/grad_norm",
    "time/step",
)
"""The metrics to show after the rewards, if a run has them."""
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
    roots = runs_given("rl compare", args, (), HELP, count=2)[1]
    runs = [Run(root) for root in roots]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name, root, run in zip(NAMES, roots, runs, strict=True):
        sft, origin = run.config.sft, f", {run.origin}" if run.origin else ""
        last = "" if sft and sft.epochs else f" of {run.config.max_steps}"
        print(visible(f"{name}  {root}: {run.step}{last} steps{origin}"))
    for part in (settings(runs, width), curves(runs, width), evaluations(runs), costs(runs)):
        lines = (clip(line, width or len(line)) for line in map(visible, part))
        print("", *lines, sep="\n")
    print()
    return 0


def settings(runs: list[Run], width: int | None) -> list[str]:
    """Returns a table of the settings that differ, except the run's location, and what a common
    seed says."""
    changed = setting_diffs([run.config for run in runs])
    if not changed:
        return ["no setting differs", *seed_lines(runs, width)]
    least, most = VALUE_WIDTHS
    if width:
        room = (width - max(len(setting.key) for setting in changed)) // len(runs) - 2
        most = max(least, min(most, room))
    rows = [[s.key, *(clip("-" if v is None else v, most) for v in s.values)] for s in changed]
    return table(["settings that differ", *NAMES], rows, left=3) + seed_lines(runs, width)


def seed_lines(runs: list[Run], width: int | None) -> list[str]:
    """Returns what it says about two runs of one kind that they have the same seed; nothing for
    other runs."""
    first, second = (run.config for run in runs)
    is_sft = first.kind == "sft"
    if first.seed != second.seed or is_sft != (second.kind == "sft"):
        return []
    text = f"both have seed {first.seed}: {SAME_SEED_SFT if is_sft else SAME_SEED}"
    return textwrap.wrap(text, width) if width else [text]


def stretches(last: int, count: int) -> Stretches:
    """Divides the steps from 1 to `last` into at most `count` intervals of nearly equal length:
    (first, last) of each."""
    count = min(count, last)
    ends = [round(last * i / count) for i in range(count + 1)]
    return [(before + 1, end) for before, end in pairwise(ends)]


def means(points: Curve, intervals: Stretches) -> list[float | None]:
    """Returns the mean of a curve over each interval; None where it has no value."""
    steps, values = points
    inside = (values[(steps >= first) & (steps <= last)] for first, last in intervals)
    return [float(part.mean()) if len(part) else None for part in inside]


def curves(runs: list[Run], width: int | None) -> list[str]:
    """Returns a table of both runs' metrics over the steps of the longer run: means over some
    intervals as numbers, and over more as bars."""
    steps = [run.numbers.steps(source) for run in runs for source in ("trainer", "orchestrator")]
    last, metrics, lines = max(map(max, filter(None, steps)), default=0), metric_curves(runs), []
    for num_numbers, num_bars in SHAPES if last else ():
        intervals, bars, rows = stretches(last, num_numbers), stretches(last, num_bars), []
        for name, both in metrics:
            values = np.concatenate([values for _, values in both])
            for run, points in zip(NAMES, both, strict=True):
                averages = means(points, intervals)
                cells = ["-" if value is None else digits(value, 4) for value in averages]
                drawn = sparkline(means(points, bars), float(values.min()), float(values.max()))
                rows.append([name if run == NAMES[0] else "", run, *cells, drawn])
        heads = [str(first) if first == end else f"{first}-{end}" for first, end in intervals]
        lines = table(["steps", "", *heads, ""], rows, left=2)
        if width is None or max(map(len, lines)) <= width:
            break
    return lines or ["neither run has trained a step"]


def metric_curves(runs: list[Run]) -> list[tuple[str, list[Curve]]]:
    """Returns name and both curves of each metric that at least one run has and that is not 0
    throughout."""
    names = sorted({name for run in runs for name in run.numbers.names})
    rewards = [name for name in names if name.startswith("reward/") and name.count("/") > 1]
    of_envs = [name for name in rewards if name.endswith("/mean")]
    first = ["reward/mean"] if len(of_envs) < 2 else of_envs
    shown = [*first, *(name for name in rewards if name not in of_envs), *METRICS]
    if "epoch" not in names:
        shown.remove("loss/mean")  # informative only for SFT
    both = {name: [run.numbers.curve(name) for run in runs] for name in shown}
    return [(name, pair) for name, pair in both.items() if any(v.any() for _, v in pair)]


def evaluations(runs: list[Run]) -> list[str]:
    """Returns a table of each evaluation's mean reward by version, and B's minus A's."""
    rows, before = [], ""
    for point in eval_points(runs):
        a, b = point.means
        gap = "" if a is None or b is None else f"{b - a:+.3f}"
        cells = map(with_error, point.means, point.errors)
        name, before = point.name if point.name != before else "", point.name
        rows.append([name, str(point.version), *cells, gap])
    if not rows:
        return ["neither run has an evaluation"]
    return table(["evaluation", "version", *NAMES, "B - A"], rows, left=1)


def costs(runs: list[Run]) -> list[str]:
    """Returns a table of what the runs cost: tokens of all steps, seconds, and money."""
    both = [totals(run.numbers) for run in runs]
    names = dict.fromkeys(name for spent in both for name in spent)
    rows = [[name, *(digits(s[name]) if name in s else "-" for s in both)] for name in names]
    return table(["what it cost", *NAMES], rows, left=1) if rows else ["no cost was measured"]
