"""The children of `rl`: started in groups of their own, watched, and stopped so that none is left, however `rl` itself ends.

Several nets, because each has a hole: SIGTERM goes to the group of every child; `rl` is a subreaper, so what left its group (torchrun's
workers) or lost its parent is still found below it; all that a child starts bears its marker in the environment, so that what a dead
child left is told from what the others need; and if `rl` is killed with SIGKILL, the kernel sends SIGTERM to each child that asked for it
(PR_SET_PDEATHSIG), which they hand down, and the guard ends what that does not reach.
"""

import contextlib
import ctypes
import errno
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rl import guard
from rl.standby import PR_SET_PDEATHSIG, Adopted, Standby, Standbys

LAUNCHER = "RL_PARENT_PID"
"""Environment variable with the pid of the process that must be alive above this one."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
STOP_DEADLINE_S = 20.0
"""Between SIGTERM and SIGKILL: a torchrun agent, a vLLM server and its engine end within it; weights and checkpoints are atomic anyway."""
KILL_DEADLINE_S = guard.KILL_DEADLINE_S
LONGEST_BASE = 40
"""Of the directory for temporary files: the name of a Unix socket, which some put there, has at most 107 bytes."""
LAST_LINES = 20
SHOW_CURSOR = b"\x1b[?25h"
"""A progress bar hides it."""

GIVE_UP, DAMAGED = 3, 4
"""Exit codes of our processes, beside 2 (wrong settings): a diagnosis that starting again does not change (a missing model, a full disk);
a damaged file in the run directory, to be repaired before the next start. Anything else is worth another start."""
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a disk that is full or not to be written."""
LASTING = (*CANNOT_WRITE, errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Errors of the system that another start does not mend."""

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
    process: subprocess.Popen | Adopted
    log: Path
    started: float = field(default_factory=time.monotonic)
    marker: str = ""
    """The word that everything below it bears in its environment."""
    ancestor: str = ""
    """The same of the process that it is a copy of: what it forks without another program bears that one."""
    temporary: Path | None = None
    """Its directory for temporary files: sockets and the like, which a killed process leaves."""

    @property
    def attempt(self) -> int:
        """Which start of this process it is, over restarts and resumes."""
        return int(self.log.stem.rpartition("-")[2])

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


def start(
    name: str,
    command: list[str],
    env: dict[str, str],
    log_path: Path,
    cores: Iterable[int] | None = None,
    standby: Standby | None = None,
) -> Child:
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
    env |= {LAUNCHER: str(parent), "PYTHONUNBUFFERED": "1"} | (standby.environment() if standby else {})
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        inherited = standby.inherited if standby else ()
        process = subprocess.Popen(command, env=env, **streams, start_new_session=True, preexec_fn=in_child, pass_fds=inherited)
    if standby:
        standby.started()
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
    """All children of this process, which is made a subreaper. Used from the main thread alone.

    With the first child come a guard and a directory for temporary files; both go with the last one.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self.others: set[int] = set()
        self.guard: guard.Guard | None = None
        self.started = 0
        self.standbys = Standbys()
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by who has started us, it would hide how children end

    def start(
        self, name: str, command: list[str], env: dict[str, str], logs: Path, cores: Iterable[int] | None = None, warm: bool | None = None
    ) -> Child:
        """Starts a child under the next attempt's log, with a marker and a directory for temporary files in its environment.

        `warm`: from the copy that its predecessor has left behind, if there is one; None: it shall leave no copy either.
        """
        log = next_log(logs, name)
        run = run_marker()
        if self.guard is None:
            self.others = self._below(guard.table())  # W&B's service, which is to outlive the children
            self.directory = temporary_directory()
            self.guard = guard.Guard(run, self.directory, STOP_DEADLINE_S)
        marker = f"{run}{name}:{log.stem.rpartition('-')[2]}"
        self.started += 1
        temporary = self.directory / str(self.started)  # short, for the names of sockets
        temporary.mkdir()
        env = env | environment(env, marker, temporary)
        if copy := self.standbys.call(name, log, env) if warm else None:
            child = Child(name, copy, log, ancestor=self.standbys.of[name].marker)
        else:
            child = start(name, command, env, log, cores, self.standbys.expect(name, marker) if warm is not None else None)
        child.marker, child.temporary = marker, temporary
        self.children.append(child)
        self.guard.watch(child.process.pid)
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

    def look(self) -> None:
        """Sees to the guard, and reaps orphans that became ours and have ended."""
        if self.guard:
            self.guard.look()
            self._left()

    def stopped(self, child: Child, whole_tree: bool) -> list[int]:
        """Of a child, or of all below it, those that a signal has stopped."""
        pid, line = child.process.pid, guard.entry(child.process.pid)
        if not whole_tree:
            return [pid] if line and line.state == "T" else []
        processes = guard.table()
        return [pid for pid in guard.below(processes, [pid]) if processes[pid].state == "T"]

    def end(self, child: Child, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """Stops one child: SIGTERM, and after the deadline SIGKILL to all that it has started."""
        child.signal_group(signal.SIGTERM)
        child.signal_group(signal.SIGCONT)
        deadline = time.monotonic() + deadline_s
        while child.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.bury(child)

    def bury(self, child: Child) -> list[int]:
        """Kills a child and all that it has started, wherever that has gone, reaps, and forgets it. Returns what even that did not end."""

        def family() -> list[int]:
            processes = guard.table()
            mine = self._below(processes)
            words, session = {child.marker, child.ancestor} - {""}, {child.process.pid}
            return self._running(mine & set().union(*(guard.marked(processes, mine, word, session) for word in words)), processes)

        left = self._kill(family)
        self.children = [other for other in self.children if other is not child]
        if self.guard and not left:
            self.guard.forget(child.process.pid)
            if child.temporary:
                shutil.rmtree(child.temporary, ignore_errors=True)
        return left

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """SIGTERM to every group, SIGKILL after the deadline, and reaps. Returns the pids that even that did not end."""
        self.stopping = True
        self.standbys.close()
        for child in self.children:
            child.signal_group(signal.SIGTERM)
            child.signal_group(signal.SIGCONT)  # a stopped one sees no SIGTERM
        deadline = time.monotonic() + deadline_s
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.kill()

    def kill(self) -> list[int]:
        """SIGKILL to everything that is left, and reaps. Returns the pids that are still there (stuck in the kernel)."""
        self.standbys.close()
        left = self._kill(self._left)
        if self.guard and not left:
            self.children = []
            self.guard.close()
            self.guard = None
            shutil.rmtree(self.directory, ignore_errors=True)
        return left

    def _kill(self, look: Callable[[], list[int]]) -> list[int]:
        """SIGKILL to what `look` finds, until it has found nobody twice: an orphan is missed in the moment in which it becomes ours.

        Resource trackers come last: they delete the semaphores and the shared memory of the others, whose ends they see.
        """
        began, times_empty, left = time.monotonic(), 0, list[int]()
        while times_empty < 2 and (age := time.monotonic() - began) < KILL_DEADLINE_S:
            left = look()
            times_empty = 0 if left else times_empty + 1
            guard.send([pid for pid in left if age > guard.TRACKER_S or not guard.is_tracker(pid)], signal.SIGKILL)
            time.sleep(0.02 if self.guard else 0)
        return left

    def _left(self) -> list[int]:
        """Running processes below this one that its children brought; zombies are reaped on the way."""
        if not self.guard:
            return []
        processes = guard.table()
        return self._running(self._below(processes), processes)

    def _running(self, pids: Iterable[int], processes: dict[int, guard.Entry]) -> list[int]:
        """Those that have not ended; what has is reaped, if it is ours to reap."""
        leaders = {child.process.pid: child for child in self.children}
        running = []
        for pid in pids:
            if processes[pid].state != "Z":
                running.append(pid)
            elif pid in leaders:
                leaders[pid].process.poll()
            elif processes[pid].parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return running

    def _below(self, processes: dict[int, guard.Entry]) -> set[int]:
        """Processes under this one, without the guard, the copies that wait, and the trees that were there before the first child."""
        without = self.others | ({self.guard.process.pid} if self.guard else set()) | self.standbys.pids()
        return guard.below(processes, [pid for pid, line in processes.items() if line.parent == os.getpid()], without)


def run_marker() -> str:
    """The beginning of the marker of all that this process starts."""
    line = guard.entry(os.getpid())
    assert line is not None
    return f"{os.getpid()}:{line.start}:"


def environment(given: dict[str, str], marker: str, temporary: Path) -> dict[str, str]:
    """What a child's environment has beside what it is given."""
    return {
        guard.MARKER: f"{os.environ.get(guard.MARKER, '')} {marker}".strip(),
        "SPT_NOENV": "1",  # setproctitle, which vLLM uses, would write the title over the environment that we look for the marker in
        "TMPDIR": str(temporary),
        # The one thing there that is worth keeping, and where torch keeps it by default: half a minute of an engine's first step.
        "TORCHINDUCTOR_CACHE_DIR": given.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user_name()}"),
        "VLLM_RPC_BASE_PATH": given.get("VLLM_RPC_BASE_PATH", str(temporary)),
    }


def temporary_directory() -> Path:
    """A new directory with a short name."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="rl-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        return str(os.getuid())
