"""The process table from /proc, and the guard: a small process beside `rl` that survives when `rl`
is killed by SIGKILL.

The guard reads a pipe that `rl` holds open. When `rl` is gone, it gives processes with the run's
marker some time to end by themselves, kills the rest, and deletes the run's temporary directory. It
is run by its path and only uses the standard library: 30 ms to start, 12 MB.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

MARKER = "RL_CHILD"
"""Environment variable of every process below `rl`: `<pid of rl>:<its start>:<name>:<attempt>`;
one marker for each `rl` above it, separated by spaces."""
KILL_DEADLINE_S = 5.0
TRACKER_S = 3.0
"""How long a resource tracker of multiprocessing may take to delete the semaphores and shared
memory of killed processes."""
POLL_S = 0.1


@dataclass(frozen=True)
class Entry:
    """An entry of the process table."""

    parent: int
    session: int
    state: str
    """`T`: stopped, `Z`: ended and not yet reaped, `D`: in uninterruptible sleep."""
    start: str
    """Start in clock ticks since boot; identifies a process uniquely together with the pid."""


Table = dict[int, Entry]
"""Processes by pid."""


def read(pid: int, name: str) -> bytes:
    """Returns a file of a process; empty if it is gone or belongs to another user."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def entry(pid: int) -> Entry | None:
    """Returns the entry of a process; None if it is gone."""
    # a name has any bytes, and is cut at 15, also within a character
    fields = read(pid, "stat").rpartition(b")")[2].decode().split()
    if len(fields) <= 19:
        return None
    return Entry(int(fields[1]), int(fields[3]), fields[0], fields[19])


def table() -> Table:
    """Returns all processes of this machine, or of this container's pid namespace."""
    lines = {int(name): entry(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: line for pid, line in lines.items() if line}


def markers(pid: int) -> list[str]:
    """Returns the markers of a process; empty if it is gone or belongs to another user."""
    prefix = f"{MARKER}=".encode()
    for variable in read(pid, "environ").split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode(errors="replace").split()
    return []


def trees(processes: Table, roots: Iterable[int], without: Collection[int] = ()) -> set[int]:
    """Returns the existing roots and all their descendants, except the trees of `without`."""
    children: dict[int, list[int]] = {}
    for pid, line in processes.items():
        children.setdefault(line.parent, []).append(pid)
    tree, todo = set[int](), [pid for pid in roots if pid in processes]
    while todo:
        pid = todo.pop()
        if pid not in tree and pid not in without:
            tree.add(pid)
            todo += children.get(pid, [])
    return tree


def marked(
    processes: Table, among: Iterable[int], marker: str, sessions: Mapping[int, str]
) -> set[int]:
    """Returns the processes with this marker (prefix, if it ends with a colon) or in one of the
    sessions, and their descendants.

    `sessions`: pid of the leader -> start of the leader. A session whose number was reused by
    another leader does not match.
    """

    def belongs(pid: int) -> bool:
        session = processes[pid].session
        leader = processes.get(session)
        if session in sessions and (leader is None or leader.start == sessions[session]):
            return True
        is_prefix = marker.endswith(":")
        return any(
            other == marker or (is_prefix and other.startswith(marker)) for other in markers(pid)
        )

    return trees(processes, [pid for pid in among if belongs(pid)], {os.getpid()})


def is_resource_tracker(pid: int) -> bool:
    """Returns whether this is the process in which multiprocessing tracks semaphores and shared
    memory."""
    return any("resource_tracker" in word for word in command_line(pid))


def command_line(pid: int) -> list[str]:
    """Returns the arguments of a process's command; empty if it is gone."""
    return read(pid, "cmdline").decode(errors="replace").split("\0")


def send_signal(processes: Table, signum: int) -> None:
    """Signals processes found in the table, unless their pid has been reused since."""
    for pid, known in processes.items():
        if (line := entry(pid)) and line.start == known.start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)


def reap_session(session: int) -> None:
    """Reaps the ended processes of a session that this process, a subreaper, has adopted."""
    for pid, line in table().items():
        if line.state == "Z" and line.session == session and line.parent == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill(find: Callable[[], Table], pause_s: float) -> list[int]:
    """Sends SIGKILL to the processes that `find` returns until it has returned nothing twice: one
    search can miss both a dying parent and its new child. Returns the pids still alive after
    KILL_DEADLINE_S: they are stuck in the kernel.

    Resource trackers come last: they delete the semaphores and shared memory of the others when
    those have ended.
    """
    began, times_empty, left = time.monotonic(), 0, Table()
    while times_empty < 2 and (age := time.monotonic() - began) < KILL_DEADLINE_S:
        left = find()
        times_empty = 0 if left else times_empty + 1
        trackers = () if age > TRACKER_S else [*filter(is_resource_tracker, left)]
        victims = {pid: line for pid, line in left.items() if pid not in trackers}
        send_signal(victims, signal.SIGKILL)
        time.sleep(pause_s)
    return list(left)


def end_run(marker: str, sessions: Mapping[int, str], grace_s: float) -> None:
    """Waits until all processes of a run have ended; continues stopped ones, and kills those
    that are left after `grace_s`."""

    def left() -> Table:
        processes = table()
        pids = marked(processes, processes, marker, sessions)
        return {pid: processes[pid] for pid in pids if processes[pid].state != "Z"}

    deadline = time.monotonic() + grace_s
    while (running := left()) and time.monotonic() < deadline:
        # The kernel sent SIGTERM when `rl` died; a stopped process receives it when it is
        # continued.
        stopped = {pid: line for pid, line in running.items() if line.state == "T"}
        send_signal(stopped, signal.SIGCONT)
        time.sleep(POLL_S)
    kill(left, POLL_S / 5)


def main() -> None:
    """Runs the guard: `process_table.py <marker> <temporary directory> <grace in seconds>`.
    Reads lines from stdin: `+ <session> <start of its leader>` or `- <session>`."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    marker, directory, grace_s = sys.argv[1:]
    sessions: dict[int, str] = {}
    for line in sys.stdin:
        match line.split():
            case ["+", session, start]:
                sessions[int(session)] = start
            case ["-", session]:
                sessions.pop(int(session), None)
    end_run(marker, sessions, float(grace_s))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
