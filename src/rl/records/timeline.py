"""What all processes of a run did between two times, on one clock, also as a trace for Perfetto
and chrome://tracing. Follows the spans and gauges that the processes write."""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl.run_dir.files import UNREADABLE, LineReader, files_in
from rl.run_dir.numbers import Numbers
from rl.run_dir.spans import DECODER, Event, Gauges, Span, Start, is_time, old
from rl.run_dir.status import HEARTBEAT_S, PHASE_LANE, Phase, RoleStatus

START = b'{"kind":"start"'
"""A line may begin with half of an earlier one whose process was killed."""


@dataclass(frozen=True)
class Done:
    """Something that a process did. Times are seconds since the epoch."""

    process: str
    lane: str
    name: str
    begin: float
    end: float
    step: int | None
    """The step, batch or policy version that it belongs to."""
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Counted:
    """Gauges of a process at one moment."""

    process: str
    time: float
    values: Mapping[str, float]


class SpanFile:
    """The contents of one file. Skips damaged lines, and those before the first Start."""

    def __init__(self, path: Path, process: str):
        self.reader, self.process = LineReader(path), process
        self.offset: float | None = None
        """Wall time minus monotonic time in seconds, as of the newest Start."""
        self.spans: list[Done] = []
        self.begins: list[float] = []
        """Begin times of the spans, ascending."""
        self.gauges: list[Counted] = []

    def refresh(self) -> None:
        for text in self.reader.all():
            try:
                line = DECODER.decode(text[max(0, text.rfind(START)) :])
            except UNREADABLE:
                continue
            if isinstance(line, Start):
                self.offset = line.time - line.monotonic
            elif self.offset is not None:
                self._add(line, self.offset)

    def _add(self, line: Span | Gauges, offset: float) -> None:
        if isinstance(line, Gauges):
            if is_time(line.at + offset):
                self.gauges.append(Counted(self.process, line.at + offset, line.values))
            return
        begin, end = line.begin + offset, line.end + offset
        if begin <= end and is_time(begin) and is_time(end):
            done = Done(self.process, line.lane, line.name, begin, end, line.step, line.about)
            self.spans.append(done)
            insort(self.begins, begin)


class SpanRecording:
    """The files of `spans/`. Each is read once: a rotated file is recognised by its inode."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[tuple[str, int], SpanFile] = {}
        """By process and inode; the older file of a process comes first."""

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        files = {}
        for path in files_in(self.folder, ".jsonl"):
            for version in (old(path), path):
                try:
                    status = version.stat()
                except FileNotFoundError:
                    continue
                file = self.files.get((path.stem, status.st_ino))
                if file is None or file.reader.offset > status.st_size:  # new or truncated
                    file = SpanFile(version, path.stem)
                file.reader.path = version
                file.refresh()
                files[path.stem, status.st_ino] = file
        self.files = files

    @property
    def ends(self) -> tuple[float, float] | None:
        """The begin of the first span and the end of the last one; None without spans."""
        begins = [file.begins[0] for file in self.files.values() if file.begins]
        ends = (done.end for file in self.files.values() for done in file.spans)
        return (min(begins), max(ends)) if begins else None

    @property
    def counted(self) -> dict[str, float]:
        """The time of each process's last gauges, which it writes after its spans every two
        seconds."""
        return {file.process: file.gauges[-1].time for file in self.files.values() if file.gauges}

    def first(self, time: float, process: str | None) -> Iterator[float]:
        """Yields, per file, the begin of the first span at or after a time. process: None for
        all."""
        for file in self.files.values():
            if process in (None, file.process):
                first = bisect_left(file.begins, time)
                yield from file.begins[first : first + 1]

    def between(self, begin: float, end: float) -> tuple[list[Done], list[Counted]]:
        """The spans that overlap the interval from `begin` to `end`, and the gauges in it, in
        order within each file."""
        spans = (done for file in self.files.values() for done in file.spans)
        gauges = (counted for file in self.files.values() for counted in file.gauges)
        return (
            [done for done in spans if done.end >= begin and done.begin <= end],
            [counted for counted in gauges if begin <= counted.time <= end],
        )


MARKS = {"orchestrator": "batch", "trainer": "step", "eval": "eval"}
"""Source of a line of metrics -> what was just finished when it was written; `step` is its
number."""
MICROSECONDS = 1e6
SLACK_S = 5 * HEARTBEAT_S
"""A process counts as alive if its heartbeat is at most this much older than the newest of all,
in seconds."""
STARTING = Phase.STARTING.value
RL = "rl"
LIFE = ("start", "restart", "death", "stop", "give_up")
"""Events with which a process's starting up ends."""


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

    spans: Sequence[Done] = ()
    gauges: Sequence[Counted] = ()
    marks: Sequence[Mark] = ()

    def __repr__(self) -> str:
        return (
            f"<Timeline: {len(self.spans)} spans, {len(self.gauges)} gauges, {len(self.marks)} "
            "marks>"
        )

    def trace(self) -> dict[str, Any]:
        """Converts to Chrome's trace event format (JSON object format). Overlapping spans of a
        lane are spread over several."""
        events = list[dict[str, Any]]()
        processes = sorted({entry.process for entry in (*self.spans, *self.gauges, *self.marks)})
        lanes = dict[tuple[str, str], int]()

        def add(phase: str, name: str, process: str, lane: int = 0, **about: Any) -> None:
            pid = processes.index(process) + 1
            events.append({"ph": phase, "name": name, "pid": pid, "tid": lane, **about})

        for process in processes:
            add("M", "process_name", process, args={"name": process})
        for done, name in spread(self.spans):
            key = done.process, name
            if key not in lanes:
                lanes[key] = len(lanes) + 1
                add("M", "thread_name", done.process, lanes[key], args={"name": name})
            add(
                "X",
                done.name,
                done.process,
                lanes[key],
                cat=done.lane or "span",
                ts=done.begin * MICROSECONDS,
                dur=(done.end - done.begin) * MICROSECONDS,
                args={**done.about, **({} if done.step is None else {"step": done.step})},
            )
        for counted in self.gauges:
            for name, value in counted.values.items():
                ts = counted.time * MICROSECONDS
                add("C", name, counted.process, ts=ts, args={name: value})
        for mark in self.marks:
            name = mark.name if mark.step is None else f"{mark.name} {mark.step}"
            ts = mark.time * MICROSECONDS
            add("i", name, mark.process, s="p", ts=ts, args={"text": mark.text})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def spread(spans: Sequence[Done]) -> Iterator[tuple[Done, str]]:
    """Yields (span, lane) such that the spans of a lane do not overlap, as the format requires.
    Overlapping spans go to separate lanes, as few as possible."""
    ends: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for done in sorted(spans, key=lambda done: (done.begin, -done.end)):
        lanes = ends[done.process, done.lane]
        is_free = lanes and lanes[0][0] <= done.begin
        number = heapq.heappop(lanes)[1] if is_free else len(lanes)
        heapq.heappush(lanes, (done.end, number))
        yield done, f"{done.lane} {number + 1}" if number else done.lane


def read_timeline(
    recording: SpanRecording,
    metrics: Numbers,
    events: list[Event],
    statuses: Mapping[str, RoleStatus],
    begin: float,
    end: float,
) -> Timeline:
    """The spans, gauges and marks of a run that overlap the interval from `begin` to `end`.

    A span is written when it ends. The one that a process is in, or was in when killed, comes
    from its status, to be read before.
    """
    spans, gauges = recording.between(begin, end)
    newest = max((status.heartbeat or 0.0 for status in statuses.values()), default=0.0)
    under_way = [*open_spans(statuses, newest)]
    spans += [*under_way, *starts(events, recording, under_way, newest)]
    spans.sort(key=lambda done: (done.begin, -done.end))
    return Timeline(
        [done for done in one_by_one(spans) if done.end >= begin and done.begin <= end],
        sorted(gauges, key=lambda counted: counted.time),
        sorted(marks(metrics, events, begin, end), key=lambda mark: mark.time),
    )


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
    events: list[Event], recording: SpanRecording, under_way: list[Done], newest: float
) -> Iterator[Done]:
    """Spans of starting up (imports): from the start of a process to its first span, and for
    `rl` to the first span of any process.

    newest: the newest heartbeat; a process that has written nothing is starting up to then.
    """
    for event in events:
        if event.event not in ("start", "restart"):
            continue
        of_all = event.process == RL
        processes = (RL, event.process)
        times = [*recording.first(event.time, None if of_all else event.process)]
        times += [done.begin for done in under_way if of_all or done.process == event.process]
        times += [
            later.time
            for later in events
            if later.event in LIFE and later.time > event.time
            if of_all or later.process in processes
        ]
        end = min((time for time in times if time >= event.time), default=newest)
        if end > event.time:
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
    of process deaths and restarts, from the events."""
    for source, name in MARKS.items():
        if not (table := metrics.tables.get(source)):
            continue
        steps, rows = table.ordered()
        times = table.times[rows]
        inside = (times >= begin) & (times <= end) & np.isfinite(times)
        for step, time in zip(steps[inside].tolist(), times[inside].tolist(), strict=True):
            yield Mark("orchestrator" if source == "eval" else source, name, time, step)
    for event in restarts(events):
        # Not the starts of processes, of which their lanes show each.
        if begin <= event.time <= end and (event.event != "start" or event.process == RL):
            yield Mark(event.process, event.event, event.time, event.step, event.reason)


def restarts(events: list[Event]) -> list[Event]:
    """The events, in which each start of `rl` after the first becomes a restart."""
    starts = [event for event in events if event.event == "start" and event.process == RL]
    return [
        msgspec.structs.replace(event, event="restart") if event in starts[1:] else event
        for event in events
    ]
