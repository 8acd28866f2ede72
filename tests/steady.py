"""A clock that stands still while this process does not get to run, so that other work on the
machine makes nobody late.

It is for tests all of whose parts are in one process: clients, servers and what goes by the time.
Parts that are other processes have their own clocks.
"""

import asyncio
import gc
import selectors
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SHORT_S = 0.02
"""What one round of work counts at most, seconds."""


class _Selector(selectors.DefaultSelector):
    """Notes how long it was to wait, and did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.returned = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic_ns() / 1e9
        self.now += min(began - self.returned, SHORT_S)
        ready = super().select(timeout)
        self.returned = time.monotonic_ns() / 1e9
        self.now += min(self.returned - began, max(timeout or 0.0, SHORT_S))
        return ready


class SteadyLoop(asyncio.SelectorEventLoop):
    """Counts what it waits for, and at most SHORT_S for each round of callbacks."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Does what asyncio.run does, with a steady clock, which is time.monotonic meanwhile."""
    if any("_handle_workers" in thread.name for thread in threading.enumerate()):
        # A pool of threads that an earlier test has left must not end meanwhile: the main thread
        # would wait for a thread of it that waits, by a clock that the main thread moves.
        gc.collect()
    with asyncio.Runner(loop_factory=SteadyLoop) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", runner.get_loop().time)
        return runner.run(main)
