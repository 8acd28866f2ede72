"""Warm starts: a process forks after its imports. The copy waits and becomes the role's next
attempt, which saves the imports.

    role: imports, copy -> its work ... dies
    copy: waits ... order of `rl`, copy -> the work, under a new log

Imports are most of a start (6 of 9 s for the trainer, 9 of 12 s for inference). A copy made by
fork(2) saves that time and shares its memory until one side writes. The copy is made before the
role opens files, starts threads or touches a GPU, none of which survives a fork. It is a child of
`rl` in its own session, bears the run's marker, and ends with `rl`. The next attempt is a cold
start if there is no copy, or if two attempts in a row died without progress.

The same applies to the orchestrator and the workers of an environment in place of `rl` and a role.
The process that starts such roles must adopt orphans (`linux.adopt_orphans`).
"""

import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path

from rl.system import process_table
from rl.system.linux import end_with_parent

PIPES = "RL_PREFORK"
"""Environment variable with the file descriptors to read orders from and to write the copy's pid
to."""

THREADLESS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment variables that keep libraries from starting threads."""

SEEDED_AT_IMPORT = (
    ("numpy.random", "seed"),
    ("datasets.fingerprint", "fingerprint_rng.seed"),  # names of cache files
    ("sympy.core.random", "rng.seed"),
    ("sympy.core.random", "_assumptions_rng.seed"),
)
"""Modules that seed random numbers when imported, and the function that seeds them again. Python
reseeds `random` itself."""

GPU_DEVICES = ("/dev/nvidia", "/dev/dxg")
"""Files that a process has open once it has used a GPU driver. A fork of it would find no GPU,
and might silently compute on the CPU."""


def leave(imports: Callable[[], None]) -> None:
    """Runs `imports` and leaves a copy of this process behind, if `rl` has asked for one. Returns
    at once in the process itself, and in the copy when `rl` calls it.

    Call it before opening files, starting threads or touching a GPU; `imports` must not do any of
    that either.
    """
    if not (pipes := os.environ.pop(PIPES, "")):
        return
    orders, answers = map(int, pipes.split(","))
    with without_threads(), without_collection():
        imports()
    obstacle = fork_obstacle()
    if not obstacle:
        gc.freeze()  # otherwise the first collection would write to all pages shared with the copy
        launcher = os.getppid()
        try:
            while not (between := os.fork()):
                wait_for_turn(launcher, orders, answers)
            os.waitpid(between, 0)
        except OSError as error:  # out of memory, or too many processes
            obstacle = str(error)
    if obstacle:
        print(f"no copy for a warm start: {obstacle}", file=sys.stderr, flush=True)
    os.close(orders)
    os.close(answers)


def wait_for_turn(launcher: int, orders: int, answers: int) -> None:
    """Runs in the fork: makes the copy a child of `rl`, which adopts orphans, and returns in the
    copy when `rl` calls it.

    An error ends only the copy.
    """
    try:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        while os.getppid() == between:
            time.sleep(0.001)
        end_with_parent()
        if os.getppid() != launcher:  # `rl` is gone
            os._exit(1)
        os.write(answers, f"{os.getpid()}\n".encode())
        take_over(orders)
    except (OSError, ValueError):
        os._exit(1)


@contextmanager
def without_threads() -> Iterator[None]:
    """Keeps libraries from starting threads when imported: numpy's OpenBLAS, which then has one
    thread for good (later child processes have all), and pyarrow's allocator, which then frees
    memory during calls. Variables that the user has set are kept, even if that prevents the
    copy."""
    ours = {name: value for name, value in THREADLESS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables the garbage collector during imports, which only ever add objects: saves a fifth
    of the time of vLLM's imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def fork_obstacle() -> str:
    """Describes what prevents a fork of this process: threads or a GPU in use. Empty if nothing
    does."""
    if num_threads := len(os.listdir("/proc/self/task")) - 1:
        return f"{num_threads} threads are already running"
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            if os.readlink(f"/proc/self/fd/{fd}").startswith(GPU_DEVICES):
                return "a GPU is already in use"
    return ""


def take_over(orders: int) -> None:
    """Waits for an order of `rl`, then switches to the log, variables and arguments that it
    names. Ends this process if `rl` is gone."""
    line = b""
    while not line.endswith(b"\n"):
        if not (data := os.read(orders, 4096)):
            os._exit(0)
        line += data
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(order["env"])
    if order["arguments"] is not None:
        sys.argv[1:] = order["arguments"]
    tempfile.tempdir = None  # TMPDIR may have changed
    seed_anew()


def seed_anew() -> None:
    """Reseeds random numbers in this process: otherwise all copies would draw the same ones."""
    for name, seed in SEEDED_AT_IMPORT:
        if module := sys.modules.get(name):
            with suppress(AttributeError):  # another version of the module
                attrgetter(seed)(module)()


class PreforkedProcess:
    """The copies of one role, as seen by `rl`; at most one waits at a time. Holds `rl`'s ends of
    the pipes that all copies share."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """The marker of the first process, which /proc also shows for all its copies."""
        self.pid = 0
        self.over = False
        """Whether there will be no more copies: the last process that could leave one is gone or
        failed to."""
        child_in, self.orders = os.pipe()
        self.answers, child_out = os.pipe()
        os.set_blocking(self.answers, False)
        self.inherited = child_in, child_out
        """File descriptors for the first process and its copies."""
        self.environment = {PIPES: f"{child_in},{child_out}"}
        """Environment variables that ask the first process for a copy."""

    def started(self) -> None:
        """Closes the ends that the first process has inherited, so that the pipes break once it
        and all copies are gone."""
        for fd in self.inherited:
            os.close(fd)

    def poll(self) -> int:
        """Returns the pid of the waiting copy; 0 if there is none."""
        with suppress(BlockingIOError):
            data = os.read(self.answers, 4096)
            self.over = not data
            if lines := data.split():
                self.pid = int(lines[-1])
        line = process_table.entry(self.pid)
        if not line or line.parent != os.getpid() or line.state == "Z":
            self._reap()
        return self.pid

    def call(
        self, log: Path, env: dict[str, str], arguments: Sequence[str] | None = None
    ) -> int | None:
        """Has the waiting copy take over with these variables, and with these command-line
        arguments if given. Returns its pid, or None if no copy can take over."""
        pid = self.poll()
        line = process_table.entry(pid)
        if not line or line.state == "T":
            return None
        log.touch()
        order = {"log": str(log.absolute()), "env": env, "arguments": arguments}
        try:
            os.write(self.orders, json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            return None
        self.pid = 0  # the next copy will send its own
        return pid

    def close(self) -> None:
        """Kills the waiting copy."""
        if self.poll():
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
