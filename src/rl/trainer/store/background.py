"""Work that a thread does while the training goes on: one batch ahead, one version and one checkpoint behind."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

POLL_S = 0.1
"""Between two checks of the other threads while a result is waited for."""


def give_way() -> None:
    """Gives this thread the lowest priority: servers may sample beside it, of which each thread waits for the slowest."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Background:
    """A thread with at most one piece of work in progress, whose error is raised once, by the next call of `raise_errors` or `result`.

    The thread is a daemon: one that waits for ever does not keep the process from ending. Work may raise any Exception; a BaseException
    beside these would be lost.
    """

    def __init__(self, gives_way: bool = False) -> None:
        """`gives_way`: whether the thread computes only while nobody else wants its core."""
        self._pool = ThreadPool(1, give_way if gives_way else None)
        self._work: AsyncResult | None = None
        self.on_error: Callable[[], None] = lambda: None
        """Called right before an error of its work is raised."""

    @property
    def busy(self) -> bool:
        """Whether work was begun whose result, or error, nobody has taken."""
        return self._work is not None

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begins function(*args). The result of the work before must have been taken."""
        assert not self.busy, "the thread has work in progress"
        self._work = self._pool.apply_async(function, args)

    def raise_errors(self) -> None:
        """Raises the error of work that has failed; returns at once."""
        if self._work and self._work.ready() and not self._work.successful():
            self._take()

    def result(self, what: str, deadline_s: float, others: Iterable["Background"] = ()) -> Any:
        """The result of the work, None if none was begun. Raises the error of the work, or meanwhile of the work of `others`.

        Waits for: the thread. Raises TimeoutError, naming `what` is waited for, after `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        others = list(others)
        for other in others:  # also where nothing has to be waited for
            other.raise_errors()
        while self._work and not self._work.ready():
            for other in others:
                other.raise_errors()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"waited {deadline_s:.0f} s for {what}")
            self._work.wait(min(POLL_S, left_s))
        return self._take()

    def _take(self) -> Any:
        work, self._work = self._work, None
        if work and not work.successful():
            self.on_error()
        return work.get() if work else None
