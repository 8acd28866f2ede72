"""Whether the engine can still be used: its processes may be dead, stopped or stuck while the API process answers."""

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from rl.inference.engine import VersionedEngine

LOOK_S = 0.1
"""How often the engine is looked at; vLLM's own watchdog takes up to 5 s and exits with code 0."""
QUESTIONS_PER_TIMEOUT = 4
"""How often the engine is asked for a sign of life while `inference.engine_timeout_s` passes."""
SWAP_PATIENCE = 10
"""Times `inference.engine_timeout_s` that an engine may take which puts new weights in place: on GPUs it copies and packs all of them."""


async def engine_death(engine: "VersionedEngine", timeout_s: float) -> str:
    """Returns, when the engine can no longer be used, why."""
    silence = asyncio.create_task(engine_silence(engine, timeout_s))
    try:
        while not silence.done():
            if engine.errored:
                return engine.broken or "the engine process died; its last lines are above"
            # While a swap runs `broken` is set in advance; it counts once the swap has ended.
            if engine.broken and not engine.swapping:
                return engine.broken
            await asyncio.wait([silence], timeout=LOOK_S)
        return silence.result()
    finally:
        silence.cancel()


async def engine_silence(engine: "VersionedEngine", timeout_s: float) -> str:
    """Asks every worker for a sign of life, again and again; returns once an answer is overdue. An engine answers between two steps."""
    while True:
        await asyncio.sleep(timeout_s / QUESTIONS_PER_TIMEOUT)
        answer = asyncio.ensure_future(engine.collective_rpc("answer"))
        # What fails at once is the engine's death, which is noticed otherwise.
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        waited_s, last = 0.0, time.monotonic()
        while not answer.done():
            await asyncio.wait([answer], timeout=min(LOOK_S, timeout_s / 10))
            now = time.monotonic()
            # This process may have been stopped itself, and the engine with it: what it slept does not count.
            waited_s, last = waited_s + min(now - last, 1.0), now
            if waited_s > timeout_s and not (engine.swapping and waited_s <= SWAP_PATIENCE * timeout_s and not stopped_processes()):
                answer.cancel()
                return describe_silence(waited_s)


def stopped_processes() -> list[int]:
    """Which processes below this one are stopped (SIGSTOP, a debugger)."""
    stopped = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped.append(process.pid)
    return stopped


def describe_silence(waited_s: float) -> str:
    """What is said before the server ends."""
    stopped = stopped_processes()
    why = f"process {', '.join(map(str, stopped))} is stopped" if stopped else "it hangs, or a step takes that long"
    return f"the engine has not answered for {waited_s:.0f} s (inference.engine_timeout_s): {why}; it is killed"
