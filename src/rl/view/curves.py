"""Curves: the metrics, their values over steps, rollouts, tokens or time, and the events at each
step."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rl.records.run import Run, check_metric
from rl.records.timeline import restarts
from rl.run_dir.metrics import METRICS, OWN, SECTIONS, environment_rewards, meaning
from rl.run_dir.paths import changes_of, numbers
from rl.view.responses import CurveMark, Curves, Metric, Metrics, Series

Axis = Literal["step", "rollouts", "tokens", "time"]
MOST_POINTS = 1500
"""Maximum number of points of a curve; a longer one is reduced to means over stretches of steps."""


def metrics(runs: Sequence[Run]) -> Metrics:
    """All metrics of the runs, by section, in the order of docs/metrics.md."""
    names = {
        name
        for run in runs
        for table in run.numbers.tables.values()
        for name, values in table.arrays.items()
        if np.isfinite(values).any()
    }
    of_envs = environment_rewards({name: name for name in names}).values()
    if len(of_envs) == 1 and "reward/mean" in names:
        names.difference_update(of_envs)  # it is the same curve
    sections, order = [*SECTIONS, OWN], [*METRICS]

    def rank(metric: Metric) -> tuple[int, int, str]:
        at = order.index(metric.name) if metric.name in METRICS else len(order)
        return sections.index(metric.section), at, metric.name

    described = [(name, *meaning(name)) for name in names]
    known = [Metric(name=name, section=section, what=what) for name, section, what in described]
    return Metrics(metrics=sorted(known, key=rank))


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
    series, marks = list[Series](), list[CurveMark]()
    ends = (-np.inf if begin is None else begin, np.inf if end is None else end)
    for key, run in zip(keys, runs, strict=True):
        places = AxisPlaces(run, axis)
        series += filter(None, (one_series(key, run, name, places, ends) for name in names))
        marks += marks_of(key, run, places, ends)
    return Curves(series=series, marks=marks)


class AxisPlaces:
    """Maps steps to positions on the axis: their numbers, or the rollouts, tokens or seconds up
    to them."""

    def __init__(self, run: Run, axis: Axis):
        self.axis, self.steps, self.at = axis, np.empty(0), np.empty(0)
        self.sources, self.begin = dict[str, tuple[np.ndarray, np.ndarray]](), 0.0
        """On the axis `time`: `line_times`, and the begin of the run in seconds since the epoch."""
        if axis == "rollouts":
            self.steps, counts = run.numbers.curve("rollouts/finished")
            self.at = np.cumsum(counts)
        elif axis == "tokens":
            self.steps, speed = run.numbers.curve("perf/tokens_per_s")
            seconds = as_dict(*run.numbers.curve("time/step"))
            self.at = np.cumsum(speed * [seconds.get(step, 0.0) for step in self.steps.tolist()])
        elif axis == "time":
            self.sources = line_times(run)
            starts = [float(lines.min()) for _, lines in self.sources.values() if len(lines)]
            self.begin = min([*starts, *(event.time for event in run.events)], default=0.0)

    def __call__(self, steps: np.ndarray, source: str | None = None) -> np.ndarray:
        """The positions of steps, [n]. source: whose lines to use on the axis `time`, where each
        source has its own."""
        if self.axis == "step":
            return steps.astype(float)
        known, at = self.steps, self.at
        if source in self.sources and len(self.sources[source][0]):
            known, times = self.sources[source]
            at = np.maximum.accumulate(times) - self.begin
        if not len(known):
            return np.full(len(steps), np.nan)
        if known[0] > 0 and self.axis != "time":
            known, at = np.append(0, known), np.append(0.0, at)
        return np.interp(steps, known, at)


def as_dict(steps: np.ndarray, values: np.ndarray) -> dict[int, float]:
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def wall_times(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps, ascending, and the time of each one's first line in seconds since the epoch."""
    lines = [times for source, times in line_times(run).items() if source != "eval"]
    steps = np.concatenate([np.empty(0, np.int64), *(steps for steps, _ in lines)])
    times = np.concatenate([np.empty(0), *(times for _, times in lines)])
    order = np.lexsort((times, steps))
    steps, first = np.unique(steps[order], return_index=True)
    return steps, np.maximum.accumulate(times[order][first])


def one_series(
    key: str, run: Run, name: str, places: AxisPlaces, ends: tuple[float, float]
) -> Series | None:
    """One metric of one run; None if the run has no value of it in the interval."""
    (steps, values), source = run.numbers.curve(name), run.numbers.source(name)
    x = places(steps, source)
    inside = np.flatnonzero((x >= ends[0]) & (x <= ends[1]))
    if not len(inside):
        return None
    part = slice(max(0, inside[0] - 1), inside[-1] + 2)
    steps, values = steps[part], values[part]
    each = -(-len(steps) // MOST_POINTS)
    firsts = lows = highs = values[:0]
    if each > 1:
        ranges = np.array_split(np.arange(len(steps)), MOST_POINTS)
        starts, lasts = (np.array([part[end] for part in ranges]) for end in (0, -1))
        lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        values = np.add.reduceat(values, starts) / (lasts - starts + 1)
        firsts, steps = steps[starts], steps[lasts]
    errors = as_dict(*run.numbers.curve(f"{name}_stderr")) if name.startswith("eval/") else {}
    return Series(
        run=key,
        name=name,
        steps=steps.tolist(),
        firsts=firsts.tolist(),
        lows=lows.tolist(),
        highs=highs.tolist(),
        x=places(steps, source).tolist(),
        values=values.tolist(),
        errors=[errors.get(step) for step in steps.tolist()] if errors else [],
        each=each,
    )


def marks_of(key: str, run: Run, places: AxisPlaces, ends: tuple[float, float]) -> list[CurveMark]:
    """Evaluations, checkpoints, deaths, restarts and changed settings at their steps."""
    marks = list[CurveMark]()

    def add(kind: Any, step: int, text: str, source: str | None, time: float | None = None) -> None:
        is_timed = places.axis == "time" and time is not None
        x = time - places.begin if is_timed else float(places(np.array([step]), source)[0])
        if not (x < ends[0] or x > ends[1]):
            marks.append(CurveMark(run=key, kind=kind, step=step, x=x, text=text))

    for step in run.numbers.steps("eval"):
        add("eval", step, f"evaluation of version {step}", "eval")
    for step in numbers(run.run_dir.checkpoints):
        add("checkpoint", step, f"checkpoint {step}", "trainer")
    for each in changes_of(run.run_dir):
        add("change", each.step, f"{each.key}: {each.old} -> {each.new}", "trainer")
    steps, times = wall_times(run)
    deaths = dict[str, int]()
    for event in restarts(run.events) if len(steps) else ():
        if event.event not in ("death", "restart"):
            continue
        if event.event == "death" and event.step is not None:
            deaths[event.process] = event.step
        step = deaths.get(event.process) if event.step is None else event.step
        if step is None:
            step = int(np.interp(event.time, times, steps))
        reason = f", {event.reason}" if event.reason else ""
        add(event.event, step, f"{event.process}: {event.event}{reason}", None, event.time)
    return marks


def line_times(run: Run) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By source of metrics: steps, ascending, and the times of their first lines in seconds since
    the epoch, for a step may be trained again on the same batch. Skips lines without a time."""
    by_source = {}
    for source, table in run.numbers.tables.items():
        steps, rows = table.ordered()
        times = table.firsts[rows]
        is_known = np.isfinite(times)
        by_source[source] = steps[is_known], times[is_known]
    return by_source
