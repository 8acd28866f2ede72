"""Checkpoints are due now and then, and written by a thread out of a copy of the state while the next steps train."""

import time
from datetime import timedelta
from multiprocessing.pool import AsyncResult, ThreadPool

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.run_dir import RunDir
from rl.trainer import checkpoint
from rl.trainer.config import TrainerConfig
from rl.trainer.distributed import World
from rl.trainer.threads import result_within


class Saver:
    """At most one checkpoint is on its way, so the copy is held once. Every rank has one and calls it for the same steps.

    Errors of the thread come with the next call.
    """

    def __init__(self, run_dir: RunDir, settings: TrainerConfig, world: World, step: int):
        """`step`: of the newest checkpoint there is."""
        self.run_dir, self.config, self.world, self.deadline_s = run_dir, settings.checkpoint, world, settings.rank_timeout_s
        self.step = step
        """Of the newest checkpoint that is complete."""
        self.began = step
        """Of the newest one that was begun."""
        self.time = time.monotonic()
        self.pool = ThreadPool(1)
        self.coming: AsyncResult | None = None
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline_s)) if world.size > 1 else None

    def start_clock(self) -> None:
        """The interval in seconds counts from now."""
        self.time = time.monotonic()

    def due(self, step: int, last: int) -> bool:
        """Whether the state after `step` is to be saved. Every rank calls this; rank 0's clock decides for all."""
        if self.config.interval is not None:
            due = step % self.config.interval == 0
        else:
            due = time.monotonic() - self.time >= self.config.interval_s
        return bool(self.world.broadcast_int(due or step == last))

    def save(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> None:
        """Copies the state, and begins to write it. Waits for the checkpoint before, see `finish`."""
        self.finish()
        state = checkpoint.snapshot(model, optimizer, self.world)
        self.coming = self.pool.apply_async(self._write, (step, state, checkpoint.fingerprint(model)))
        self.began, self.time = step, time.monotonic()

    def _write(self, step: int, state: dict[str, Tensor], model: str) -> None:
        checkpoint.write(self.run_dir.checkpoint(step), step, state, model, self.world, self.group)
        self.step = step
        if self.world.is_main:
            checkpoint.delete_old(self.run_dir.checkpoints, self.config)

    def look(self) -> None:
        """Raises the thread's error, if it has ended with one."""
        if self.coming and self.coming.ready():
            self.finish()

    def finish(self) -> None:
        """Waits until the checkpoint on its way is complete, and raises the thread's error.

        Waits for: this rank's disk, and the other ranks'. Raises TimeoutError at the deadline.
        """
        if not self.coming:
            return
        coming, self.coming = self.coming, None
        result_within(coming, self.deadline_s, f"checkpoint {self.began} to be written to {self.run_dir.checkpoints}")
