"""`events.jsonl`: starts, deaths, repairs and the stop of a run, one per line. `rl` writes it, the
diagnosis reads it.

On a cluster each machine that serves writes `events-node3.jsonl` beside it, because machines cannot
append to one file of a shared disk.
"""

import contextlib
from pathlib import Path
from typing import Literal

import msgspec

from rl.run_dir.files import LineReader
from rl.run_dir.spans import Time, append, encoded

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
    lines: list[str] = []


DECODER = msgspec.json.Decoder(Event)


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
        events = [event for reader in self._files() for event in reader.decoded(DECODER)]
        if len(self.readers) > 1:
            events.sort(key=lambda event: event.time)
        return events

    def _files(self) -> list[LineReader]:
        paths = [self.path, *sorted(self.path.parent.glob(f"{self.path.stem}-node*.jsonl"))]
        return [self.readers.setdefault(path, LineReader(path)) for path in paths]


def read_events(path: Path) -> list[Event]:
    """Reads all events, oldest first; empty without the file. See EventsReader.new."""
    return EventsReader(path).new()
