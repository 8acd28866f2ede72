"""How long an event loop is held by one of its callbacks, or by another thread that does not let go of the interpreter."""

import asyncio
import threading
import time

SAMPLE_S = 0.005


class LoopLag:
    """Inside the block a thread asks the loop for a sign of life, again and again; `longest_s` is the longest that it waited for one."""

    def __enter__(self) -> "LoopLag":
        self.longest_s, self.loop, self.ended = 0.0, asyncio.get_running_loop(), threading.Event()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            answered, asked = threading.Event(), time.monotonic()
            self.loop.call_soon_threadsafe(self.answer, asked, answered)
            while not answered.wait(0.1) and not self.ended.is_set():
                pass

    def answer(self, asked: float, answered: threading.Event) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - asked)
        answered.set()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
