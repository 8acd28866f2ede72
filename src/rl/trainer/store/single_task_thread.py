"""Work that threads do during training: prefetching the next batch, and writing the previous
version and checkpoint."""

import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

from rl.system.errors import RunError

POLL_S = 0.1
"""Seconds between two checks of the other threads while waiting for a result."""


class SingleTaskThread:
    """A thread with at most one task in progress; a task's error is raised once, by the next call
    of `raise_errors` or `result`.

    The thread is a daemon, so a task that never ends does not keep the process alive. Tasks may
    raise any Exception; any other BaseException would be lost.
    """

    def __init__(self) -> None:
        self._pool = ThreadPool(1)
        self._work: AsyncResult | None = None
        self.on_error: Callable[[], None] = lambda: None
        """Called right before an error of a task is raised, or that it takes too long."""

    @property
    def busy(self) -> bool:
        """Whether a task was started whose result or error has not been taken."""
        return self._work is not None

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts function(*args). The result of the previous task must have been taken."""
        assert not self.busy, "the thread has work in progress"
        self._work = self._pool.apply_async(function, args)

    def raise_errors(self) -> None:
        """Raises the task's error if it has failed. Never waits."""
        if self._work and self._work.ready() and not self._work.successful():
            self._take()

    def result(
        self, what: str, deadline_s: float, others: Iterable["SingleTaskThread"] = ()
    ) -> Any:
        """Returns the task's result, or None if no task was started. Raises the task's error, or
        that of one of `others` meanwhile.

        Waits for: the thread. After `deadline_s` seconds raises RunError, which names `what` it
        waited for.
        """
        deadline, others = time.monotonic() + deadline_s, list(others)
        while True:
            for other in others:  # even if there is nothing to wait for
                other.raise_errors()
            if not self._work or self._work.ready():
                return self._take()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.on_error()
                # so that it counts as a crash: a restart may succeed
                raise RunError(f"waited {deadline_s:.0f} s for {what}", exit_code=1)
            self._work.wait(min(POLL_S, left_s))

    def _take(self) -> Any:
        work, self._work = self._work, None
        if work and not work.successful():
            self.on_error()
        return work.get() if work else None
