"""A role's side of a warm start: it leaves a forked copy of itself that waits to be its next
attempt."""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter

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
    if obstacle := fork_obstacle():
        print(f"no copy for a warm start: {obstacle}", file=sys.stderr, flush=True)
    else:
        gc.freeze()  # otherwise the first collection would write to all pages shared with the copy
        launcher = os.getppid()
        try:
            while not (between := os.fork()):
                wait_for_turn(launcher, orders, answers)
            os.waitpid(between, 0)
        except OSError as error:  # out of memory, or too many processes
            print(f"no copy for a warm start: {error}", file=sys.stderr, flush=True)
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
