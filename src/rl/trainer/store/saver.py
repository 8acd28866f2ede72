"""Decides when checkpoints are due, and writes them in a thread, from a copy of the state, while
the next steps train."""

import math
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.run_dir import spans
from rl.run_dir.lease import check_fence
from rl.run_dir.paths import Retention, RunDir, first_step
from rl.run_dir.status import Phase
from rl.system.errors import RESTART, RunError
from rl.trainer.parallel.world import World
from rl.trainer.store import checkpoint
from rl.trainer.store.threads import SingleTaskThread

PAUSE = 20.0
"""With an interval in seconds, the least pause after a checkpoint, as a multiple of its cost: at
least 20/21 of the time is free."""


class Saver:
    """Writes at most one checkpoint at a time, so there is only one copy in memory. Every rank
    calls its saver for the same steps.

    The cost of a checkpoint is the time from the start of the copy, during which training is
    paused, until all ranks have written their files. Writing counts in full, although training
    continues: it takes memory, cores and disk from training and from versions. How much differs
    between machines, so counting all of it keeps the bound valid everywhere. A resumed run measures
    the cost again.
    """

    def __init__(
        self,
        run_dir: RunDir,
        settings: TrainerConfig,
        world: World,
        step: int,
        base: str = "",
        enter: Callable[[Phase, int], None] = lambda *_: None,
    ):
        """`step`: the step of the newest existing checkpoint. `base`: see checkpoint.write.
        `enter`: as Status.enter; called when writing has failed, so that the last status does not
        say "training": readers would blame the batch."""
        self.run_dir, self.config, self.world = run_dir, settings.checkpoint, world
        self.base, self.deadline_s, self.lock = base, settings.patience_s, run_dir.lock("trainer")
        keep_last, keep_every = self.config.keep_last, self.config.keep_every
        self.retention = Retention(run_dir.checkpoints, ("",), keep_last, keep_every)
        self.never_due = bool(settings.data.fake) and self.config.interval is None
        """A benchmark writes only what the user asks for."""
        self.step = self.newest_started = step
        """The step of the newest complete checkpoint; of the newest one that was started."""
        self.since = self.last_began = math.inf
        """Start of the interval in seconds (time.monotonic): the first batch, then the end of
        each checkpoint. When the newest checkpoint began; before the first one, when training
        began. Both are infinite before that."""
        self.cost_s = self.fraction = 0.0
        """Cost of the newest complete checkpoint of this process in seconds, 0 before the first;
        and that divided by the seconds from the start of the previous checkpoint, or of training,
        to the start of this one."""
        self.stager = checkpoint.make_stager(world)
        self.thread = SingleTaskThread()
        self.thread.on_error = lambda: enter(Phase.CHECKPOINTING, self.newest_started)
        # its collectives wait for the disks of other ranks
        self.group = world.new_group(self.deadline_s)

    def start_clock(self) -> None:
        """Starts the interval in seconds if it has not started: it counts training, not the wait
        for inference to start."""
        if self.since == math.inf:
            self.since = self.last_began = time.monotonic()

    def due(self, step: int, last: int) -> bool:
        """Whether to save the state after `step`. Every rank calls this; rank 0's clock decides for
        all.

        Raises the error of the checkpoint in progress if it has failed, or if it takes longer than
        a wait for it would.
        """
        self.thread.raise_errors()
        now, is_free = time.monotonic(), self.step == self.newest_started
        waited_s = now - self.last_began
        if not is_free and waited_s > self.deadline_s:
            self.thread.on_error()
            raise RunError(f"waited {waited_s:.0f} s for {self._in_progress()}", RESTART)
        if self.never_due:
            return False
        if self.config.interval is not None:
            due = step % self.config.interval == 0
        else:
            pause_s = max(self.config.interval_s, PAUSE * self.cost_s)
            due = is_free and now - self.since >= pause_s
        return bool(self.world.broadcast_int(due or step == last))

    def copy(self, step: int, model: PreTrainedModel, optimizer: Optimizer) -> Callable[[], None]:
        """Copies the state after `step`. Returns what starts to write the copy. Waits for: the
        previous checkpoint, see `finish`."""
        self.finish()
        self.world.barrier()  # rank 0 deletes old checkpoints, which may take long
        now = time.monotonic()
        before = min(self.last_began, now)
        self.newest_started, self.last_began = step, now
        state = checkpoint.snapshot(model, optimizer, self.world, self.stager)
        fingerprint = checkpoint.fingerprint(model)
        return partial(self.thread.start, self._write, step, state, fingerprint, now, before)

    def _write(
        self, step: int, state: dict[str, Tensor], model: str, began: float, before: float
    ) -> None:
        """`began`, `before`: when this checkpoint and the previous one began."""
        path, fence = self.run_dir.checkpoint(step), partial(check_fence, self.lock)
        with spans.span("write_checkpoint", "saver", step):
            checkpoint.write(path, step, state, model, self.world, self.group, fence, self.base)
        self.since = time.monotonic()
        self.cost_s = self.since - began
        self.fraction = self.cost_s / max(began - before, self.cost_s)
        # set last, because it tells `due` that the values above belong to this checkpoint
        self.step = step
        if self.world.is_main:
            # a replay of a branch begins there
            self.retention.delete_old(step, {first_step(self.run_dir)})

    def metrics(self) -> dict[str, float]:
        """Returns the cost of the newest complete checkpoint; empty before the first one."""
        costs = {"time/checkpoint_cost": self.cost_s, "time/checkpoint_fraction": self.fraction}
        return costs if self.cost_s else {}

    def finish(self) -> None:
        """Waits until the checkpoint in progress is complete, and raises the thread's error.

        Waits for: the disks of this rank and all others. Raises RunError after `deadline_s`
        seconds.
        """
        self.thread.result(self._in_progress(), self.deadline_s)

    def _in_progress(self) -> str:
        return (
            f"checkpoint {self.newest_started} to be written to {self.run_dir.checkpoints}: does "
            "that disk answer?"
        )
