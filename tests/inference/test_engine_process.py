"""An engine that does not answer is told from one that is busy. Fakes of the engine, real
processes to stop."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from rl.inference.engine_process import engine_death, stopped_processes
from tests import steady


def death(
    answers: list[float | Exception], *, limit_s: float, **engine
) -> tuple[str | None, float]:
    """What `engine_death` says of an engine that takes so many seconds for each answer, the last
    for all others; None: nothing in 1 s."""
    delays = iter(answers)
    now = [0.0]

    async def collective_rpc(method: str) -> list[bool]:
        now[0] = next(delays, now[0])
        if isinstance(now[0], Exception):
            raise now[0]
        await asyncio.sleep(now[0])
        return [True]

    async def watch() -> str | None:
        fake = SimpleNamespace(
            collective_rpc=collective_rpc,
            **{"errored": False, "broken": "", "swapping": False} | engine,
        )
        try:
            async with asyncio.timeout(1.0):
                return await engine_death(fake, limit_s)
        except TimeoutError:
            return None

    async def timed() -> tuple[str | None, float]:
        began = time.monotonic()
        return await watch(), time.monotonic() - began

    return steady.run(timed())


def test_silence_is_noticed_after_its_time_and_answers_are_not():
    said, after_s = death([0.0, 0.0, 30.0], limit_s=0.2)
    assert (
        said is not None
        and "the engine has not answered for 0 s (inference.engine_timeout_s): it hangs" in said
    )
    assert after_s > 0.3  # three questions, a quarter of the limit apart, and the limit
    assert death([0.0, 0.15], limit_s=0.2)[0] is None
    assert death([RuntimeError("a worker says no")], limit_s=0.2)[0] is None
    assert death([30.0], limit_s=0.2, swapping=True)[0] is None  # ten times as long


def test_a_dead_or_broken_engine_is_noticed_at_once():
    assert (
        death([0.0], limit_s=60, errored=True)[0]
        == "the engine process died; its last lines are above"
    )
    assert (
        death([0.0], limit_s=60, broken="loading failed half-way")[0] == "loading failed half-way"
    )
    assert death([0.0], limit_s=60, broken="loading failed half-way", swapping=True)[0] is None


GRANDCHILD = """
import os, sys
from rl.inference.engine_process import tie_children

def name():
    return open("/proc/self/comm").read().strip()

def forked(function):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(function())

def engine():
    assert name() == "EngineCore"
    fds = os.pipe()  # they take the lowest numbers that are free
    assert port in fds, "the number is free again"
    return forked(lambda: os.fstat(port) and 0)  # of a closed one it raises an error: exit code 1

port = os.open("/dev/null", os.O_RDONLY)
tie_children([port])
print(forked(engine))
"""


def test_what_the_engine_forks_keeps_its_files():
    """Workers of several GPUs: they closed the numbers of the server's port and lock, which were
    the engine's pipes by then."""
    done = subprocess.run(
        [sys.executable, "-c", GRANDCHILD], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_stopped_engine_has_no_excuse():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert child.pid not in stopped_processes()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        said, _ = death([30.0], limit_s=0.1, swapping=True)
        assert said is not None and f"process {child.pid} is stopped" in said
    finally:
        child.kill()
        child.wait()
