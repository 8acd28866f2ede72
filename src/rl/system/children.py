"""Starting, watching and ending child processes with all their descendants, and the policy for
restarting them.

The end of a child is noticed without reaping it. Until `reap` its pid and process group stay
reserved, so our signals cannot reach an unrelated process that reuses the number.
"""

import asyncio
import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from rl.system import process_table
from rl.system.linux import LAUNCHER, end_with_parent
from rl.system.process_table import Table
from rl.system.terminal import say

PYTHON = (sys.executable, "-P")
"""The interpreter of all processes. -P: a folder `rl`, or a queue.py, where the user stands must
not be what they import."""
FOREIGN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
    r"|(PET|TORCHELASTIC|ACCELERATE|FSDP|VLLM_DP)_|VLLM_(HOST_IP|PORT)$"
    r"|PYTHON(OPTIMIZE|WARNINGS|INSPECT)$|\w+_TF32_\w*OVERRIDE$"
    r"|(SRUN|SQUEUE|SINFO|SCANCEL)_|SBATCH_(?!ACCOUNT|PARTITION|QOS|GRES)"
)
"""Variables of the shell that no child inherits. They are about other processes (torchrun,
accelerate, Kubeflow and Kubernetes set them: with RANK or PET_NNODES ranks wait for others that
never come), or act behind our settings: without asserts rewards are others, and with
SBATCH_ARRAY_INX jobs. What says where and for whom the user's jobs run is a default of
cluster.slurm."""
say_once = cache(say)
STOP_DEADLINE_S = 20.0
"""Time between SIGTERM and SIGKILL. A torchrun agent, a vLLM server and its engine need less;
weights and checkpoints are atomic anyway."""


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived. Derives from BaseException so that no handler on the way
    mistakes it for a failure."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


@dataclass(eq=False)
class Child:
    """A child of this process that leads its own process group."""

    name: str
    pid: int
    log: Path
    marker: str = ""
    """The marker in the environment of all its descendants, see process_table.MARKER; empty if
    it has none."""
    ancestor: str = ""
    """The marker of the process that it was forked from: /proc shows that marker for its own
    forks until they exec another program."""
    temporary: Path | None = None
    """Its directory for temporary files, such as sockets, which a killed process leaves behind."""
    started: float = field(default_factory=time.monotonic)
    reaped: bool = False
    _exit_code: int | None = None

    def __post_init__(self) -> None:
        line = process_table.entry(self.pid)
        self.start_ticks = line.start if line else ""

    @property
    def attempt(self) -> int:
        """The number of this start of the process, counted across restarts and resumes."""
        return int(self.log.stem.rpartition("-")[2])

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self._exit_code is None and (
            end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            self._exit_code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._exit_code

    def ending(self) -> str:
        """Describes how it ended, as the predicate of a sentence."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does that when memory runs out: see `dmesg`)" if code == -9 else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits until it ends. Returns the exit code, or None if it still runs after
        `timeout_s`."""
        if self.exit_code is None:
            with self._pidfd() as fd:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(None if timeout_s is None else 1000 * timeout_s)
        return self.exit_code

    async def wait_async(self, timeout_s: float | None = None) -> int | None:
        """Does the same as `wait`, without blocking the event loop."""
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
        """Yields a file descriptor that becomes readable when the process ends."""
        fd = os.pidfd_open(self.pid)
        try:
            yield fd
        finally:
            os.close(fd)

    def signal_group(self, signum: int) -> None:
        """Signals its process group, which may outlive it. Does nothing once the child is
        reaped."""
        if not self.reaped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def terminate(self) -> None:
        """Sends SIGTERM to its group, and SIGCONT because a stopped process would not react."""
        self.signal_group(signal.SIGTERM)
        self.signal_group(signal.SIGCONT)

    def tree(self, processes: Table, among: Iterable[int]) -> Table:
        """Returns the processes among these that it has started, and itself, even those that
        have left its group or lost their parent."""
        line, pids = processes.get(self.pid), set[int]()
        if line and line.start == self.start_ticks:
            pids = process_table.trees(processes, [self.pid])
        for marker in {self.marker, self.ancestor} - {""}:
            pids |= process_table.marked(processes, among, marker, {self.pid: self.start_ticks})
        return {pid: processes[pid] for pid in pids & set(among)}

    def kill_tree(self, without: Collection[int] = ()) -> None:
        """Sends SIGKILL, once and without waiting, to its group and all it has started, except the
        trees of `without`. Call before `reap`.

        Forked copies of it bear its marker, whoever owns them by now.
        """
        self.signal_group(signal.SIGKILL)
        processes = process_table.table()
        among = processes.keys() - process_table.trees(processes, without)
        process_table.send_signal(self.tree(processes, among), signal.SIGKILL)

    def reap(self) -> None:
        """Releases its pid if it has ended."""
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
    """Starts a child with its output appended to `log_path`, bound to `cores`, and ended by the
    kernel when this process dies.

    `inherited`: file descriptors that it keeps. Without `new_session` it only gets its own process
    group, so that ending the processes of our session ends it, too. `marker`: added to this
    process's markers in the environment of the child and all its descendants. Must be called from
    the main thread. Raises OSError if the program cannot be run.
    """
    # if our parent had it ignored, the exit status of children would be lost
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent = os.getpid()
    affinity = set(cores) if cores else None

    def in_child() -> None:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
        if affinity:
            os.sched_setaffinity(0, affinity)

    # .pyc files save vLLM 25 s
    env = {key: value for key, value in env.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {LAUNCHER: str(parent), "PYTHONUNBUFFERED": "1"}
    if marker:
        env[process_table.MARKER] = add_marker(marker)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=new_session,
            process_group=None if new_session else 0,
            preexec_fn=in_child,
            pass_fds=inherited,
        )
    child = Child(name, process.pid, log_path, marker)
    process.returncode = 0  # keeps Popen from reaping it: a Child keeps its pid until `reap`
    return child


def inherited() -> dict[str, str]:
    """Returns what children inherit of this process's variables. Says once what they do not."""
    kept = {key: value for key, value in os.environ.items() if not is_foreign(key, value)}
    if foreign := os.environ.keys() - kept.keys():
        say_once(
            "rl: its processes do not inherit variables that are meant for others: "
            f"{', '.join(sorted(foreign))}"
        )
    return kept


def is_foreign(name: str, value: str) -> bool:
    """Whether no child inherits a variable: one of FOREIGN, or one by which gloo or NCCL would
    look for an interface of another machine."""
    if name.endswith("_SOCKET_IFNAME") and value[:1] != "^":
        wanted = tuple(value.removeprefix("=").split(","))
        return not any(interface.startswith(wanted) for interface in psutil.net_if_addrs())
    return bool(FOREIGN.match(name))


def add_marker(marker: str) -> str:
    """Returns the value of process_table.MARKER for a child: the markers of this process and the
    child's own."""
    return f"{os.environ.get(process_table.MARKER, '')} {marker}".strip()


def descendants(without: Collection[int] = ()) -> Table:
    """Returns all descendants of this process, except the trees of `without`."""
    processes, root = process_table.table(), os.getpid()
    pids = process_table.trees(processes, [root], without) - {root}
    return {pid: processes[pid] for pid in pids}


def kill_descendants(without: Collection[int] = ()) -> None:
    """Sends SIGKILL, once and without waiting, to all descendants of this process, except the
    trees of `without`."""
    process_table.send_signal(descendants(without), signal.SIGKILL)


@dataclass(frozen=True)
class RestartPolicy:
    """When a dead process is restarted: at once if it made progress, else after a back-off,
    never if it has died too often."""

    backoff_s: float
    backoff_limit_s: float
    max_restarts: float = math.inf
    """Restarts allowed within the last `window_s`."""
    window_s: float = math.inf
    barren_limit: float = math.inf
    """Number of consecutive deaths without progress at which it is not restarted any more."""

    def delay_s(self, barren: int, deaths: Sequence[float] = ()) -> float | None:
        """Seconds from a death to the next start: 0 after progress, else `backoff_s`, doubled for
        each consecutive death without progress after the first. None: no restart.

        `barren`: consecutive deaths without progress, including this one; 0 after progress.
        `deaths`: times of all deaths, this one last.
        """
        recent = [death for death in deaths if deaths[-1] - death <= self.window_s]
        if barren >= self.barren_limit or len(recent) > self.max_restarts:
            return None
        if not barren:
            return 0.0
        doublings = min(barren - 1, 60)  # a float overflows at about 1,000
        return min(self.backoff_limit_s, self.backoff_s * 2**doublings)
