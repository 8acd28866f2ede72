"""Roles of a run and their holders: the lock `status/<role>.lock`, and the lease
`status/<role>.000012.lease` with its fencing number.

The lock decides on one host, the lease between hosts. The lock is flock(2): exact and immediate,
but a shared file system may not support it or may keep it local to one host. So there is always a
lease, too. The next holder makes the file with the next number, which only one process can (link(2)
fails if the name exists), and empties the older one to mark it as over. The holder renews its lease
by touching the file every few seconds.

Whether a holder is alive is decided

* by the lock, if the lease was made during this boot of this machine and locks work here;
* by the process table, if it was made in this pid namespace;
* else by its lease: the holder counts as dead when the file has not *changed* for LEASE_S seconds
  of the waiting process's own clock. The values of its timestamps do not matter, so clocks are
  never compared.

A holder that was wrongly declared dead (its host slept, its network was cut) notices at its next
commit in `check_fence`, and ends. If it loses the role between that check and the commit, the
commit fails because the name is taken (`files.write_file(new=True)`).
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

from rl.run_dir.files import TakenError, write_file
from rl.run_dir.status import MACHINE_LEASE, Staleness, is_over, read_json
from rl.system.errors import RESTART, RunError
from rl.system.linux import is_alive, own_start, pid_scope

ROLE_WAIT_S = 60.0
"""How long to wait for a predecessor to end."""
LEASE_S = 30.0
"""A holder on another host counts as dead when its lease has not changed for this long."""
RENEW_S = 3.0
KEPT = 16
"""Number of leases of a role that stay: a process with a stale listing (network file systems)
then finds the next name taken."""
POLL_S = 0.1
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of flock on a file system without locks."""
GONE = (errno.ENOENT, errno.ESTALE)


class LockOwner(msgspec.Struct, frozen=True):
    """The content of a lock file and of a lease: the process that last took it."""

    pid: int
    host: str
    place: str = ""
    """Scope of the pid, see rl.system.linux.pid_scope."""
    started: str = ""
    """Start of the process in clock ticks since boot."""
    machine: str = ""
    """On a cluster: the lease of its machine, as a path in status/. When that is over, so is
    every role held there."""

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def lives(self) -> bool | None:
        """Returns whether the process is alive; None if that cannot be seen from here."""
        return is_alive(self.pid, self.place, self.started)


def this_process() -> LockOwner:
    return LockOwner(
        os.getpid(),
        socket.gethostname(),
        pid_scope(),
        own_start(),
        os.environ.get(MACHINE_LEASE, ""),
    )


class RoleTakenError(RunError):
    """The role belongs to a living process."""

    exit_code = RESTART


HELD: "dict[Path, Lease]" = {}
"""The leases that this process holds, by the path of the lock: a role belongs to a process, like
a flock."""


def lease_path(lock: Path, number: int) -> Path:
    return lock.with_name(f"{lock.stem}.{number:06d}.lease")


def newest_lease(lock: Path, known: int = 0) -> int:
    """Returns the number of the newest lease of a role, 0 if there is none. The listing may be
    stale; `known` is a number already seen."""
    newest = max(known, *lease_numbers(lock), 0)
    while lease_path(lock, newest + 1).exists():
        newest += 1
    return newest


def lease_numbers(lock: Path) -> list[int]:
    names = re.compile(rf"{re.escape(lock.stem)}\.([0-9]{{6,}})\.lease")
    return [
        int(match[1]) for path in lock.parent.iterdir() if (match := names.fullmatch(path.name))
    ]


class Lease:
    """A role that this process holds until `close` or until the process ends. A thread renews
    it."""

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
            with contextlib.suppress(OSError):  # the file system may answer again next time
                os.utime(self.path)

    def check(self) -> None:
        """Raises RunError if another process has taken over the role."""
        # in this order: opening the file makes a client of NFS look up names anew
        if self._is_unchanged() and not lease_path(self.lock, self.number + 1).exists():
            return
        newest = lease_path(self.lock, newest_lease(self.lock, self.number))
        owner = read_json(newest, LockOwner) or "unknown"
        raise RunError(
            f"{self.lock.parent.parent}: another process ({owner}) has taken over as "
            f"{self.lock.stem} of this run, because this one ({this_process()}) did not renew its "
            f"lease for {LEASE_S:.0f} s; this one ends, and the run continues there"
        )

    def _is_unchanged(self) -> bool:
        """Returns whether the file has what this process wrote: the next holder empties it. Opening
        it asks the file server, while looking up a name may be answered from a cache."""
        try:
            return self.path.read_bytes() == self.content
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False

    def close(self) -> None:
        """Gives the role back. Empties the lease, so that the next process need not wait to see
        whether it changes."""
        self.closed.set()
        self.thread.join()
        HELD.pop(self.lock, None)
        with contextlib.suppress(OSError):
            if self._is_unchanged():
                os.truncate(self.path, 0)
        os.close(self.fd)


def check_fence(lock: Path) -> None:
    """Raises RunError if another process has taken over this role from this one. Does nothing if
    this process never held it."""
    if lease := HELD.get(lock):
        lease.check()


def lost_to(lock: Path) -> str:
    """Returns a sentence if another process has taken over this role from this one; empty if
    not, or if its disk does not answer."""
    try:
        check_fence(lock)
    except RunError as error:
        return str(error)
    except OSError:
        pass
    return ""


def hold_role(lock: Path, wait_s: float = 0.0) -> Lease:
    """Takes a role in a run, `status/<role>.lock`, for the life of this process. Raises RunError if
    it is still taken after `wait_s`.

    If the holder is on another host, where only time shows whether it is alive, waits up to LEASE_S
    in any case, and prints that.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline, attempt, is_told = time.monotonic() + wait_s, LeaseAttempt(lock), False
    run, role, lease = lock.parent.parent, lock.stem, None
    try:
        while not (lease := attempt.take()):
            if time.monotonic() >= deadline and not attempt.undecided:
                owner = attempt.owner or read_json(lock, LockOwner) or "unknown"
                raise RoleTakenError(
                    f"{run}: {role} of this run is already running ({owner}); stop it first"
                )
            if attempt.undecided and not is_told:
                is_told = True
                print(
                    f"waiting up to {LEASE_S:.0f} s to see whether {attempt.owner} is still the "
                    f"{role} of {run}",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(POLL_S)
    finally:
        if lease is None:
            attempt.close()
    return lease


class LeaseAttempt:
    """An attempt to take a role that another process may hold."""

    def __init__(self, lock: Path):
        self.lock, self.fd = lock, os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        self.owner: LockOwner | None = None
        """Holder of the lease, if it was seen."""
        self.leases = Staleness()
        """Tracks number and modification time of a lease whose holder cannot be checked
        otherwise."""
        self.undecided = False
        """Whether a lease is being watched that has not changed so far."""

    def take(self) -> Lease | None:
        """Returns the lease, or None if the role is taken or may be. Call it repeatedly."""
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
        lease = self._next_lease(locks)
        if lease is None and locks:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        return lease

    def close(self) -> None:
        os.close(self.fd)

    def _next_lease(self, locks: bool) -> Lease | None:
        newest, content = newest_lease(self.lock), msgspec.json.encode(this_process())
        if newest and not self._is_free(lease_path(self.lock, newest), newest, locks):
            return None
        try:
            write_file(lease_path(self.lock, newest + 1), content, new=True)
        except TakenError:
            return None
        if newest:
            declare_lost(lease_path(self.lock, newest))
        for number in lease_numbers(self.lock):
            if number <= newest + 1 - KEPT:
                lease_path(self.lock, number).unlink(missing_ok=True)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, content, 0)
        return Lease(self.lock, newest + 1, self.fd)

    def _is_free(self, path: Path, number: int, locks: bool) -> bool:
        """Returns whether the holder of the newest lease has given it back or is dead."""
        try:
            # opening it makes a network file system fetch the modification time, too
            with path.open("rb") as file:
                data, changed = file.read(), os.fstat(file.fileno()).st_mtime_ns
            owner = self.owner = msgspec.json.decode(data, type=LockOwner) if data else None
        except FileNotFoundError:  # deleted by a successor, which the next listing will show
            return False
        except msgspec.DecodeError:
            owner = self.owner = LockOwner(0, "an unknown host")
        self.undecided = False
        if owner is None:
            return True
        if (lives := owner.lives()) is not None:
            return not lives
        if locks and owner.place.partition("-")[0] == pid_scope().partition("-")[0]:
            return True  # a holder in another container of this machine would hold the lock
        if owner.machine and is_over(self.lock.parent / owner.machine):
            return True
        unchanged_s = self.leases.look("", (number, changed))
        self.undecided = not (self.leases.moved("") and unchanged_s == 0.0)
        return unchanged_s >= LEASE_S


def declare_lost(lease: Path) -> None:
    """Ends the lease of a machine that is lost: all roles held there are free at once, and if it
    lives on, its next `check` ends it."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(lease, 0)


def forget_dead_servers(status_dir: Path) -> None:
    """Deletes the statuses of further inference servers that have ended, which are those whose role
    nobody holds.

    For holders on other hosts, where only time shows whether they are alive, it waits up to LEASE_S
    for all of them together.
    """
    statuses = sorted(status_dir.glob("inference-*.json"))
    attempts = [LeaseAttempt(path.with_suffix(".lock")) for path in statuses]
    while attempts:
        undecided = []
        for attempt in attempts:
            if lease := attempt.take():
                attempt.lock.with_suffix(".json").unlink(missing_ok=True)
                lease.close()
            elif attempt.undecided:
                undecided.append(attempt)
            else:
                attempt.close()
        attempts = undecided
        if attempts:
            time.sleep(POLL_S)
