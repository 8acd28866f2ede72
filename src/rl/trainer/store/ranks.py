"""Small messages between the threads of all ranks that publish together, without pickles; an
error of one rank is raised on all."""

import json
from collections.abc import Callable
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
