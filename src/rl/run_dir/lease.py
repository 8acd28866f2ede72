"""Who holds a role of a run: the lock `status/<role>.lock`, and the lease `status/<role>.000012.lease` with its fencing number.

The lock is flock(2): exact and at once, but on a shared file system it may be missing, or be seen by one host alone. So there is always a
lease, too. The next holder makes the file with the next number, which only one can (link(2) fails if the name is there), and empties the
older one, which says that it is over. The holder renews its lease: every few seconds the file gets a new modification time. Whether a
holder lives is known

* by the lock, if the lease was made on this start of this machine and locks work here;
* by the process table, if it was made in this pid namespace;
* else by its lease: the holder is given up when the file has not *changed* for LEASE_S seconds of the waiting process's own clock. What
  the times in it are does not matter, so no clocks are compared.

A holder that was given up in error (a host that slept, a network that was cut) learns it at its next commit from `check_fence`, and ends.
What it does between that look and its commit meets a name that is taken (`files.write_file(new=True)`).
"""

import contextlib
import errno
import fcntl
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from rl.run_dir.files import write_file
from rl.run_dir.naming import TakenError
from rl.run_dir.status import read_json
from rl.system import process_table
from rl.system.errors import RESTART, RunError
from rl.system.linux import place

ROLE_WAIT_S = 60.0
"""How long a predecessor may take to end."""
LEASE_S = 30.0
"""A holder on another host whose lease has not changed for so long is given up."""
RENEW_S = 3.0
KEPT = 16
"""So many leases of a role stay. Who sees a listing of long ago, as network file systems show it, finds the next name taken."""
POLL_S = 0.1
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock on a file system that has no locks."""
SERVER_FILE = re.compile(r"(inference-.+?)(?:\.[0-9]{6,}\.lease|\.json|\.lock)")
"""What a further inference server has in status/."""
GONE = (errno.ENOENT, errno.ESTALE)


class LockOwner(msgspec.Struct, frozen=True):
    """The content of a lock file and of a lease: the process that last took it."""

    pid: int
    host: str
    place: str = ""
    """Where the pid means something, see rl.system.linux.place; empty in files of versions of rl before it."""
    started: str = ""
    """When the process began, in clock ticks since boot."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def lives(self) -> bool | None:
        """Whether the process lives; None where that cannot be seen from here."""
        if self.place != place():
            return None
        line = process_table.entry(self.pid)
        return line is not None and line.start == self.started and line.state != "Z"


def this_process() -> LockOwner:
    line = process_table.entry(os.getpid())
    return LockOwner(os.getpid(), socket.gethostname(), place(), line.start if line else "")


HELD: "dict[Path, Lease]" = {}
"""The leases that this process holds, by the path of the lock: roles are of processes, as flock is."""


def lease_path(lock: Path, number: int) -> Path:
    return lock.with_name(f"{lock.stem}.{number:06d}.lease")


def open_lock(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)


def newest_lease(lock: Path, known: int = 0) -> int:
    """The number of the newest lease of a role, 0 if there is none. The listing may be of some time ago; `known` is one that was seen."""
    newest = max(known, *lease_numbers(lock), 0)
    while lease_path(lock, newest + 1).exists():
        newest += 1
    return newest


def lease_numbers(lock: Path) -> list[int]:
    names = re.compile(rf"{re.escape(lock.stem)}\.([0-9]{{6,}})\.lease")
    return [int(match[1]) for path in lock.parent.iterdir() if (match := names.fullmatch(path.name))]


class Lease:
    """A role that this process holds until `close`, or until it ends. A thread renews it."""

    def __init__(self, lock: Path, number: int, fd: int):
        self.lock, self.number, self.path = lock, number, lease_path(lock, number)
        self.fd = fd
        """File descriptor that holds the lock."""
        self.content = self.path.read_bytes()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._renew, name=f"lease-{lock.stem}", daemon=True)
        HELD[lock] = self
        self.thread.start()

    def _renew(self) -> None:
        while not self.closed.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a file system that does not answer now may at the next time
                os.utime(self.path)

    def check(self) -> None:
        """Raises RunError if another process has taken the role over."""
        try:  # the next holder empties it; and opening a file asks the server, where looking for a name may be answered from a cache
            mine = self.path.read_bytes() == self.content
        except OSError as error:
            if error.errno not in GONE:
                raise
            mine = False
        if mine and not lease_path(self.lock, self.number + 1).exists():
            return
        newest = lease_path(self.lock, newest_lease(self.lock, self.number))
        owner, run = read_json(newest, LockOwner) or "unknown", self.lock.parent.parent
        raise RunError(
            f"{run}: another process ({owner}) has taken over as {self.lock.stem} of this run, because this one ({this_process()}) did not "
            f"renew its lease for {LEASE_S:.0f} s; this one ends, and the run goes on there"
        )

    def close(self) -> None:
        """Gives the role back. An empty lease says so: the next process need not wait to see whether it changes."""
        self.closed.set()
        self.thread.join()
        HELD.pop(self.lock, None)
        with contextlib.suppress(OSError):
            if self.path.read_bytes() == self.content:
                os.truncate(self.path, 0)
        os.close(self.fd)


def check_fence(lock: Path) -> None:
    """Raises RunError if this process held this role and another has taken it over; a process that never held it may go on."""
    if lease := HELD.get(lock):
        lease.check()


def hold_role(lock: Path, wait_s: float = 0.0) -> Lease:
    """Takes a role in a run, `status/<role>.lock`, for the life of this process. Raises RunError when it is still taken after `wait_s`.

    Where only time tells whether the holder lives, on another host, it waits up to LEASE_S in any case, and says so.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline, attempt = time.monotonic() + wait_s, Attempt(lock)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(attempt.close)
        told = False
        while not (lease := attempt.take()):
            if time.monotonic() >= deadline and not attempt.undecided:
                owner = attempt.owner or read_json(lock, LockOwner) or "unknown"
                text = f"{lock.parent.parent}: {lock.stem} of this run is already running ({owner}); stop it first"
                raise RunError(text, RESTART)
            if attempt.undecided and not told:
                told = True
                waits = f"waiting up to {LEASE_S:.0f} s to see whether {attempt.owner} is still the {lock.stem} of {lock.parent.parent}"
                print(waits, file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        on_failure.pop_all()
    return lease


class Attempt:
    """The way to a role that another process may hold."""

    def __init__(self, lock: Path):
        self.lock, self.fd = lock, open_lock(lock)
        self.owner: LockOwner | None = None
        """Who holds the lease, as far as that was seen."""
        self.seen: tuple[int, int] | None = None
        """Number and modification time of a lease that only time can judge."""
        self.since = 0.0
        """When it was first seen to be like that, on this process's clock (time.monotonic)."""
        self.undecided = False
        """Whether a lease is being watched that has not changed since."""

    def take(self) -> Lease | None:
        """The role, or None if it is taken, or may be. To be called again and again."""
        locks = True
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.undecided = False
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            locks = False
        if not self._is_open():
            os.close(self.fd)
            self.fd = open_lock(self.lock)
            return None
        newest = newest_lease(self.lock)
        if newest and not self._is_free(lease_path(self.lock, newest), newest, locks):
            return self._unlock(locks)
        mine = this_process()
        try:
            write_file(lease_path(self.lock, newest + 1), msgspec.json.encode(mine), new=True)
        except TakenError:
            return self._unlock(locks)
        with contextlib.suppress(FileNotFoundError):
            if newest:
                os.truncate(lease_path(self.lock, newest), 0)
        for number in lease_numbers(self.lock):
            if number <= newest + 1 - KEPT:
                lease_path(self.lock, number).unlink(missing_ok=True)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, msgspec.json.encode(mine), 0)
        return Lease(self.lock, newest + 1, self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def _is_open(self) -> bool:
        """Whether the open file still has its name: `forget_dead_servers` deletes locks, and one that has no name locks nobody out."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.lock))
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False

    def _unlock(self, locks: bool) -> None:
        if locks:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _is_free(self, path: Path, number: int, locks: bool) -> bool:
        """Whether the holder of the newest lease has given it back or is dead."""
        try:
            with path.open("rb") as file:  # which has a network's file system ask for the time, too
                data, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
            owner = self.owner = msgspec.json.decode(data, type=LockOwner) if data else None
        except FileNotFoundError:  # its successor has deleted it: the next listing will show that one
            return False
        except msgspec.DecodeError:
            owner = self.owner = LockOwner(0, "an unknown host")
        self.undecided = False
        if owner is None:
            return True
        if (lives := owner.lives()) is not None:
            return not lives
        if locks and owner.place.partition("-")[0] == place().partition("-")[0]:
            return True  # in another container of this machine; it would hold the lock
        now = time.monotonic()
        if self.seen != (number, changed):
            self.undecided = self.seen is None
            self.seen, self.since = (number, changed), now
            return False
        self.undecided = True
        return now - self.since >= LEASE_S


def forget_dead_servers(status_dir: Path) -> None:
    """Deletes what further inference servers that have ended left here: the files of those whose role nobody holds.

    Lock and leases go, too: only a server that has bound the port of its name asks for them. Where only time tells whether servers live, on
    other hosts, it waits up to LEASE_S for all of them together.
    """
    names = {match[1] for path in status_dir.glob("inference-*.*") if (match := SERVER_FILE.fullmatch(path.name))}
    attempts = [Attempt(status_dir / f"{name}.lock") for name in sorted(names)]
    while attempts:
        undecided = []
        for attempt in attempts:
            lease = attempt.take()
            if lease:
                attempt.lock.with_suffix(".json").unlink(missing_ok=True)
                for number in lease_numbers(attempt.lock):
                    lease_path(attempt.lock, number).unlink(missing_ok=True)
                attempt.lock.unlink(missing_ok=True)
                lease.close()
            elif attempt.undecided:
                undecided.append(attempt)
            else:
                attempt.close()
        attempts = undecided
        if attempts:
            time.sleep(POLL_S)
