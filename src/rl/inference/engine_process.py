"""How the engine's process comes and goes: started quickly, never left behind, and ended although it may not want to."""

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from rl.inference.watch import stopped_processes
from rl.processes import LIBC, PR_SET_PDEATHSIG

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PR_SET_NAME = 15  # linux/prctl.h
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
END_DEADLINE_S = 10.0
"""An orderly end takes about a second; a thread in the middle of reading weights, or an engine that hangs, may hold it up."""


def fork_engine(config: "VllmConfig", asked_for: str | None) -> None:
    """Has vLLM fork the engine's process, as it does by itself where there are GPUs, unless the environment `asked_for` another method.

    On the CPU it has a new process import everything again: half of the start. It does so to set up OpenMP for each of several workers;
    one worker in the engine's process has the server's settings. No OpenMP threads run yet in the server, which would not survive a fork.
    """
    if config.parallel_config.distributed_executor_backend == "uni" and asked_for is None:
        os.environ[METHOD] = "fork"


def tie_children(inherited: Iterable[int]) -> None:
    """From now on the kernel ends forked children with this process, from their first moment, also stopped ones; what is `inherited` (file
    descriptors of ports and locks) they let go, so that a successor of this process finds it free."""
    forker = 0

    def before() -> None:
        nonlocal forker
        forker = os.getpid()

    def in_child() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        LIBC.prctl(PR_SET_NAME, b"EngineCore", 0, 0, 0)  # else `ps` shows two servers
        if os.getppid() != forker:
            os._exit(1)
        signal.set_wakeup_fd(-1)  # the server's event loop takes for its own what is written there
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        for fd in inherited:
            with suppress(OSError):
                os.close(fd)

    os.register_at_fork(before=before, after_in_child=in_child)


@contextmanager
def starting(timeout_s: float) -> Iterator[None]:
    """While the engine starts it answers nobody: one that is stopped for so long meanwhile ends the server."""
    started = threading.Event()

    def watch() -> None:
        stopped_s = 0.0
        while not started.wait(1.0):
            stopped_s = stopped_s + 1.0 if stopped_processes() else 0.0
            if stopped_s > timeout_s:
                said = f"the engine's process {stopped_processes()} has been stopped for {stopped_s:.0f} s while it started; it is killed"
                print(f"inference: {said}", file=sys.stderr, flush=True)
                end_all(1)

    threading.Thread(target=watch, name="watch-start", daemon=True).start()
    try:
        yield
    finally:
        started.set()


def end_within(deadline_s: float, exit_code: int) -> None:
    """After this time, whatever holds up an orderly end, everything below this process is killed, and it ends."""
    timer = threading.Timer(deadline_s, end_all, (exit_code,))
    timer.daemon = True
    timer.start()


def end_all(exit_code: int) -> None:
    """Kills everything below this process and ends it, at once."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(exit_code)


def end_while_starting(*_: object) -> None:
    """Answers SIGTERM and SIGINT: unwinds, so that the engine's process ends too and its sockets go; code that swallows that is killed."""
    end_within(END_DEADLINE_S, 0)
    sys.exit(0)
