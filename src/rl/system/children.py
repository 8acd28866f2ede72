"""Start, watch and end a child process and everything below it; and the one policy by which a dead one is started again.

A child's end is seen without reaping it. Until `reap` its pid and its group stay its own, so no signal of ours can reach a stranger that
was given the number since.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.system import process_table
from rl.system.linux import LAUNCHER, end_with_parent
from rl.system.process_table import Table

STOP_DEADLINE_S = 20.0
"""Between SIGTERM and SIGKILL: a torchrun agent, a vLLM server and its engine end within it; weights and checkpoints are atomic anyway."""


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that no handler on the way takes it for a failure."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


@dataclass(eq=False)
class Child:
    """A child of this process that leads a process group of its own."""

    name: str
    pid: int
    log: Path
    marker: str = ""
    """What everything below it bears in its environment, see process_table.MARKER; empty: it has none."""
    ancestor: str = ""
    """The marker of the process that it is a copy of: /proc shows that one for what it forks without running another program."""
    temporary: Path | None = None
    """Its directory for temporary files: sockets and the like, which a killed process leaves."""
    started: float = field(default_factory=time.monotonic)
    reaped: bool = False
    _exit_code: int | None = None

    def __post_init__(self) -> None:
        line = process_table.entry(self.pid)
        self.start_ticks = line.start if line else ""

    @property
    def attempt(self) -> int:
        """Which start of this process it is, over restarts and resumes."""
        return int(self.log.stem.rpartition("-")[2])

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        if self._exit_code is None and (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            self._exit_code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._exit_code

    def ending(self) -> str:
        """How it ended, as the predicate of a sentence."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does that when memory runs out: see `dmesg`)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for its end. Returns the exit code; None when it still runs after `timeout_s`."""
        if self.exit_code is None:
            with self._pidfd() as fd:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(None if timeout_s is None else 1000 * timeout_s)
        return self.exit_code

    async def wait_async(self, timeout_s: float | None = None) -> int | None:
        """Does what `wait` does, beside other tasks."""
        if self.exit_code is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            with self._pidfd() as fd:
                loop.add_reader(fd, ended.set)
                try:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(timeout_s):
                            await ended.wait()
                finally:
                    loop.remove_reader(fd)
        return self.exit_code

    @contextlib.contextmanager
    def _pidfd(self) -> Iterator[int]:
        """A file descriptor that becomes readable when the process ends."""
        fd = os.pidfd_open(self.pid)
        try:
            yield fd
        finally:
            os.close(fd)

    def signal_group(self, signum: int) -> None:
        """Signals its process group, which may outlive it. Does nothing once it is reaped."""
        if not self.reaped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def terminate(self) -> None:
        """SIGTERM to its group; a stopped process is continued, or it would not see it."""
        self.signal_group(signal.SIGTERM)
        self.signal_group(signal.SIGCONT)

    def tree(self, processes: Table, among: Iterable[int]) -> Table:
        """All that it has started, itself included, of these processes: also what has left its group or has lost its parent."""
        line = processes.get(self.pid)
        found = process_table.trees(processes, [self.pid]) if line and line.start == self.start_ticks else set()
        for marker in {self.marker, self.ancestor} - {""}:
            found |= process_table.marked(processes, among, marker, {self.pid: self.start_ticks})
        return {pid: processes[pid] for pid in found & set(among)}

    def kill_tree(self, without: Collection[int] = ()) -> None:
        """SIGKILL to its group and all that it has started, except the trees of `without`: once and without waiting. Call it before `reap`.

        Copies of it bear its marker, whosever they are by now.
        """
        self.signal_group(signal.SIGKILL)
        processes = process_table.table()
        among = processes.keys() - process_table.trees(processes, without)
        process_table.send_signal(self.tree(processes, among), signal.SIGKILL)

    def reap(self) -> None:
        """Lets go of its pid, if it has ended."""
        if not self.reaped and self.exit_code is not None:
            self.reaped = True
            os.waitpid(self.pid, 0)


def start(
    name: str,
    command: list[str],
    env: dict[str, str],
    log_path: Path,
    *,
    cores: Iterable[int] | None = None,
    inherited: Sequence[int] = (),
    new_session: bool = True,
    marker: str = "",
) -> Child:
    """Starts a child with its output appended to `log_path`, bound to `cores`, and ended by the kernel when this process dies.

    `inherited`: file descriptors that it keeps. Without `new_session` it has a process group alone, and who ends our session's processes
    ends it, too. `marker`: what it and everything below it bears in the environment, beside the markers that this process bears. Called
    from the main thread. Raises OSError when the program cannot be run.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by who has started us, it would hide how children end
    parent = os.getpid()
    affinity = set(cores) if cores else None

    def in_child() -> None:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if affinity:
            os.sched_setaffinity(0, affinity)

    env = {key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"}  # no .pyc: 25 s of vLLM's start-up
    env |= {LAUNCHER: str(parent), "PYTHONUNBUFFERED": "1"}
    if marker:
        env[process_table.MARKER] = add_marker(marker)
    group: dict[str, Any] = {"start_new_session": True} if new_session else {"process_group": 0}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        process = subprocess.Popen(command, env=env, **streams, **group, preexec_fn=in_child, pass_fds=inherited)
    child = Child(name, process.pid, log_path, marker)
    process.returncode = 0  # so that Popen never reaps it: a Child keeps its pid until `reap`
    return child


def add_marker(marker: str) -> str:
    """The value of process_table.MARKER for a child: what this process bears, and its own."""
    return f"{os.environ.get(process_table.MARKER, '')} {marker}".strip()


def descendants(without: Collection[int] = ()) -> Table:
    """All processes below this one, except the trees of `without`."""
    processes, own = process_table.table(), os.getpid()
    return {pid: processes[pid] for pid in process_table.trees(processes, [own], without) - {own}}


def kill_descendants(without: Collection[int] = ()) -> None:
    """SIGKILL to all processes below this one, except the trees of `without`; once and without waiting."""
    process_table.send_signal(descendants(without), signal.SIGKILL)


@dataclass(frozen=True)
class RestartPolicy:
    """When a process that died is started again: at once if it made progress, else after a back-off, unless it has died too often."""

    backoff_s: float
    backoff_limit_s: float
    max_restarts: float = math.inf
    """Within the last `window_s`."""
    window_s: float = math.inf
    barren_limit: float = math.inf
    """So many deaths in a row without progress are too many."""

    def delay_s(self, barren: int, deaths: Sequence[float] = ()) -> float | None:
        """Seconds from a death to the next start: 0 after progress, else `backoff_s`, doubled for each death without any after the first.
        None: never again.

        `barren`: deaths in a row without progress, this one included; 0: there was some. `deaths`: the times of all deaths, this one last.
        """
        recent = [death for death in deaths if deaths[-1] - death <= self.window_s]
        if barren >= self.barren_limit or len(recent) > self.max_restarts:
            return None
        doublings = min(barren - 1, 60)  # a float has room for no more than 1,000
        return min(self.backoff_limit_s, self.backoff_s * 2**doublings) if barren else 0.0
