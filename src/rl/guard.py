"""Processes of this machine as /proc tells them, and the guard: a small process beside `rl` that outlives its SIGKILL.

The guard reads a pipe that `rl` holds open. When `rl` is gone it gives what bears the run's marker some time to end by itself, kills the
rest, and deletes the run's temporary directory. It is started by its path with the standard library alone: up in 30 ms, 12 MB.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MARKER = "RL_CHILD"
"""Environment variable of every process below `rl`: `<pid of rl>:<its start>:<name>:<attempt>`; one such word for each `rl` above."""
KILL_DEADLINE_S = 5.0
TRACKER_S = 3.0
"""A resource tracker of multiprocessing may take so long to delete the semaphores and shared memory of those that were killed."""
LOOK_S = 0.1


@dataclass(frozen=True)
class Entry:
    """A line of the process table."""

    parent: int
    session: int
    state: str
    """`T`: stopped, `Z`: ended and not yet reaped, `D`: in the kernel."""
    start: str
    """Clock ticks since boot; with the pid it names a process for good."""


def entry(pid: int) -> Entry | None:
    """None for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return Entry(int(fields[1]), int(fields[3]), fields[0], fields[19]) if len(fields) > 19 else None


def table() -> dict[int, Entry]:
    """All processes that are there, by pid."""
    found = {int(name): entry(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: line for pid, line in found.items() if line}


def words(pid: int) -> list[str]:
    """The marker of a process; empty when it has none, or belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return []
    prefix = f"{MARKER}=".encode()
    return next((variable[len(prefix) :].decode(errors="replace").split() for variable in variables if variable.startswith(prefix)), [])


def below(processes: dict[int, Entry], roots: Collection[int], without: Collection[int] = ()) -> set[int]:
    """The roots that are there and their descendants, but for the trees of `without`."""
    children: dict[int, list[int]] = {}
    for pid, line in processes.items():
        children.setdefault(line.parent, []).append(pid)
    found, todo = set(), [pid for pid in roots if pid in processes]
    while todo:
        pid = todo.pop()
        if pid not in found and pid not in without:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def marked(processes: dict[int, Entry], among: Iterable[int], word: str, sessions: Collection[int]) -> set[int]:
    """Those whose marker has `word` (all of a run's, if it ends with a colon) or that are of one of the sessions, with all below them."""

    def ours(pid: int) -> bool:
        return processes[pid].session in sessions or any(own == word or (word[-1] == ":" and own.startswith(word)) for own in words(pid))

    return below(processes, [pid for pid in among if ours(pid)], {os.getpid()})


def is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def end_all(word: str, sessions: Collection[int], grace_s: float) -> None:
    """Waits until nothing of a run is left; what has not ended in time, or is stopped, is helped along."""

    def left() -> dict[int, Entry]:
        processes = table()
        return {pid: processes[pid] for pid in marked(processes, processes, word, sessions) if processes[pid].state != "Z"}

    deadline = time.monotonic() + grace_s
    while (running := left()) and time.monotonic() < deadline:
        # The kernel sent SIGTERM when `rl` died; a stopped process gets it when it goes on.
        send([pid for pid, line in running.items() if line.state == "T"], signal.SIGCONT)
        time.sleep(LOOK_S)
    deadline, times_empty = time.monotonic() + KILL_DEADLINE_S, 0
    spared_until = time.monotonic() + TRACKER_S
    while times_empty < 2 and time.monotonic() < deadline:  # twice: a look can fall between a parent's death and its child's start
        running = left()
        times_empty = 0 if running else times_empty + 1
        send([pid for pid in running if time.monotonic() > spared_until or not is_tracker(pid)], signal.SIGKILL)
        time.sleep(LOOK_S / 5)


class Guard:
    """What `rl` has of its guard: it is started anew when it is gone or stopped, and told which sessions the children lead."""

    def __init__(self, marker: str, directory: os.PathLike[str], grace_s: float):
        self.command = [sys.executable, "-I", "-S", __file__, marker, str(directory), str(grace_s)]
        self.sessions: set[int] = set()
        self._start()

    def _start(self) -> None:
        reader, self.pipe = os.pipe()
        # Not our output: who reads that to its end would wait for the guard, too.
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command, stdin=reader, start_new_session=True, cwd="/", **silent)
        os.close(reader)
        for session in self.sessions:
            self._tell(f"+ {session}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone: `look` starts another, which is told everything
            os.write(self.pipe, line.encode() + b"\n")

    def watch(self, session: int) -> None:
        """The processes of a session are ended with the run, also those that have overwritten their environment."""
        self.sessions.add(session)
        self._tell(f"+ {session}")

    def forget(self, session: int) -> None:
        """Nothing is left of it, and another process may get its number."""
        self.sessions.discard(session)
        self._tell(f"- {session}")

    def look(self) -> None:
        """Replaces a guard that was killed or stopped."""
        line = entry(self.process.pid)
        if self.process.poll() is not None or not line or line.state == "T":
            self.close()
            self._start()

    def close(self) -> None:
        """Ends it before it sees the end of the pipe: there is nothing left for it to do."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # a second signal came here before
            os.close(self.pipe)


def main() -> None:
    """`guard.py <marker> <temporary directory> <grace in seconds>`; lines on stdin: `+ <session>`, `- <session>`."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    word, directory, grace_s = sys.argv[1:]
    sessions: set[int] = set()
    for line in sys.stdin:
        sign, session = line.split()
        (sessions.add if sign == "+" else sessions.discard)(int(session))
    end_all(word, sessions, float(grace_s))
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
