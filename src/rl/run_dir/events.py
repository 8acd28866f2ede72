"""`events.jsonl`: starts, deaths, repairs and the stop of a run, a line each. The supervisor writes it, the diagnosis reads it."""

import contextlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from rl.run_dir.spans import is_time
from rl.run_dir.status import UNREADABLE, Phase

EventKind = Literal["start", "death", "restart", "ready", "silent", "stall", "quarantine", "repair", "give_up", "warning", "stop", "end"]


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One line. What an event does not have is left out."""

    time: float
    """Seconds since the epoch."""
    event: EventKind
    process: str
    """`rl` for what concerns the whole run, such as its start, its stop, and its end before max_steps."""
    env: str = ""
    """The environment that a warning is about."""
    attempt: int | None = None
    exit: int | None = None
    reason: str = ""
    """For people, as are `doing` and `said`."""
    seconds: float | None = None
    """Of a death: what the attempt lasted. Of a restart or ready: since the death before it, or since the start. Of a stall: its length."""
    phase: Phase | None = None
    """Of a death or a silence: the last status's, with its `step`. Of a quarantine `step` is the batch."""
    step: int | None = None
    doing: str = ""
    said: str = ""
    """The last line of the log."""
    pid: int | None = None
    file: str = ""
    deaths: int | None = None
    lines: list[str] = []


def append_event(path: Path, event: Event) -> None:
    """Appends a line, if it can: a full disk must not end the run through it."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, msgspec.json.encode(event) + b"\n")
        finally:
            os.close(fd)


def read_events(path: Path) -> list[Event]:
    """All events, oldest first; empty without the file. A line that is none, such as the one its writer was killed in, is passed over, and
    one whose time no clock shows. Raises PermissionError."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = list[Event]()
    for line in lines:
        with contextlib.suppress(*UNREADABLE):
            events.append(msgspec.json.decode(line, type=Event))
    return [event for event in events if is_time(event.time)]
