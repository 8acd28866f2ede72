"""When checkpoints are due, and the thread that writes them, out of a copy of the state, while the next steps train."""

import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.run_dir import spans
from rl.run_dir.lease import check_fence
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir
from rl.run_dir.retention import Retention
from rl.trainer.parallel.world import World
from rl.trainer.store import checkpoint
from rl.trainer.store.background import Background

PAUSE = 20.0
"""Where seconds decide, so many times what the last checkpoint cost pass before the next one: 20/21 of the time at least is free."""


class Saver:
    """Writes at most one checkpoint at a time, so the copy is held once. Every rank has a saver and calls it for the same steps.

    What a checkpoint costs is counted from the begin of the copy, for which training stands still, until all ranks have written their
    files. The writing counts in full, though training goes on beside it: it takes memory, cores and disk from training and from the
    versions, how much differs from machine to machine, and so the bound holds on each of them. A resumed run measures anew.
    """

    def __init__(self, run_dir: RunDir, settings: TrainerConfig, world: World, step: int):
        """`step`: of the newest checkpoint there is."""
        self.run_dir, self.config, self.world, self.deadline_s = run_dir, settings.checkpoint, world, settings.rank_timeout_s
        self.retention = Retention(run_dir.checkpoints, ("",), self.config.keep_last, self.config.keep_every)
        self.never_due = bool(settings.data.fake) and settings.checkpoint.interval is None
        """A benchmark writes only what is asked for."""
        self.step = step
        """The step of the newest checkpoint that is complete."""
        self.began = step
        """The step of the newest one that was begun."""
        self.since: float | None = None
        """When the interval in seconds began (time.monotonic): with the first batch, and then with the end of each checkpoint."""
        self.last_began: float | None = None
        """When the newest checkpoint was begun, before the first one when training was."""
        self.cost_s = 0.0
        """Seconds that the newest complete checkpoint cost; 0 before the first one of this process."""
        self.fraction = 0.0
        """These seconds over those from the begin of the checkpoint before it, or of training, to its own."""
        self.background = Background(gives_way=True)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline_s)) if world.size > 1 else None

    def start_clock(self) -> None:
        """Begins the interval in seconds, unless it has begun: it counts training, not the wait for inference to come up."""
        if self.since is None:
            self.since = self.last_began = time.monotonic()

    def due(self, step: int, last: int) -> bool:
        """Whether the state after `step` is to be saved. Every rank calls this; rank 0's clock decides for all.

        Raises what the checkpoint that is being written has failed with.
        """
        self.background.raise_errors()
        if self.never_due:
            return False
        if self.config.interval is not None:
            due = step % self.config.interval == 0
        else:
            pause_s = max(self.config.interval_s, PAUSE * self.cost_s)
            due = self.step == self.began and self.since is not None and time.monotonic() - self.since >= pause_s
        return bool(self.world.broadcast_int(due or step == last))

    def save(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> None:
        """Copies the state after `step`, and begins to write it. Waits for the checkpoint before, see `finish`."""
        self.finish()
        before, now = self.last_began, time.monotonic()
        self.began, self.last_began = step, now
        state = checkpoint.snapshot(model, optimizer, self.world)
        self.background.start(self._write, step, state, checkpoint.fingerprint(model), now, now if before is None else before)

    def _write(self, step: int, state: dict[str, Tensor], model: str, began: float, before: float) -> None:
        """`began`, `before`: when this checkpoint and the one before it were begun."""
        fence = partial(check_fence, self.run_dir.lock("trainer"))
        with spans.span("write_checkpoint", "saver", step):
            checkpoint.write(self.run_dir.checkpoint(step), step, state, model, self.world, self.group, fence)
        self.since = time.monotonic()
        self.cost_s = self.since - began
        self.fraction = self.cost_s / max(began - before, self.cost_s)
        self.step = step  # the last of them: by it `due` knows that they are this checkpoint's
        if self.world.is_main:
            self.retention.delete_old(step, {first_step(self.run_dir)})  # of a branch: a replay begins there

    def metrics(self) -> dict[str, float]:
        """The cost of the newest checkpoint that is complete by now; nothing before the first one."""
        return {"time/checkpoint_cost": self.cost_s, "time/checkpoint_fraction": self.fraction} if self.cost_s else {}

    def finish(self) -> None:
        """Waits until the checkpoint in progress is complete, and raises the thread's error.

        Waits for: this rank's disk, and the other ranks'. Raises TimeoutError at the deadline.
        """
        what = f"checkpoint {self.began} to be written to {self.run_dir.checkpoints}: does that disk answer?"
        self.background.result(what, self.deadline_s)
