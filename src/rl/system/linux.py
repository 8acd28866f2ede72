"""What Linux is asked for: to end with the parent, to adopt orphans, the name that `ps` shows, file descriptors enough."""

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

from rl.system import process_table

LAUNCHER = "RL_PARENT_PID"
"""Environment variable with the pid of the process that must be alive above this one."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
"""From linux/prctl.h."""

LIBC = ctypes.CDLL(None, use_errno=True)
_prctl = LIBC.prctl  # looked up here, not in a forked child


def end_with_parent(signum: int = signal.SIGTERM) -> None:
    """Has the kernel send this signal to this process when the thread that started it ends. exec(2) keeps that, fork(2) does not."""
    _prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parent ends (a subreaper)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_process_name(name: str) -> None:
    """Sets what `ps` and `top` show for this process; at most 15 bytes."""
    _prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def raise_open_files() -> None:
    """Raises this process's limit of open files as far as it may: a rollout has a connection of its own, and the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@cache
def place() -> str:
    """Where the process ids of this process mean something: this start of this machine, and the pid namespace (a container has its own).

    A file that names a process names its place, too: elsewhere the same pid is another process. `0123abcd-4026531836`.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"{blake2b(boot, digest_size=4).hexdigest()}-{os.stat('/proc/self/ns/pid').st_ino}"


os.register_at_fork(after_in_child=place.cache_clear)  # unshare(2) gives the children another pid namespace


def ancestors() -> Iterator[int]:
    """Process ids from the parent upwards, as far as they can be seen."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        line = process_table.entry(pid)
        pid = line.parent if line else 0


def die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent dies. Call it first thing in the main() of a process below `rl`.

    A process that was started by hand, with no `rl` above, is left alone: it must outlive its shell. Race-free: if the parent died
    before the kernel was asked, `rl` is no longer among the ancestors. Linux means the parent *thread*, so a process that starts
    others does it from a thread that lives as long as they do.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_parent()
    if int(launcher) not in ancestors():
        raise SystemExit(128 + signal.SIGTERM)
