"""Manages the engine's process: starts it quickly, never leaves it behind, and ends it even if
it hangs."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl.system.children import descendants, kill_descendants
from rl.system.linux import end_with_parent, set_process_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from rl.inference.engine import VersionedEngine

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
END_DEADLINE_S = 10.0
"""An orderly end takes about a second, but a thread that is reading weights, or an engine that
hangs, may delay it."""
POLL_S = 0.1
"""Seconds between checks of the engine; vLLM's own watchdog takes up to 5 s and exits with code
0."""
QUESTIONS_PER_TIMEOUT = 4
"""How often the engine is asked for a sign of life within `inference.engine_timeout_s`."""
LOAD_PATIENCE = 10
"""For this many times `inference.engine_timeout_s` nothing of new weights may be read, and
swapping them may take as long: on GPUs all of them are copied and packed."""


def fork_engine(config: "VllmConfig", asked_for: str | None) -> None:
    """Makes vLLM fork the engine's process, as it does by default with GPUs, unless the environment
    `asked_for` another method.

    On the CPU vLLM spawns a process that imports everything again, which is half of the start. It
    does so to set up OpenMP for each of several workers; a single worker in the engine's process
    has the server's settings. The server has no OpenMP threads yet, which would not survive a fork.
    """
    if config.parallel_config.distributed_executor_backend == "uni" and asked_for is None:
        os.environ[METHOD] = "fork"


def tie_children(inherited: Iterable[int]) -> None:
    """Makes the kernel kill all processes that are forked from now on with their parent, even
    stopped ones. Direct children close `inherited`, file descriptors of ports and locks, so that
    a successor of this process finds them free; grandchildren do not: with several GPUs the
    engine forks its workers, and has reused these numbers by then."""
    server, forker = os.getpid(), 0

    def before() -> None:
        nonlocal forker
        forker = os.getpid()

    def in_child() -> None:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != forker:
            os._exit(1)
        if forker != server:
            return
        set_process_name("EngineCore")  # else `ps` shows two servers
        signal.set_wakeup_fd(-1)  # else the server's event loop would read this process's signals
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        for fd in inherited:
            with suppress(OSError):
                os.close(fd)

    os.register_at_fork(before=before, after_in_child=in_child)


def end_within(deadline_s: float, exit_code: int) -> None:
    """Kills everything below this process and ends it after `deadline_s`, unless it has ended in
    order by then."""
    timer = threading.Timer(deadline_s, end_all, (exit_code,))
    timer.daemon = True
    timer.start()


def end_all(exit_code: int) -> None:
    """Kills everything below this process and ends it at once."""
    kill_descendants()
    os._exit(exit_code)


def end_while_starting(*_: object) -> None:
    """Handles SIGTERM and SIGINT: unwinds, so that the engine's process ends and its sockets are
    removed; kills this process if code swallows the exit."""
    end_within(END_DEADLINE_S, 0)
    sys.exit(0)


async def engine_death(engine: "VersionedEngine", timeout_s: float) -> str:
    """Waits until the engine can no longer be used: it is dead, broken or silent. Returns why.

    Every worker is repeatedly asked for a sign of life; an engine answers between two steps.
    """
    answer: asyncio.Future[Any] | None = None
    # since the last question or answer, and the time up to which this is counted
    waited_s, last = 0.0, time.monotonic()
    # `broken` is set in advance for the time of a swap; it counts once the swap has ended.
    while not engine.errored and (engine.swapping or not engine.broken):
        await asyncio.sleep(min(POLL_S, timeout_s / 10))
        now = time.monotonic()
        # This process may have been stopped itself, and the engine with it: that time does not
        # count.
        waited_s, last = waited_s + min(now - last, 1.0), now
        if answer and answer.done():
            answer, waited_s = None, 0.0
        elif answer and waited_s > timeout_s:
            if not engine.swapping or waited_s > LOAD_PATIENCE * timeout_s or stopped_processes():
                answer.cancel()
                return describe_silence(waited_s)
        elif not answer and waited_s >= timeout_s / QUESTIONS_PER_TIMEOUT:
            answer, waited_s = asyncio.ensure_future(engine.collective_rpc("check_health")), 0.0
            # An immediate failure means that the engine is dead, which is noticed here soon.
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
    return engine.broken or "the engine process died; its last lines are above"


def stopped_processes() -> list[int]:
    """The pids below this process that are stopped (SIGSTOP, a debugger)."""
    return [pid for pid, line in descendants().items() if line.state in "Tt"]  # t: by a debugger


def describe_silence(waited_s: float) -> str:
    """The message about an engine that does not answer."""
    stopped = stopped_processes()
    why = (
        f"process {', '.join(map(str, stopped))} is stopped"
        if stopped
        else "it hangs, or a step takes that long"
    )
    return (
        f"the engine has not answered for {waited_s:.0f} s (inference.engine_timeout_s): {why}; "
        "killing it"
    )
