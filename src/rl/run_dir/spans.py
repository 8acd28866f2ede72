"""What processes did: their timed spans in `spans/<process>.jsonl`, with gauges every two seconds,
and the events of the run in `events.jsonl`, one per line.

A process that calls `start` appends to its own file; without `start` all functions here do nothing.
The first line of every start is a Start; later times are of the host's monotonic clock, so that
setting the clock does not break a timeline. When the file reaches MAX_BYTES, it replaces
`<process>.jsonl.old`: the newest spans are kept, in at most twice as many bytes.

Lines wait in memory for `flush`, at most half a second; those that a killed process had not written
are lost. If the disk cannot be written, only the spans are lost.

Events are starts, deaths, repairs and the stop of a run: `rl` writes them, the diagnosis reads
them. On a cluster each machine that serves writes `events-node3.jsonl` beside it, because machines
cannot append to one file of a shared disk.
"""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rl.run_dir.files import LineReader
from rl.system.linux import pid_scope

MAX_BYTES = 4 << 20
FLUSHES = 4
"""Flushes per heartbeat interval of two seconds: one takes 16 microseconds with eight spans."""
LATEST = 1e11
"""Seconds since the epoch, some thousand years from now; a later time means damage."""
Time = Annotated[float, msgspec.Meta(gt=0, lt=LATEST)]
"""A time in a file, seconds since the epoch."""
MAX_WAITING = 10_000
"""Maximum lines in memory; more are dropped, for example when the disk does not respond."""
JOIN_S = 0.1
"""Work that begins again within this time continues the previous span."""
PART_S = 2.0
"""Long work is recorded in parts of about this many seconds, so that it is seen while it runs,
and not lost in a kill."""


class Start(msgspec.Struct, kw_only=True, tag="start", tag_field="kind"):
    """A process has begun to record its spans."""

    process: str
    pid: int
    host: str
    place: str
    """Processes with the same place share the monotonic clock, see rl.system.linux.pid_scope."""
    time: float
    """Seconds since the epoch at the time `monotonic`."""
    monotonic: float


class Span(msgspec.Struct, kw_only=True, omit_defaults=True, tag="span", tag_field="kind"):
    """A piece of work. Times are seconds of the monotonic clock."""

    name: str
    begin: float
    end: float
    lane: str = ""
    """Its row among concurrent spans of the process: a thread, or a kind of work."""
    step: int | None = None
    """The step, batch or policy version that it was about."""
    about: dict[str, Any] = {}


class Gauges(msgspec.Struct, kw_only=True, tag="gauges", tag_field="kind"):
    """Numbers of a process at one moment: requests in flight, rollouts in flight, its progress
    count."""

    at: float
    values: dict[str, float]


Line = Start | Span | Gauges
DECODER = msgspec.json.Decoder(Line)


class SpanLog:
    """Records the spans of a process. Thread-safe."""

    def __init__(self, path: Path, process: str):
        self.path = path
        self.lock, self.writing = threading.Lock(), threading.Lock()
        self.start = Start(
            process=process,
            pid=os.getpid(),
            host=socket.gethostname(),
            place=pid_scope(),
            time=time.time(),
            monotonic=time.monotonic(),
        )
        self.has_start = False
        """Whether this start has been written to the file."""
        self.waiting: list[Line] = []

    def add(self, line: Line) -> None:
        with self.lock:
            if len(self.waiting) < MAX_WAITING:
                self.waiting.append(line)

    def flush(self) -> None:
        """Writes the waiting lines. OSErrors are ignored."""
        with self.writing, contextlib.suppress(OSError):
            with self.lock:
                lines, self.waiting = self.waiting, []
            if not lines:
                return
            data = encoded(lines)
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_size + len(data) > MAX_BYTES:
                    self.path.replace(old(self.path))
                    self.has_start = False
            append(self.path, data if self.has_start else encoded([self.start]) + data)
            self.has_start = True


def encoded(lines: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(data)


def old(path: Path) -> Path:
    """Returns the name that a full file is moved to."""
    return path.with_name(f"{path.name}.old")


def is_time(seconds: float) -> bool:
    """Returns whether a time from a file, seconds since the epoch, is plausible."""
    return 0 < seconds < LATEST


recorder: SpanLog | None = None
"""The recorder of this process; None: nothing is recorded."""


def start(folder: Path, process: str) -> None:
    """Begins to record the spans of this process in a file in `folder`."""
    global recorder
    recorder = SpanLog(folder / f"{process}.jsonl", process)


def stop() -> None:
    """Writes the remaining spans and stops recording."""
    global recorder
    flush(0.0)
    recorder = None


def flush(part_s: float = PART_S) -> None:
    """Writes the waiting lines, and work so far that takes longer than `part_s` seconds. To be
    called from a thread or loop that runs periodically anyway."""
    if recorder:
        for work in tuple(busy):
            work.settle(part_s)
        recorder.flush()


def note(
    name: str, begin: float, end: float, lane: str = "", step: int | None = None, **about: Any
) -> None:
    """Records a span from `begin` to `end` (time.monotonic)."""
    if recorder:
        begin, end = round(begin, 6), round(end, 6)
        recorder.add(Span(name=name, begin=begin, end=end, lane=lane, step=step, about=about))


@contextlib.contextmanager
def span(name: str, lane: str = "", step: int | None = None, **about: Any) -> Iterator[None]:
    """Records the block as a span, even if it fails."""
    begin = time.monotonic()
    try:
        yield
    finally:
        note(name, begin, time.monotonic(), lane, step, **about)


def gauges(**values: float) -> None:
    """Records the current values of gauges."""
    if recorder:
        recorder.add(Gauges(at=round(time.monotonic(), 6), values=values))


class Busy:
    """Records as one span the time during which at least one of several concurrent blocks runs."""

    def __init__(self, name: str, lane: str):
        self.name, self.lane = name, lane
        self.lock = threading.Lock()
        self.count, self.begin, self.end = 0, 0.0, 0.0
        """The time before `begin` is already recorded."""
        busy.add(self)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Counts the block as one of them."""
        with self.lock:
            now = time.monotonic()
            if self.count == 0 and now - self.end > JOIN_S:
                self._note(self.end)
                self.begin = now
            self.count += 1
        try:
            yield
        finally:
            with self.lock:
                self.count -= 1
                self.end = time.monotonic()

    def settle(self, part_s: float) -> None:
        """Records finished work, and running work so far if that is longer than `part_s`
        seconds."""
        with self.lock:
            if self.count == 0:
                self._note(self.end)
            elif (now := time.monotonic()) - self.begin > part_s:
                self._note(now)

    def _note(self, end: float) -> None:
        if end > self.begin:
            note(self.name, self.begin, end, self.lane)
            self.begin = end


busy: "weakref.WeakSet[Busy]" = weakref.WeakSet()
"""All instances in this process."""


# Events -------------------------------------------------------------------------------------------


EventKind = Literal[
    "start",
    "death",
    "restart",
    "ready",
    "silent",
    "stall",
    "quarantine",
    "repair",
    "give_up",
    "warning",
    "stop",
    "end",
]


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One line. Fields that an event does not have are left out."""

    time: Time
    event: EventKind
    process: str
    """`rl` for events of the whole run, such as its start, its stop, and its end before
    max_steps."""
    env: str = ""
    """The environment that a warning is about."""
    about: str = ""
    """What kind of warning it is, see RunWarning."""
    attempt: int | None = None
    exit: int | None = None
    reason: str = ""
    """Text for people, like `doing` and `said`."""
    seconds: float | None = None
    """Death: duration of the attempt. Restart or ready: time since the death before it, or since
    the start. Stall: its length."""
    phase: str | None = None
    """Death or silence: phase of the last status, with its `step`. For a quarantine `step` is
    the batch."""
    step: int | None = None
    doing: str = ""
    said: str = ""
    """Last line of the log."""
    pid: int | None = None
    file: str = ""
    deaths: int | None = None
    prefill_tokens: int = 0
    """Of an inference server that is ready, see RoleStatus."""
    lines: list[str] = []


EVENT_DECODER = msgspec.json.Decoder(Event)


def append_event(path: Path, event: Event) -> None:
    """Appends a line. OSErrors are ignored: a full disk must not end the run here."""
    with contextlib.suppress(OSError):
        append(path, encoded([event]))


class EventsReader:
    """Follows the events of a run: its file, and on a cluster those of the machines that serve."""

    def __init__(self, path: Path):
        self.path, self.readers = path, dict[Path, LineReader]()

    def skip(self) -> None:
        for reader in self._files():
            reader.skip()

    def new(self) -> list[Event]:
        """Returns the events since the last call, those of several machines ordered by their
        times. Skips damaged lines, and those with an impossible time. Raises PermissionError."""
        events = [event for reader in self._files() for event in reader.decoded(EVENT_DECODER)]
        if len(self.readers) > 1:
            events.sort(key=lambda event: event.time)
        return events

    def _files(self) -> list[LineReader]:
        paths = [self.path, *sorted(self.path.parent.glob(f"{self.path.stem}-node*.jsonl"))]
        return [self.readers.setdefault(path, LineReader(path)) for path in paths]


def read_events(path: Path) -> list[Event]:
    """Reads all events, oldest first; empty without the file. See EventsReader.new."""
    return EventsReader(path).new()
