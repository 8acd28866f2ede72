"""`rl compare`: two runs side by side, from their files: settings that differ, curves, evaluations."""

import functools
import shutil
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.differences import changed_keys
from rl.config.options import take
from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.launch.children import Children
from rl.launch.curves import environment_curves, eval_curves, is_sft
from rl.run_dir.metrics import Curve, Lines, curve, read_metrics
from rl.system.terminal import clip, sparkline, visible

HELP = """usage: rl compare A B

Prints two runs side by side, alive or dead: settings that differ, the curves of the usual metrics, and the evaluations of the versions that
both evaluated, or either. A and B are the directories of runs, or their names under outputs/. A curve is the mean over each of several
stretches of steps, and a line of bars with one scale for both. For a difference of two evaluations with its confidence interval, on the
same examples: rl eval --policy A@best --compare B@best
"""
NAMES = ("A", "B")
METRICS = (
    ("orchestrator", "reward/mean"), ("trainer", "loss/mean"), ("trainer", "validation/loss"), ("trainer", "entropy/mean"),
    ("orchestrator", "rollouts/length_mean"), ("orchestrator", "rollouts/truncated"), ("orchestrator", "rollouts/errored"),
    ("orchestrator", "rollouts/zero_advantage"), ("orchestrator", "rollouts/missing"), ("orchestrator", "lag/mean"),
    ("trainer", "mismatch_kl/mean"), ("trainer", "optim/grad_norm"), ("trainer", "time/step"),
)  # fmt: skip
"""Source and name of the metrics that are shown, where a run has them; after the first come the rewards of several environments."""
SHAPES = ((6, 24), (6, 12), (4, 12), (3, 8), (2, 4))
"""Stretches of steps whose means are printed as numbers, and as bars: the first that the terminal has room for, all without one."""
VALUE_WIDTHS = (10, 60)
"""Of a setting that differs: at least, and at most; longer values are cut."""
Stretches = list[tuple[int, int]]
"""First and last step of each."""


COMPARED = {metric for _, metric in METRICS} | {"epoch"}


@functools.cache
def is_compared(metric: str) -> bool:
    """Whether a metric is shown."""
    return metric in COMPARED or metric.endswith(("/mean", "/reward_mean", "/reward_mean_stderr"))


@dataclass
class Run:
    """One of the two."""

    name: str
    root: Path
    config: RLConfig
    lines: Lines

    @property
    def step(self) -> int:
        """The newest step that was trained."""
        return max((step for step, source in self.lines if source == "trainer"), default=0)


def main(args: list[str], _children: Children) -> int:
    _, rest = take("rl compare", args, (), HELP)
    if len(rest) != 2 or any(word.startswith(("-", "@")) for word in rest):
        fail("rl compare", "which runs? Give two directories or names: rl compare outputs/x outputs/y")
    runs = [read_run(name, spec) for name, spec in zip(NAMES, rest, strict=True)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join([*map(visible, about(runs)), ""]))
    for part in (settings(runs, width), curves(runs, width), evaluations(runs)):
        print("\n".join([*(clip(line, width or len(line)) for line in map(visible, part)), ""]))
    return 0


def read_run(name: str, spec: str) -> Run:
    """A run by its files. Raises RunError."""
    root = named_run(spec)
    config = stored_config(root)
    return Run(name, root, config, read_metrics(run_dir_of(root, config).metrics, wanted=is_compared))


def about(runs: list[Run]) -> list[str]:
    """Which runs these are."""
    return [f"{run.name}  {run.root}: {run.step} of {run.config.max_steps} steps" for run in runs]


def settings(runs: list[Run], width: int | None) -> list[str]:
    """The settings that differ, but for the run's place."""
    found = changed_keys(runs[0].config, runs[1].config)
    changed = [change for change in found if change[0] not in ("name", "output_dir") and not set_nowhere(*change[1:])]
    if not changed:
        return ["no setting differs"]
    least, most = VALUE_WIDTHS
    if width:
        most = max(least, min(most, (width - max(len(key) for key, *_ in changed)) // len(runs) - 2))
    rows = [[key, *(clip("-" if value is None else str(value), most) for value in values)] for key, *values in changed]
    return table(["settings that differ", *NAMES], rows, left=3)


def set_nowhere(*values: Any) -> bool:
    """Whether all of them are nothing: no value, or a list of tables without any, whose settings are keys of their own."""
    return all(value is None or value == [] for value in values)


def stretches(last: int, count: int) -> Stretches:
    """The steps from 1 to `last` in at most `count` stretches of nearly equal length: (first, last) of each."""
    count = min(count, last)
    ends = [round(last * i / count) for i in range(count + 1)]
    return [(before + 1, end) for before, end in pairwise(ends)]


def means(points: Curve, parts: Stretches) -> list[float | None]:
    """Mean of a curve over each stretch; None where it has no value."""
    steps, values = points
    inside = (values[bisect_left(steps, first) : bisect_right(steps, last)] for first, last in parts)
    return [fmean(part) if part else None for part in inside]


def curves(runs: list[Run], width: int | None) -> list[str]:
    """The metrics of both over the steps of the longer one."""
    last = max(step for run in runs for step in (run.step, *(step for step, source in run.lines if source == "orchestrator"), 0))
    if not last:
        return ["neither has trained a step"]
    found = metric_curves(runs)
    lines: list[str] = []
    for numbers, bars in SHAPES:
        lines = curve_table(runs, found, stretches(last, numbers), stretches(last, bars))
        if width is None or max(map(len, lines)) <= width:
            break
    return lines


def curve_table(runs: list[Run], found: list[tuple[str, list[Curve]]], parts: Stretches, bars: Stretches) -> list[str]:
    """The lines of the curves: their means over `parts` as numbers, and over `bars` as bars."""
    rows = []
    for name, both in found:
        values = [value for _, ys in both for value in ys]
        for run, points in zip(runs, both, strict=True):
            cells = ["-" if value is None else f"{value:.4g}" for value in means(points, parts)]
            drawn = sparkline(means(points, bars), min(values), max(values))
            rows.append([name if run is runs[0] else "", run.name, *cells, drawn])
    heads = [str(first) if first == end else f"{first}-{end}" for first, end in parts]
    return table(["steps", "", *heads, ""], rows, left=2)


def metric_curves(runs: list[Run]) -> list[tuple[str, list[Curve]]]:
    """Name and both curves of each metric that one of them has and that is not 0 throughout."""
    sft = any(is_sft(run.lines) for run in runs)  # in reinforcement learning the value of the loss says nothing
    shown = [(source, metric) for source, metric in METRICS if sft or metric != "loss/mean"]
    found = [(metric, [curve(run.lines, source, metric) for run in runs]) for source, metric in shown]
    envs = [environment_curves(run.lines) for run in runs]
    labels = sorted({label for each in envs for label in each})
    found[1:1] = [(f"reward/{label}/mean", [each.get(label, ([], [])) for each in envs]) for label in labels]
    return [(name, both) for name, both in found if any(value for _, values in both for value in values)]


def evaluations(runs: list[Run]) -> list[str]:
    """Mean reward of each evaluation at each version, and B's minus A's."""
    every = [eval_curves(run.lines) for run in runs]
    labels = sorted({label for each in every for label in each})
    rows = []
    for label in labels:
        versions = sorted({version for each in every for version in each.get(label, ([], []))[0]})
        for version in versions:
            lines = [run.lines.get((version, "eval"), {}) for run in runs]
            both = [line.get(f"eval/{label}/reward_mean") for line in lines]
            errors = [line.get(f"eval/{label}/reward_mean_stderr") for line in lines]
            gap = "" if None in both else f"{both[1] - both[0]:+.3f}"
            rows.append([label if version == versions[0] else "", str(version), *map(with_error, both, errors), gap])
    return table(["evaluation", "version", *NAMES, "B - A"], rows, left=1) if rows else ["neither has an evaluation"]


def with_error(value: float | None, error: float | None) -> str:
    """`0.512 ± 0.021`: a mean with its standard error over examples."""
    return "-" if value is None else f"{value:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], left: int) -> list[str]:
    """Lines with aligned columns: the first `left` to the left, as is the last one of bars, the others to the right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    aligned = [
        [
            cell.ljust(width) if i < left or not heads[i] else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [heads, *rows]
    ]
    return ["  ".join(cells).rstrip() for cells in aligned]
