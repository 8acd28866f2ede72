"""Waiting for what a thread does with a disk."""

from multiprocessing.pool import AsyncResult
from typing import Any


def result_within(coming: AsyncResult, deadline_s: float, what: str) -> Any:
    """The thread's result. Raises its error, or TimeoutError when `what` has not come by the deadline."""
    coming.wait(deadline_s)
    if not coming.ready():
        raise TimeoutError(f"waited {deadline_s:.0f} s for {what}: does that disk answer?")
    return coming.get()
