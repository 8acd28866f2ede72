"""What all processes of a run did between two moments, on one clock; and as a trace that Perfetto and chrome://tracing open."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from rl.records.metrics import Metrics
from rl.records.spans import Counted, Done, Recording
from rl.run_dir.events import Event
from rl.run_dir.status import HEARTBEAT_S, PHASE_LANE, Phase, RoleStatus

MARKS = {"orchestrator": "batch", "trainer": "step", "eval": "eval"}
"""Source of a line of metrics -> what was done when it was written: its `step` is the number of it."""
MICROSECONDS = 1e6
SLACK_S = 5 * HEARTBEAT_S
"""Who had a heartbeat so shortly before the newest of all still lives, as far as its run knows."""
STARTING, RL = Phase.STARTING.value, "rl"


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment: a batch was committed, a step trained, a version evaluated, a process died."""

    process: str
    name: str
    time: float
    step: int | None = None
    text: str = ""


@dataclass(repr=False)
class Timeline:
    """Everything between two moments, each list in the order of time."""

    spans: list[Done] = field(default_factory=list)
    gauges: list[Counted] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Timeline: {len(self.spans)} spans, {len(self.gauges)} gauges, {len(self.marks)} marks>"

    def between(self, begin: float, end: float) -> "Timeline":
        """What touches the time from one moment to another."""
        return Timeline(
            [done for done in self.spans if done.end >= begin and done.begin <= end],
            [counted for counted in self.gauges if begin <= counted.time <= end],
            [mark for mark in self.marks if begin <= mark.time <= end],
        )

    def trace(self) -> dict[str, Any]:
        """As Chrome's trace event format (JSON object format). What was done at the same time in one lane is spread over several."""
        events, numbers = list[dict[str, Any]](), dict[tuple[str, str], int]()
        pids = {
            name: number for number, name in enumerate(sorted({entry.process for entry in (*self.spans, *self.gauges, *self.marks)}), 1)
        }
        for name, pid in pids.items():
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        for done, lane in spread(self.spans):
            if (done.process, lane) not in numbers:
                numbers[done.process, lane] = len(numbers) + 1
                place = {"pid": pids[done.process], "tid": numbers[done.process, lane]}
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane}})
            about = dict(done.about) | ({} if done.step is None else {"step": done.step})
            place = {"pid": pids[done.process], "tid": numbers[done.process, lane]}
            times = {"ts": done.begin * MICROSECONDS, "dur": (done.end - done.begin) * MICROSECONDS}
            events.append({"ph": "X", "name": done.name, "cat": done.lane or "span", **place, **times, "args": about})
        for counted in self.gauges:
            for name, value in counted.values.items():
                place = {"pid": pids[counted.process], "tid": 0, "ts": counted.time * MICROSECONDS}
                events.append({"ph": "C", "name": name, **place, "args": {name: value}})
        for mark in self.marks:
            text = f"{mark.name} {mark.step}" if mark.step is not None else mark.name
            place = {"pid": pids[mark.process], "tid": 0, "ts": mark.time * MICROSECONDS}
            events.append({"ph": "i", "s": "p", "name": text, **place, "args": {"text": mark.text}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def spread(spans: list[Done]) -> Iterator[tuple[Done, str]]:
    """(span, its lane): spans of a lane follow each other, as the format wants. Those at the same time go to lanes of their own, as few as
    there are at once."""
    free: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for done in sorted(spans, key=lambda done: (done.begin, -done.end)):
        key, heap = (done.process, done.lane), free[done.process, done.lane]
        if heap and heap[0][0] <= done.begin:
            _, number = heapq.heappop(heap)
        else:
            number = counts[key]
            counts[key] += 1
        heapq.heappush(heap, (done.end, number))
        yield done, done.lane if number == 0 else f"{done.lane} {number + 1}"


def read_timeline(
    recording: Recording, metrics: Metrics, events: list[Event], statuses: Mapping[str, RoleStatus], begin: float, end: float
) -> Timeline:
    """The spans and gauges of a run, and its marks, that touch the time from `begin` to `end`.

    A span is written when it ends. What a process is in, or was in when it was killed, its status tells, which is to be read before.
    """
    spans, gauges = recording.between(begin, end)
    under_way = [*open_spans(statuses)]
    newest = max((status.heartbeat or 0.0 for status in statuses.values()), default=0.0)
    spans += [*under_way, *starts(events, recording, under_way, newest)]
    found = Timeline(
        [*one_by_one(sorted(spans, key=lambda done: (done.begin, -done.end)))],
        sorted(gauges, key=lambda counted: counted.time),
        sorted(marks(metrics, events, begin, end), key=lambda mark: mark.time),
    )
    return found.between(begin, end)


def open_spans(statuses: Mapping[str, RoleStatus]) -> Iterator[Done]:
    """What each process is in since its last phase began: if it lives until the newest heartbeat of all, else until its own last."""
    newest = max((status.heartbeat or 0.0 for status in statuses.values()), default=0.0)
    for name, status in statuses.items():
        if status.phase and status.since is not None and status.heartbeat is not None:
            end = newest if newest - status.heartbeat <= SLACK_S else status.heartbeat
            yield Done(name, PHASE_LANE, status.phase.value, status.since, max(status.since, end), status.step, {})


def starts(events: list[Event], recording: Recording, under_way: list[Done], newest: float) -> Iterator[Done]:
    """From the start of each process to the first that it wrote, or is in, it makes its imports; of `rl` to the start of the first of them.

    newest: the newest heartbeat, until which one that has written nothing yet is starting.
    """
    ends = [event for event in events if event.event in ("start", "restart", "death", "stop", "give_up")]
    for event in events:
        if event.event not in ("start", "restart"):
            continue
        own = event.process == RL
        first = [*recording.first(event.time, None if own else event.process)]
        first += [done.begin for done in under_way if done.begin >= event.time and (own or done.process == event.process)]
        over = [other.time for other in ends if other.time > event.time and (own or other.process in (RL, event.process))]
        if (end := min([*first, *over], default=newest)) > event.time:
            yield Done(event.process, PHASE_LANE, STARTING, event.time, end, None, {})


def one_by_one(spans: list[Done]) -> Iterator[Done]:
    """Spans in the order of their begins, of which the phases of one process do not overlap: some of their times are of two clocks."""
    until = dict[str, float]()
    for done in spans:
        if done.lane == PHASE_LANE:
            begin = max(done.begin, until.get(done.process, done.begin))
            if begin >= done.end:
                continue
            until[done.process] = done.end
            done = done if begin == done.begin else replace(done, begin=begin)
        yield done


def marks(metrics: Metrics, events: list[Event], begin: float, end: float) -> Iterator[Mark]:
    """What happened: lines of metrics say when a batch, a step and an evaluation were done, of which those between two moments are given,
    events when a process died and was back."""
    for source, name in MARKS.items():
        if not (table := metrics.tables.get(source)):
            continue
        steps, rows = table.ordered()
        times = table.times[rows]
        inside = (times >= begin) & (times <= end) & np.isfinite(times)
        for step, time in zip(steps[inside].tolist(), times[inside].tolist(), strict=True):
            yield Mark("orchestrator" if source == "eval" else source, name, time, step)
    for event in restarts(events):
        if event.event == "start" and event.process != RL:
            continue  # of each process one at every start: its lane shows it
        yield Mark(event.process, event.event, event.time, event.step, event.reason)


def restarts(events: list[Event]) -> list[Event]:
    """The events, of which each start of `rl` but the first is the restart that it was."""
    found, begun = [], False
    for event in events:
        own = event.event == "start" and event.process == RL
        found.append(msgspec.structs.replace(event, event="restart") if own and begun else event)
        begun |= own
    return found
