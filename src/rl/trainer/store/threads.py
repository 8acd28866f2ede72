"""Threads beside the training, which prefetch the next batch and write the previous version and
checkpoint; and small messages, without pickles, between the threads of all ranks that publish
together. An error of one rank is raised on all.
"""

import json
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl.system.errors import RunError, exit_code_of
from rl.system.linux import pid_scope
from rl.trainer.parallel.world import World


class RankThreads:
    """One thread of each rank, or one after the other; they all call the same methods in the
    same order. Without a world: a rank alone."""

    def __init__(self, world: World | None = None, timeout_s: float = 0.0):
        """Every rank of the world calls this. `timeout_s` bounds each wait for the slowest rank."""
        self.world, self.rank, self.size = world, *((world.rank, world.size) if world else (0, 1))
        self.group = world.new_group(timeout_s) if world else None
        self.failed = False
        """Whether every rank knows of an error: nothing is exchanged any more."""
        places = self.share(pid_scope)
        self.first_here = places.index(pid_scope())
        """The first rank on this host."""
        self.all_here = len({*places}) == 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, work: Callable[[], Any]) -> list[Any]:
        """Returns each rank's result of `work`, by rank, on every rank: values that JSON can hold.

        Waits for: all ranks. Raises an OSError or RunError of any rank on every rank, on the others
        as a RunError.
        """
        if not self.world or self.size == 1:
            return [work()]
        error: OSError | RunError | None = None
        try:
            message = {"result": work()}
        except (OSError, RunError) as failure:
            if self.failed:
                raise
            error = failure
            message = {"text": f"{error} (on rank {self.rank})", "code": exit_code_of(error)}
        data = self.world.gather_bytes(json.dumps(message).encode(), self.group)
        answers = [json.loads(answer) for answer in data]
        for answer in answers:
            if "result" not in answer:
                self.failed = True
                raise error or RunError(answer["text"], answer["code"])
        return [answer["result"] for answer in answers]

    def of_main(self, work: Callable[[], Any]) -> Any:
        """Returns rank 0's result of `work`, which only rank 0 does, on every rank. Otherwise as
        `share`."""
        return self.share(work if self.is_main else lambda: None)[0]

    def sum_to_main(self, values: Tensor) -> None:
        """Adds all ranks' values on rank 0, in place; the others' are undefined afterwards."""
        if self.size > 1:
            dist.reduce(values, dst=0, group=self.group)


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
