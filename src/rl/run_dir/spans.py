"""`spans/<process>.jsonl`: what a process did from when to when, a line each, and numbers of it every two seconds.

A process that calls `start` appends to its own file; without that nothing here does anything. The first line of every start is a Start;
times behind it are of its host's monotonic clock, so a clock that is set does not tear a timeline apart. When the file has MAX_BYTES it
becomes `<process>.jsonl.old`, in place of the one before: so the newest spans are there, and at most twice as many bytes.

What is noted waits in memory for `flush`, half a second at most; what a killed process had not written is lost. A disk that cannot be
written costs the spans alone.
"""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rl.system.linux import place

MAX_BYTES = 4 << 20
FLUSHES = 4
"""Times that whoever has a heartbeat every two seconds flushes in between: one takes 16 microseconds with eight spans."""
LATEST = 1e11
"""A time beyond it, in some thousand years, is damage; seconds since the epoch."""
MAX_WAITING = 10_000
"""Lines in memory; more are dropped, as on a disk that does not answer."""
JOIN_S = 0.1
"""Work that begins again so soon goes on with the span before it."""
PART_S = 2.0
"""Work that goes on for long is noted in parts of about so many seconds, for whoever watches and for a process that is killed."""


class Start(msgspec.Struct, kw_only=True, tag="start", tag_field="kind"):
    """A process has begun to note its spans."""

    process: str
    pid: int
    host: str
    place: str
    """Where `monotonic` means something together with that of others, see rl.system.linux.place."""
    time: float
    """Seconds since the epoch, at `monotonic`."""
    monotonic: float


class Span(msgspec.Struct, kw_only=True, omit_defaults=True, tag="span", tag_field="kind"):
    """Something that was done. Times are seconds of the monotonic clock."""

    name: str
    begin: float
    end: float
    lane: str = ""
    """Where it stands beside others of the process that were done at the same time: a thread, or a kind of work."""
    step: int | None = None
    """The step, batch or policy version that it was about."""
    about: dict[str, Any] = {}


class Gauges(msgspec.Struct, kw_only=True, tag="gauges", tag_field="kind"):
    """Numbers of a process at one moment: requests in flight, rollouts that play, and what it counts."""

    at: float
    values: dict[str, float]


Line = Start | Span | Gauges
DECODER = msgspec.json.Decoder(Line)


class Recorder:
    """Notes the spans of a process. Any thread may call it."""

    def __init__(self, path: Path, process: str):
        self.path = path
        self.lock, self.writing = threading.Lock(), threading.Lock()
        here = {"process": process, "pid": os.getpid(), "host": socket.gethostname(), "place": place()}
        self.start = Start(**here, time=time.time(), monotonic=time.monotonic())
        self.begun = False
        """Whether the file has this start."""
        self.waiting: list[Line] = []
        self.size: int | None = None
        """Of the file, bytes; None: it was not looked at yet."""

    def add(self, line: Line) -> None:
        with self.lock:
            if len(self.waiting) < MAX_WAITING:
                self.waiting.append(line)

    def flush(self) -> None:
        """Writes what waits, if it can."""
        with self.writing, contextlib.suppress(OSError):
            with self.lock:
                lines, self.waiting = self.waiting, []
            if not lines:
                return
            data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.size is None:
                self.size = self.path.stat().st_size if self.path.exists() else 0
            if self.size and self.size + len(data) > MAX_BYTES:
                self.path.replace(old(self.path))
                self.begun, self.size = False, 0
            if not self.begun:
                data = msgspec.json.encode(self.start) + b"\n" + data
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                self.size += os.write(descriptor, data)
                self.begun = True
            finally:
                os.close(descriptor)


def old(path: Path) -> Path:
    """The file that a full one becomes."""
    return path.with_name(f"{path.name}.old")


def is_time(seconds: float | None) -> bool:
    """Whether a time in a file, seconds since the epoch, is one that a clock may have shown, or none."""
    return seconds is None or 0 < seconds < LATEST


def note_last(path: Path, start: Start, last: Span) -> None:
    """Appends what a dead process was in, which it could not note itself, if that can be written. `start` has the clock of `last`."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in (start, last)))


recorder: Recorder | None = None
"""This process's; None: it notes nothing."""


def start(folder: Path, process: str) -> None:
    """Begins to note the spans of this process, in a file of `folder`."""
    global recorder
    recorder = Recorder(folder / f"{process}.jsonl", process)


def stop() -> None:
    """Writes what is left, and ends that."""
    global recorder
    for one in tuple(busy):
        one.settle(0.0)
    flush()
    recorder = None


def flush() -> None:
    """Writes what waits: to be called by a thread or loop that does something anyway."""
    if recorder:
        for one in tuple(busy):
            one.settle()
        recorder.flush()


def note(name: str, begin: float, end: float, lane: str = "", step: int | None = None, **about: Any) -> None:
    """Notes what was done from `begin` to `end` (time.monotonic)."""
    if recorder:
        recorder.add(Span(name=name, begin=round(begin, 6), end=round(end, 6), lane=lane, step=step, about=about))


@contextlib.contextmanager
def span(name: str, lane: str = "", step: int | None = None, **about: Any) -> Iterator[None]:
    """Notes what the block does, also if it fails."""
    begin = time.monotonic()
    try:
        yield
    finally:
        note(name, begin, time.monotonic(), lane, step, **about)


def gauges(**values: float) -> None:
    """Notes numbers of this moment."""
    if recorder:
        recorder.add(Gauges(at=round(time.monotonic(), 6), values=values))


class Busy:
    """Notes when at least one of several things at once goes on, as one span; of one event loop."""

    def __init__(self, name: str, lane: str):
        self.name, self.lane = name, lane
        self.lock = threading.Lock()
        self.count, self.begin, self.end = 0, 0.0, 0.0
        """What is noted already ends where `begin` is."""
        busy.add(self)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """One of the things is the block."""
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

    def settle(self, part_s: float = PART_S) -> None:
        """Notes what is over, and what goes on for more than `part_s` seconds, so far."""
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
"""All of this process."""
