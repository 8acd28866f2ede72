"""How long an event loop is held by one of its callbacks, or by another thread that does not let
go of the interpreter."""

import asyncio
import contextlib
import os
import threading
import time
from typing import NamedTuple

SAMPLE_S = 0.005


class Moment(NamedTuple):
    """Seconds: the time; the processor's time of this process; how long the thread of its loop
    waited for a processor, and all its threads in sum."""

    time: float
    used: float
    loop_delayed: float
    delayed: float


class LoopLag:
    """Inside the block a thread asks the loop for a sign of life, again and again; `longest_s`
    is the longest that it waited for one, less the time for which this process waited for a
    processor: others use the machine, too."""

    def __enter__(self) -> "LoopLag":
        self.longest_s, self.loop, self.ended = 0.0, asyncio.get_running_loop(), threading.Event()
        self.loop_thread, self.thread = (
            str(threading.get_native_id()),
            threading.Thread(target=self.sample),
        )
        self.thread.start()
        return self

    def moment(self) -> Moment:
        delays = dict[str, float]()
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
                delays[thread] = int(file.read().split()[1]) / 1e9
        return Moment(
            time.monotonic(), time.process_time(), delays[self.loop_thread], sum(delays.values())
        )

    def sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            answered = threading.Event()
            self.loop.call_soon_threadsafe(self.answer, self.moment(), answered)
            while not answered.wait(0.1) and not self.ended.is_set():
                pass

    def answer(self, asked: Moment, answered: threading.Event) -> None:
        waited_s, used_s, loop_delayed_s, delayed_s = (
            now - before for now, before in zip(self.moment(), asked, strict=True)
        )
        idle_s = max(0.0, waited_s - used_s - delayed_s)  # a thread that would run may delay others
        self.longest_s = max(self.longest_s, min(waited_s - loop_delayed_s, used_s + idle_s))
        answered.set()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
