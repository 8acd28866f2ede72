"""Curves: the metrics, their values over steps, rollouts, tokens or time, and the events at each
step."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rl.records.run import Run, check_metric
from rl.records.timeline import restarts
from rl.run_dir.metric_names import METRICS, OWN, SECTIONS, meaning
from rl.run_dir.metrics import environment_rewards
from rl.run_dir.origin import changes_of
from rl.run_dir.paths import numbers
from rl.view.responses import Curves, Mark, Metric, Metrics, Series

Axis = Literal["step", "rollouts", "tokens", "time"]
MOST_POINTS = 1500
"""Maximum number of points of a curve; a longer one is reduced to means over stretches of steps."""


def metrics(runs: Sequence[Run]) -> Metrics:
    """All metrics of the runs, by section, in the order of docs/metrics.md."""
    sections = [*SECTIONS, OWN]
    tables = [table for run in runs for table in run.numbers.tables.values()]
    found = {
        name
        for table in tables
        for name, values in table.arrays.items()
        if np.isfinite(values).any()
    }
    if (
        len(envs := environment_rewards({name: name for name in found})) == 1
        and "reward/mean" in found
    ):
        found.difference_update(envs.values())  # it is the same curve
    rank = {name: i for i, name in enumerate(METRICS)}
    known = [
        Metric(name=name, section=section, what=what)
        for name in found
        for section, what in [meaning(name)]
    ]
    return Metrics(
        metrics=sorted(
            known,
            key=lambda one: (sections.index(one.section), rank.get(one.name, len(rank)), one.name),
        )
    )


def curves(
    keys: Sequence[str],
    runs: Sequence[Run],
    names: Sequence[str],
    axis: Axis,
    begin: float | None,
    end: float | None,
) -> Curves:
    """The curves of metrics of runs, optionally limited to an interval of the axis and one point
    beyond each end."""
    known = {name for run in runs for name in run.numbers.names}
    for name in names:
        check_metric(name, known)
    series, marks, ends = (
        [],
        [],
        (-np.inf if begin is None else begin, np.inf if end is None else end),
    )
    for key, run in zip(keys, runs, strict=True):
        place = Places(run, axis)
        series += [one for name in names if (one := one_series(key, run, name, place, ends))]
        marks += marks_of(key, run, place, ends)
    return Curves(series=series, marks=marks)


class Places:
    """Maps steps to positions on the axis: their numbers, or the rollouts, tokens or seconds up
    to them."""

    def __init__(self, run: Run, axis: Axis):
        self.steps, self.at = np.empty(0), np.empty(0)
        self.sources, self.begin = dict[str, tuple[np.ndarray, np.ndarray]](), 0.0
        """On the axis `time`: `line_times`, and the begin of the run in seconds since the epoch."""
        if axis == "rollouts":
            self.steps, counts = run.numbers.curve("rollouts/finished")
            self.at = np.cumsum(counts)
        elif axis == "tokens":
            steps, speed = run.numbers.curve("perf/tokens_per_s")
            seconds = dict(zip(*map(list, run.numbers.curve("time/step")), strict=True))
            self.steps, self.at = (
                steps,
                np.cumsum(speed * np.array([seconds.get(step, 0.0) for step in steps.tolist()])),
            )
        elif axis == "time":
            self.steps, times = wall_times(run)
            self.sources = line_times(run)
            lines = [float(own.min()) for _, own in self.sources.values() if len(own)]
            self.begin = min([*lines, *(event.time for event in run.events)], default=0.0)
            self.at = times - self.begin
        self.by_step, self.by_time = axis == "step", axis == "time"

    def __call__(self, steps: np.ndarray, source: str | None = None) -> np.ndarray:
        """The positions of steps, [n]. source: whose lines to use on the axis `time`, where each
        source has its own."""
        if self.by_step:
            return steps.astype(float)
        known, at = self.steps, self.at
        if source in self.sources and len(self.sources[source][0]):
            known, times = self.sources[source]
            at = np.maximum.accumulate(times) - self.begin
        if not len(known):
            return np.full(len(steps), np.nan)
        from_zero = known[0] > 0 and not self.by_time
        return np.interp(
            steps, [0, *known] if from_zero else known, [0.0, *at] if from_zero else at
        )


def wall_times(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps, ascending, and the time of each one's first line in seconds since the epoch."""
    found = [
        (np.empty(0, np.int64), np.empty(0)),
        *(one for source, one in line_times(run).items() if source != "eval"),
    ]
    steps, times = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort((times, steps))
    steps, first = np.unique(steps[order], return_index=True)
    return steps, np.maximum.accumulate(times[order][first])


def one_series(
    key: str, run: Run, name: str, place: Places, ends: tuple[float, float]
) -> Series | None:
    """One metric of one run; None if the run has no value of it in the interval."""
    steps, values = run.numbers.curve(name)
    error_steps, errors = (
        run.numbers.curve(f"{name}_stderr") if name.startswith("eval/") else (steps[:0], values[:0])
    )
    source = run.numbers.source(name)
    places = place(steps, source)
    inside = np.flatnonzero((places >= ends[0]) & (places <= ends[1]))
    if not len(inside):
        return None
    part = slice(max(0, inside[0] - 1), inside[-1] + 2)
    steps, values = steps[part], values[part]
    each, firsts = -(-len(steps) // MOST_POINTS), steps
    lows, highs = values[:0], values[:0]
    if each > 1:
        starts = np.array([part[0] for part in np.array_split(np.arange(len(steps)), MOST_POINTS)])
        counts = np.diff([*starts, len(steps)])
        lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        firsts, steps, values = (
            steps[starts],
            steps[starts + counts - 1],
            np.add.reduceat(values, starts) / counts,
        )
    known = dict(zip(error_steps.tolist(), errors.tolist(), strict=True))
    return Series(
        run=key,
        name=name,
        steps=steps.tolist(),
        firsts=firsts.tolist() if each > 1 else [],
        lows=lows.tolist(),
        highs=highs.tolist(),
        x=place(steps, source).tolist(),
        values=values.tolist(),
        errors=[known.get(step) for step in steps.tolist()] if known else [],
        each=each,
    )


def marks_of(key: str, run: Run, place: Places, ends: tuple[float, float]) -> list[Mark]:
    """Evaluations, checkpoints, deaths, restarts and changed settings at their steps."""
    evaluated = line_times(run).get("eval", (np.empty(0, np.int64), np.empty(0)))[0].tolist()
    found = [("eval", step, f"evaluation of version {step}") for step in evaluated]
    found += [
        ("checkpoint", step, f"checkpoint {step}") for step in numbers(run.run_dir.checkpoints)
    ]
    steps, times = wall_times(run)
    found += [
        ("change", each.step, f"{each.key}: {each.old} -> {each.new}")
        for each in changes_of(run.run_dir)
    ]
    sources = {"eval": "eval", "checkpoint": "trainer", "change": "trainer"}
    places = [float(place(np.array([step]), sources[kind])[0]) for kind, step, _ in found]
    deaths = dict[str, int]()
    for event in restarts(run.events) if len(steps) else ():
        if event.event not in ("death", "restart"):
            continue
        if event.event == "death" and event.step is not None:
            deaths[event.process] = event.step
        known = event.step if event.step is not None else deaths.get(event.process)
        step = known if known is not None else int(np.interp(event.time, times, steps))
        found.append(
            (
                event.event,
                step,
                f"{event.process}: {event.event}" + (f", {event.reason}" if event.reason else ""),
            )
        )
        places.append(
            event.time - place.begin if place.by_time else float(place(np.array([step]))[0])
        )
    marks = zip(found, places, strict=True)
    return [
        Mark(run=key, kind=kind, step=step, x=x, text=text)
        for (kind, step, text), x in marks
        if not (x < ends[0] or x > ends[1])
    ]  # type: ignore[arg-type]


def line_times(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By source of metrics: steps, ascending, and the times of their lines in seconds since the
    epoch. Skips lines without a time. A step that was trained again on the same batch keeps its
    first time."""
    found, tables = {}, run.numbers.tables
    committed = dict[int, float]()
    if batches := tables.get("orchestrator"):
        steps, rows = batches.ordered()
        committed = dict(zip(steps.tolist(), batches.times[rows].tolist(), strict=True))
    for source, table in tables.items():
        steps, rows = table.ordered()
        batch = np.array([committed.get(step, np.nan) for step in steps.tolist()])
        times = np.where(table.firsts[rows] < batch, table.times[rows], table.firsts[rows])
        found[source] = steps[np.isfinite(times)], times[np.isfinite(times)]
    return found
