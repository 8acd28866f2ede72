"""`status/<process>.json`: who runs where, its heartbeat, and what it is doing or waiting for; and the lock that fences a role."""

import contextlib
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

HEARTBEAT_S = 2.0


class AlreadyRunningError(Exception):
    """Another live process holds this role in this run."""


class Status:
    """Publishes one process's status from a thread of its own, so that a blocked process shows as `doing` the same thing for long."""

    def __init__(self, path: Path, process: str):
        self.path = path
        self.fields: dict[str, Any] = {"process": process, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        self.stopped, self.writing = threading.Event(), threading.Lock()
        self.doing("starting")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def doing(self, what: str, **more: Any) -> None:
        """Sets what the process does or waits for, and other fields such as `address`; written at once."""
        if what != self.fields.get("doing"):
            more["since"] = time.time()
        self.fields = {**self.fields, "doing": what, **more}
        self._write()

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
            write_status(self.path, {**self.fields, "heartbeat": time.time()})


def reachable(host: str) -> str:
    """The name under which others find a socket that is bound to `host`: for a wildcard, this machine's."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def write_status(path: Path, fields: dict[str, Any]) -> None:
    """Replaces a status file without fsync: it has no worth after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.tmp")
    temporary.write_text(json.dumps(fields))
    temporary.rename(path)


def read_status(path: Path) -> dict[str, Any] | None:
    """The last status of a process, or None if it has none."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def hold_role(path: Path, role: str) -> int:
    """Takes the lock of a role in a run for the life of this process. Raises AlreadyRunningError when it is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 100, 0).decode() or "unknown"
        os.close(fd)
        raise AlreadyRunningError(f"{role} of this run is already running ({owner}); stop it first") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd
