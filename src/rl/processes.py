"""The children of `rl`: started in groups of their own, watched, and stopped so that none is left, however `rl` itself ends.

Three nets, because each has a hole: SIGTERM and SIGKILL go to the group of every child; `rl` is a subreaper, so what left its group
(torchrun's workers) or lost its parent is still found below it; and if `rl` is killed with SIGKILL, the kernel sends SIGTERM to each
child that asked for it (PR_SET_PDEATHSIG), which they hand down.
"""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

LAUNCHER = "RL_PARENT_PID"
"""Environment variable with the pid of the process that must be alive above this one."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
STOP_DEADLINE_S = 20.0
"""Between SIGTERM and SIGKILL: a torchrun agent, a vLLM server and its engine end within it; weights and checkpoints are atomic anyway."""
KILL_DEADLINE_S = 5.0
LAST_LINES = 20
SHOW_CURSOR = b"\x1b[?25h"
"""A progress bar hides it."""

GIVE_UP, DAMAGED = 3, 4
"""Exit codes of our processes, beside 2 (wrong settings): a diagnosis that starting again does not change (a missing model, a full disk);
a damaged file in the run directory, to be repaired before the next start. Anything else is worth another start."""

LIBC = ctypes.CDLL(None, use_errno=True)


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that no handler on the way takes it for a failure."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


def ancestors() -> Iterable[int]:
    """Process ids from the parent upwards, as far as they can be seen."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        pid = int(stat.rpartition(")")[2].split()[1])


def die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent dies. Call it first thing in the main() of a process below `rl`.

    A process that was started by hand, with no `rl` above, is left alone: it must outlive its shell. Race-free: if the parent died
    before the kernel was asked, `rl` is no longer among the ancestors. Linux means the parent *thread*, so a process that starts
    others does it from a thread that lives as long as they do.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if int(launcher) not in ancestors():
        raise SystemExit(128 + signal.SIGTERM)


@dataclass
class Child:
    """One started process, the leader of its own session and group."""

    name: str
    process: subprocess.Popen
    log: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self.process.poll()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does that when memory runs out: see `dmesg`)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def signal_group(self, signum: int) -> None:
        """Signals the whole group; it can outlive its leader. A leader that was not reaped yet keeps the number from being reused."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


def start(name: str, command: list[str], env: dict[str, str], log_path: Path, cores: Iterable[int] | None = None) -> Child:
    """Starts a child: own session, output to `log_path`, bound to `cores`, and ended by the kernel if this process dies."""
    parent = os.getpid()
    affinity = set(cores) if cores else None

    def in_child() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if affinity:
            os.sched_setaffinity(0, affinity)

    env = {key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"}  # no .pyc: 25 s of vLLM's start-up
    env |= {LAUNCHER: str(parent), "PYTHONUNBUFFERED": "1"}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=in_child
        )
    return Child(name, process, log_path)


def next_log(logs: Path, name: str) -> Path:
    """`logs/<name>-<attempt>.log`; attempts count up over restarts and resumes."""
    attempts = [path.stem.removeprefix(f"{name}-") for path in logs.glob(f"{name}-*.log")]
    return logs / f"{name}-{max((int(attempt) for attempt in attempts if attempt.isdigit()), default=0) + 1}.log"


def last_lines(path: Path, count: int = LAST_LINES) -> list[str]:
    """The end of a log. torchrun's own account of a failure, which follows the traceback that matters, is left out."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    for i, line in enumerate(lines):
        if i and re.search(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed", line):
            lines = lines[:i]
            break
    return lines[-count:]


class Children:
    """All children of this process, which is made a subreaper. Used from the main thread alone."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self.others: set[int] = set()
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(self, name: str, command: list[str], env: dict[str, str], logs: Path, cores: Iterable[int] | None = None) -> Child:
        """Starts a child under the next attempt's log."""
        if not self.children:
            self.others = {process.pid for process in self._below()}  # W&B's service, which is to outlive the children
        child = start(name, command, env, next_log(logs, name), cores)
        self.children.append(child)
        return child

    def stop_on_signals(self) -> None:
        """The first SIGINT or SIGTERM raises Stopped in the main thread, wherever it is; a second one, or one while stopping, kills."""

        def on_signal(signum: int, _frame: FrameType | None) -> None:
            if self.stopping:
                self.kill()
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR)
                os._exit(128 + signum)
            self.stopping = True
            raise Stopped(signum)

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """SIGTERM to every group, SIGKILL after the deadline, and reaps. Returns the pids that even that did not end."""
        self.stopping = True
        for child in self.children:
            child.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + deadline_s
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.kill()

    def kill(self) -> list[int]:
        """SIGKILL to everything that is left, and reaps. Returns the pids that are still there (stuck in the kernel).

        Looks until it has found nobody twice: an orphan is missed by a look that falls into the moment in which it becomes ours.
        """
        for child in self.children:
            child.signal_group(signal.SIGKILL)
        deadline, times_empty, left = time.monotonic() + KILL_DEADLINE_S, 0, []
        while times_empty < 2 and time.monotonic() < deadline:
            left = self._left()
            times_empty = 0 if left else times_empty + 1
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.02 if self.children else 0)
        return [process.pid for process in left]

    def _left(self) -> list:
        """Running processes below this one that its children brought; zombies are reaped on the way."""
        import psutil

        alive = []
        for child in self.children:
            child.process.poll()
        for process in self._below() if self.children else []:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
                elif process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
            except (psutil.NoSuchProcess, ChildProcessError):
                continue
        return alive

    def _below(self) -> list:
        """Processes under this one, without the trees of those that were there before the first child."""
        import psutil

        found = []
        for process in psutil.Process().children():
            if process.pid not in self.others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [process, *process.children(recursive=True)]
        return found
