"""What each process did when: lanes of spans, and what happened in between."""

import math
from collections.abc import Iterator

import numpy as np

from rl.records.run import Run
from rl.run_dir.metrics import Lines, read_metrics
from rl.view.answers import Lane, Moment, Span, Timeline

WINDOW_S = 600.0
"""What is shown without a stretch of time: the newest ten minutes."""
MOST_SPANS = 6000
"""Of one answer; of more the longest are given."""
STEP_PARTS = (
    ("wait_for_batch", "waits for the batch"),
    ("old_logprobs", "log-probabilities before the first optimizer step"),
    ("forward_backward", "forward and backward"),
    ("optimizer", "optimizer"),
    ("publish_weights", "publishing held the step up"),
    ("checkpoint", "a checkpoint held the step up"),
    ("validation", "validation"),
    ("parity", "compares with inference"),
)
"""Parts of the trainer's step in their order, where a run has no spans: `time/<name>` is their length."""


def timeline(run: Run, begin: float | None, end: float | None) -> Timeline:
    """The lanes between two times; without them the newest WINDOW_S."""
    lines = read_metrics(run.run_dir.metrics)
    first, last = extent(run, lines)
    end = last if end is None else min(end, last)
    begin = max(first, end - WINDOW_S) if begin is None else max(begin, first)
    lanes = [lane for lane in lanes_of(lines) if lane.spans]
    shown, note = within(lanes, begin, end)
    return Timeline(begin=begin, end=end, first=first, last=last, lanes=shown, moments=moments(run, lines, begin, end), note=note)


def extent(run: Run, lines: Lines) -> tuple[float, float]:
    """When the run began, and when something was last heard of it."""
    times = [float(line["time"]) for line in lines.values() if line.get("time")]
    times += [event.time for event in run.events]
    times += [status.heartbeat for status in run.status.values() if status.heartbeat]
    return (min(times), max(times)) if times else (0.0, 0.0)


def lanes_of(lines: Lines) -> list[Lane]:
    """Lanes as the metrics tell them: the parts of the trainer's steps, the orchestrator's batches, evaluations."""
    trainer, orchestrator, evals = list[Span](), list[Span](), list[Span]()
    for (step, source), line in sorted(lines.items()):
        time = line.get("time")
        if not time:
            continue
        if source == "trainer":
            trainer += step_parts(step, float(time), line)
        elif source == "orchestrator" and line.get("time/batch"):
            orchestrator.append(Span(name="batch", begin=time - line["time/batch"], end=time, text=f"batch {step}"))
        elif source == "eval" and line.get("time/eval"):
            evals.append(Span(name="eval", begin=time - line["time/eval"], end=time, text=f"evaluation of version {step}"))
    return [Lane(name="trainer", spans=trainer), Lane(name="orchestrator", spans=orchestrator), Lane(name="evaluations", spans=evals)]


def step_parts(step: int, end: float, line: dict) -> Iterator[Span]:
    """The parts of a step, one behind the other from its begin on."""
    at = end - (line.get("time/step") or 0.0)
    for name, what in STEP_PARTS:
        seconds = line.get(f"time/{name}") or 0.0
        if seconds > 0:
            yield Span(name=name, begin=at, end=min(at + seconds, end), text=f"step {step}: {what}")
            at += seconds


def within(lanes: list[Lane], begin: float, end: float) -> tuple[list[Lane], str]:
    """The spans that reach between two times, the longest if they are too many, and what that leaves out."""
    inside = [Lane(name=lane.name, spans=[span for span in lane.spans if span.end >= begin and span.begin <= end]) for lane in lanes]
    total = sum(len(lane.spans) for lane in inside)
    if total <= MOST_SPANS:
        return inside, ""
    lengths = np.sort([span.end - span.begin for lane in inside for span in lane.spans])
    least = float(lengths[-MOST_SPANS])
    kept = [Lane(name=lane.name, spans=[span for span in lane.spans if span.end - span.begin >= least]) for lane in inside]
    return kept, f"{total:,} spans: those shorter than {least:.3g} s are left out; look at less time"


def moments(run: Run, lines: Lines, begin: float, end: float) -> list[Moment]:
    """Starts, deaths and repairs; versions and batches as their lines tell them."""
    found = [
        Moment(kind=event.event, time=event.time, process=event.process, text=event_text(event.event, event.reason, event.lines), step=event.step)
        for event in run.events
    ]
    for (step, source), line in lines.items():
        time = line.get("time") or math.nan
        if source == "trainer":
            found.append(Moment(kind="version", time=time, process="trainer", text=f"version {step}", step=step))
        elif source == "orchestrator":
            found.append(Moment(kind="batch", time=time, process="orchestrator", text=f"batch {step} committed", step=step))
        elif source == "eval":
            found.append(Moment(kind="eval", time=time, process="evaluations", text=f"version {step} evaluated", step=step))
    return sorted((moment for moment in found if begin <= moment.time <= end), key=lambda moment: moment.time)


def event_text(kind: str, reason: str, lines: list[str]) -> str:
    return ": ".join([kind, *([reason] if reason else []), *lines[:1]])
