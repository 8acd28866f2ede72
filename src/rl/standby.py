"""A warm start: a process that has just imported all that it needs leaves a copy of itself behind, which waits to be its next attempt.

    role: imports, copy -> its work ... dies         copy: waits ... order of `rl`, copy -> the work, under a new log

Imports are most of a start (the trainer 6 s of 9, inference 9 of 12), and a copy by fork(2) costs neither that time nor, as long as
nobody writes, memory. The copy is made before the role opens anything, starts a thread or touches a GPU, none of which a fork survives; it
is a child of `rl`, in a session of its own, bears the marker of the run, and ends with `rl`. Where there is none, or what came of one
died without progress, the next attempt starts from nothing.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl import guard

PIPES = "RL_STANDBY"
"""Environment variable: file descriptors to read orders from and to write the copy's pid to."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OF_AN_ATTEMPT = (guard.MARKER, "TMPDIR", "VLLM_RPC_BASE_PATH")
"""Variables that each attempt has its own of."""
GPU_DEVICES = ("/dev/nvidia", "/dev/dxg")
"""What a process has open that has touched a GPU's driver. A fork of it would find no GPU, and might compute on the CPU in silence."""


def leave(imports: Callable[[], None]) -> None:
    """If `rl` has asked for a copy, has everything imported and leaves one behind. Returns in the process itself, and in a copy when it is
    its turn.

    Call it before anything is opened, any thread is started, any GPU is touched; `imports` does none of that either.
    """
    if not (pipes := os.environ.pop(PIPES, "")):
        return
    orders, answers = map(int, pipes.split(","))
    with without_openblas_threads():
        imports()
    if obstacle := unfit():
        print(f"no copy for a warm start: {obstacle}", file=sys.stderr, flush=True)
    else:
        gc.collect()
        gc.freeze()  # else the first collection would write to all pages that the copy shares with us
        launcher = os.getppid()
        try:
            while not (between := os.fork()):
                wait_for_turn(launcher, orders, answers)
            os.waitpid(between, 0)
        except OSError as error:  # no memory for it, or too many processes
            print(f"no copy for a warm start: {error}", file=sys.stderr, flush=True)
    os.close(orders)
    os.close(answers)


def wait_for_turn(launcher: int, orders: int, answers: int) -> None:
    """In the fork: makes the copy a child of `rl`, which is the reaper of orphans below it, and returns in it when `rl` calls.

    What goes wrong ends the copy and nobody else.
    """
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == between:
            time.sleep(0.001)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # `rl` is gone
            os._exit(1)
        os.write(answers, f"{os.getpid()}\n".encode())
        take_over(orders)
    except (OSError, ValueError):
        os._exit(1)


@contextmanager
def without_openblas_threads() -> Iterator[None]:
    """numpy's OpenBLAS starts threads while it is imported, and has one from then on; processes that are started later have theirs."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:  # the user's word, if at the price of the copy
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)


def unfit() -> str:
    """What this process has that a fork does not survive, or ""."""
    if num_threads := len(os.listdir("/proc/self/task")) - 1:
        return f"{num_threads} threads run already"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{fd}").startswith(GPU_DEVICES):
                return "a GPU is in use already"
    return ""


def take_over(orders: int) -> None:
    """Waits for the order of `rl`, and becomes what it says: another log, other variables. Ends this process when `rl` is gone."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (more := os.read(orders, 4096)):
            os._exit(0)
        line += more
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(order["env"])
    tempfile.tempdir = None  # another TMPDIR


class Adopted:
    """A child of this process that it has not started; with what is used of a Popen."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Standby:
    """What `rl` knows of the copies of one role; at most one at a time waits."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """Of the first process: what /proc shows as the environment of all its copies."""
        self.pid = 0
        self.theirs_in, self.orders = os.pipe()
        self.answers, self.theirs_out = os.pipe()
        os.set_blocking(self.answers, False)

    def environment(self) -> dict[str, str]:
        """What the first process must be told; it must also inherit `inherited`."""
        return {PIPES: f"{self.theirs_in},{self.theirs_out}"}

    @property
    def inherited(self) -> tuple[int, int]:
        return self.theirs_in, self.theirs_out

    def started(self) -> None:
        """The first process has them now: when all that hold these ends are gone, the others see it."""
        for fd in self.inherited:
            os.close(fd)

    def look(self) -> int:
        """The pid of the copy that waits; 0: there is none."""
        with suppress(BlockingIOError):
            if lines := os.read(self.answers, 4096).split():
                self.pid = int(lines[-1])
        line = guard.entry(self.pid) if self.pid else None
        if not line or line.parent != os.getpid() or line.state == "Z":
            self._reap()
        return self.pid

    def call(self, log: Path, env: dict[str, str]) -> Adopted | None:
        """Has the copy that waits take over; None when there is none that can."""
        pid = self.look()
        line = guard.entry(pid) if pid else None
        if not line or line.state == "T":
            return None
        log.write_bytes(b"")
        order = {"log": str(log.absolute()), "env": {name: env[name] for name in OF_AN_ATTEMPT}}
        with suppress(BrokenPipeError):
            os.write(self.orders, json.dumps(order).encode() + b"\n")
            self.pid = 0  # the next one will tell its own
            return Adopted(pid)
        return None

    def close(self) -> None:
        """Ends the copy that waits."""
        if self.look():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        for fd in (self.orders, self.answers):
            os.close(fd)

    def _reap(self, flags: int = os.WNOHANG) -> None:
        if self.pid:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, flags)
        self.pid = 0


class Standbys:
    """The copies that wait, by the name of their role."""

    def __init__(self) -> None:
        self.of: dict[str, Standby] = {}

    def call(self, name: str, log: Path, env: dict[str, str]) -> Adopted | None:
        """The copy of a role, told to go on under this log with these variables; None when there is none that can."""
        return self.of[name].call(log, env) if name in self.of else None

    def expect(self, name: str, marker: str) -> Standby:
        """For a process that starts from nothing: its predecessor's copy is ended."""
        if name in self.of:
            self.of.pop(name).close()
        self.of[name] = Standby(marker)
        return self.of[name]

    def pids(self) -> set[int]:
        return {standby.look() for standby in self.of.values()} - {0}

    def close(self) -> None:
        while self.of:
            self.of.popitem()[1].close()
