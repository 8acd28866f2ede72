"""What all processes of a run did between two times, on one clock, also as a trace for Perfetto
and chrome://tracing."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from rl.records.spans import Counted, Done, Recording
from rl.run_dir.events import Event
from rl.run_dir.numbers import Numbers
from rl.run_dir.status import HEARTBEAT_S, PHASE_LANE, Phase, RoleStatus

MARKS = {"orchestrator": "batch", "trainer": "step", "eval": "eval"}
"""Source of a line of metrics -> what was just finished when it was written; `step` is its
number."""
MICROSECONDS = 1e6
SLACK_S = 5 * HEARTBEAT_S
"""A process counts as alive if its heartbeat is at most this much older than the newest of all,
in seconds."""
STARTING, RL = Phase.STARTING.value, "rl"


@dataclass(frozen=True)
class Mark:
    """An event at one moment: a batch was committed, a step trained, a version evaluated, a
    process died."""

    process: str
    name: str
    time: float
    step: int | None = None
    text: str = ""


@dataclass(repr=False)
class Timeline:
    """Everything between two times; each list is in chronological order."""

    spans: list[Done] = field(default_factory=list)
    gauges: list[Counted] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __repr__(self) -> str:
        return (
            f"<Timeline: {len(self.spans)} spans, {len(self.gauges)} gauges, {len(self.marks)} "
            "marks>"
        )

    def between(self, begin: float, end: float) -> "Timeline":
        """The part that overlaps the interval from `begin` to `end`."""
        return Timeline(
            [done for done in self.spans if done.end >= begin and done.begin <= end],
            [counted for counted in self.gauges if begin <= counted.time <= end],
            [mark for mark in self.marks if begin <= mark.time <= end],
        )

    def trace(self) -> dict[str, Any]:
        """Converts to Chrome's trace event format (JSON object format). Overlapping spans of a
        lane are spread over several."""
        events, numbers = list[dict[str, Any]](), dict[tuple[str, str], int]()
        pids = {
            name: number
            for number, name in enumerate(
                sorted({entry.process for entry in (*self.spans, *self.gauges, *self.marks)}), 1
            )
        }
        for name, pid in pids.items():
            events.append(
                {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            )
        for done, lane in spread(self.spans):
            if (done.process, lane) not in numbers:
                numbers[done.process, lane] = len(numbers) + 1
                place = {"pid": pids[done.process], "tid": numbers[done.process, lane]}
                events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": lane}})
            about = dict(done.about) | ({} if done.step is None else {"step": done.step})
            place = {"pid": pids[done.process], "tid": numbers[done.process, lane]}
            times = {"ts": done.begin * MICROSECONDS, "dur": (done.end - done.begin) * MICROSECONDS}
            events.append(
                {
                    "ph": "X",
                    "name": done.name,
                    "cat": done.lane or "span",
                    **place,
                    **times,
                    "args": about,
                }
            )
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
    """Yields (span, lane) such that the spans of a lane do not overlap, as the format requires.
    Overlapping spans go to separate lanes, as few as possible."""
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
    recording: Recording,
    metrics: Numbers,
    events: list[Event],
    statuses: Mapping[str, RoleStatus],
    begin: float,
    end: float,
) -> Timeline:
    """The spans, gauges and marks of a run that overlap the interval from `begin` to `end`.

    A span is written when it ends. The one that a process is in, or was in when killed, comes from
    its status, to be read before.
    """
    spans, gauges = recording.between(begin, end)
    newest = max((status.heartbeat or 0.0 for status in statuses.values()), default=0.0)
    under_way = [*open_spans(statuses, newest)]
    spans += [*under_way, *starts(events, recording, under_way, newest)]
    found = Timeline(
        [*one_by_one(sorted(spans, key=lambda done: (done.begin, -done.end)))],
        sorted(gauges, key=lambda counted: counted.time),
        sorted(marks(metrics, events, begin, end), key=lambda mark: mark.time),
    )
    return found.between(begin, end)


def open_spans(statuses: Mapping[str, RoleStatus], newest: float) -> Iterator[Done]:
    """The current phase of each process: up to the `newest` heartbeat of all if the process is
    alive, else up to its own last one."""
    for name, status in statuses.items():
        if status.phase and status.since is not None and status.heartbeat is not None:
            end = newest if newest - status.heartbeat <= SLACK_S else status.heartbeat
            yield Done(
                name,
                PHASE_LANE,
                status.phase.value,
                status.since,
                max(status.since, end),
                status.step,
                {},
            )


def starts(
    events: list[Event], recording: Recording, under_way: list[Done], newest: float
) -> Iterator[Done]:
    """Spans of starting up (imports): from the start of a process to its first span, and for `rl`
    to the first span of any process.

    newest: the newest heartbeat; a process that has written nothing is starting up to then.
    """
    ends = [
        event for event in events if event.event in ("start", "restart", "death", "stop", "give_up")
    ]
    for event in events:
        if event.event not in ("start", "restart"):
            continue
        own = event.process == RL
        first = [*recording.first(event.time, None if own else event.process)]
        first += [
            done.begin
            for done in under_way
            if done.begin >= event.time and (own or done.process == event.process)
        ]
        over = [
            other.time
            for other in ends
            if other.time > event.time and (own or other.process in (RL, event.process))
        ]
        if (end := min([*first, *over], default=newest)) > event.time:
            yield Done(event.process, PHASE_LANE, STARTING, event.time, end, None, {})


def one_by_one(spans: list[Done]) -> Iterator[Done]:
    """Trims phases of a process so that they do not overlap, as their times may come from two
    clocks. spans: sorted by begin."""
    until = dict[str, float]()
    for done in spans:
        if done.lane == PHASE_LANE:
            begin = max(done.begin, until.get(done.process, done.begin))
            if begin >= done.end:
                continue
            until[done.process] = done.end
            done = done if begin == done.begin else replace(done, begin=begin)
        yield done


def marks(metrics: Numbers, events: list[Event], begin: float, end: float) -> Iterator[Mark]:
    """Marks of finished batches, steps and evaluations between two times, from the metrics; and
    of all process deaths and restarts, from the events."""
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
            continue  # every start of a process has one, which its lane shows
        yield Mark(event.process, event.event, event.time, event.step, event.reason)


def restarts(events: list[Event]) -> list[Event]:
    """The events, in which each start of `rl` after the first becomes a restart."""
    found, begun = [], False
    for event in events:
        own = event.event == "start" and event.process == RL
        found.append(msgspec.structs.replace(event, event="restart") if own and begun else event)
        begun |= own
    return found
