"""`status/<process>.json`: who runs where, its heartbeat, and what it is doing or waiting for; and the lock that fences a role."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl import faults
from rl.files import clean_leftovers

HEARTBEAT_S = 2.0
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("process", "host", "doing", "address"), str),
    **dict.fromkeys(("pid", "progress"), int),
    **dict.fromkeys(("started", "since", "heartbeat", "progressed"), (int, float)),
}
"""Of the fields that every reader relies on; one of another type counts as not there."""


class AlreadyRunningError(Exception):
    """Another live process holds this role in this run."""


class Status:
    """Publishes one process's status from a thread of its own, so that a blocked process shows as `doing` the same thing for long."""

    def __init__(self, path: Path, process: str):
        self.path = path
        clean_leftovers(path.parent)  # of a beat that a predecessor did not finish
        self.fields: dict[str, Any] = {"process": process, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        self.stopped, self.writing, self.changing = threading.Event(), threading.Lock(), threading.Lock()
        self.progress, self.progressed = 0, (0, time.time())
        """What was counted, and what it was when it was last seen to have grown, with the time of that."""
        self.gauges: dict[str, Callable[[], int]] = {}
        """Numbers of the moment, by name: every beat asks for them."""
        self.doing("starting")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def doing(self, what: str, **more: Any) -> None:
        """Sets what the process does or waits for, and other fields such as `address`; written at once."""
        with self.changing:
            if what != self.fields.get("doing"):
                more["since"] = time.time()
            self.fields = {**self.fields, "doing": what, **more}
        self._write()

    def advance(self, count: int = 1) -> None:
        """Counts what shows that work goes on: micro batches, rollouts, tokens. Written with the next beat; any thread may call it."""
        with self.changing:
            self.progress += count

    def close(self) -> None:
        """Takes the status away; a beat that is under way does not bring it back."""
        self.stopped.set()
        with self.writing:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self.stopped.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        # A status is for the eyes of others: a full disk must not end the process through it.
        with self.writing, contextlib.suppress(OSError):
            if self.stopped.is_set():
                return
            now = time.time()
            if self.progress != self.progressed[0]:
                self.progressed = (self.progress, now)
            counted = {"progress": self.progress, "progressed": self.progressed[1], **{name: read() for name, read in self.gauges.items()}}
            write_status(self.path, {**self.fields, **counted, "heartbeat": now})


def reachable(host: str) -> str:
    """The name under which others find a socket that is bound to `host`: for a wildcard, this machine's."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def write_status(path: Path, fields: dict[str, Any]) -> None:
    """Replaces a status file without fsync: it has no worth after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(fields))
    faults.point("status.rename")
    temporary.rename(path)


def read_status(path: Path) -> dict[str, Any] | None:
    """The last status of a process, or None if it has none."""
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return {key: value for key, value in fields.items() if isinstance(value, KINDS.get(key, object))} if isinstance(fields, dict) else None


ROLE_WAIT_S = 60.0
"""For a predecessor that is ending."""


def hold_role(path: Path, role: str, wait_s: float = 0.0) -> int:
    """Takes the lock of a role in a run for the life of this process. Raises AlreadyRunningError when it is still taken after `wait_s`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner = os.pread(fd, 100, 0).decode() or "unknown"
            os.close(fd)
            raise AlreadyRunningError(f"{role} of this run is already running ({owner}); stop it first") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd
