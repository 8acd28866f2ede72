"""Waits of tests, each with a deadline."""

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The condition's value, as soon as it is true, for one that stays true. By default it has
    the half of a minute for which processes of tests sleep: a machine with other work may need
    seconds for what takes none."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain"
        time.sleep(0.02)
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
