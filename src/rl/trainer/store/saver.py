"""When checkpoints are due, and the thread that writes them, out of a copy of the state, while the next steps train."""

import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.run_dir.lease import check_fence
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.retention import delete_old
from rl.trainer.parallel.world import World
from rl.trainer.store import checkpoint
from rl.trainer.store.background import Background


class Saver:
    """Writes at most one checkpoint at a time, so the copy is held once. Every rank has a saver and calls it for the same steps."""

    def __init__(self, run_dir: RunDir, settings: TrainerConfig, world: World, step: int):
        """`step`: of the newest checkpoint there is."""
        self.run_dir, self.config, self.world, self.deadline_s = run_dir, settings.checkpoint, world, settings.rank_timeout_s
        self.never_due = bool(settings.data.fake) and settings.checkpoint.interval is None
        """A benchmark writes only what is asked for."""
        self.step = step
        """The step of the newest checkpoint that is complete."""
        self.began = step
        """The step of the newest one that was begun."""
        self.time: float | None = None
        """When the interval in seconds began (time.monotonic)."""
        self.background = Background()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline_s)) if world.size > 1 else None

    def start_clock(self) -> None:
        """Begins the interval in seconds, unless it has begun: it counts training, not the wait for inference to come up."""
        self.time = self.time or time.monotonic()

    def due(self, step: int, last: int) -> bool:
        """Whether the state after `step` is to be saved. Every rank calls this; rank 0's clock decides for all."""
        if self.never_due:
            return False
        if self.config.interval is not None:
            due = step % self.config.interval == 0
        else:
            due = self.time is not None and time.monotonic() - self.time >= self.config.interval_s
        return bool(self.world.broadcast_int(due or step == last))

    def save(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> None:
        """Copies the state after `step`, and begins to write it. Waits for the checkpoint before, see `finish`."""
        self.finish()
        state = checkpoint.snapshot(model, optimizer, self.world)
        self.background.start(self._write, step, state, checkpoint.fingerprint(model))
        self.began, self.time = step, time.monotonic()

    def _write(self, step: int, state: dict[str, Tensor], model: str) -> None:
        fence = partial(check_fence, self.run_dir.lock("trainer"))
        checkpoint.write(self.run_dir.checkpoint(step), step, state, model, self.world, self.group, fence)
        self.step = step
        if self.world.is_main:
            needed = {first_step(self.run_dir)}  # of a branch: a replay begins there
            delete_old(numbered(self.run_dir.checkpoints), self.config.keep_last, self.config.keep_every, needed)

    def finish(self) -> None:
        """Waits until the checkpoint in progress is complete, and raises the thread's error.

        Waits for: this rank's disk, and the other ranks'. Raises TimeoutError at the deadline.
        """
        what = f"checkpoint {self.began} to be written to {self.run_dir.checkpoints}: does that disk answer?"
        self.background.result(what, self.deadline_s)
