"""What becomes of batches and rollouts once newer ones are there: kept, compressed or deleted."""

import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from rl.config.orchestrator import OrchestratorConfig
from rl.run_dir.files import CorruptFileError
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.retention import Retention
from rl.wire.batch_file import PLAIN_STEPS, ROLLOUT_SUFFIXES, compress_rollouts

log = logging.getLogger(__name__)


class OldFiles:
    """Called after each commit. What it does depends neither on the number of steps nor on that of the files."""

    def __init__(self, run_dir: RunDir, config: OrchestratorConfig):
        self.run_dir, kept = run_dir, config.rollouts
        self.batches = Retention(run_dir.batches, (".batch",), config.batches.keep_last, config.batches.keep_every)
        self.rollouts = Retention(run_dir.rollouts_dir, ROLLOUT_SUFFIXES, kept.keep_last, kept.keep_every)
        self.first_step = first_step(run_dir)
        self.oldest_checkpoint = 0
        """The oldest one that was there at the last look; those that come are newer. 0: there was none, or the branch's first alone."""
        self.plain: deque[int] | None = None
        """Steps whose rollouts are not compressed, ascending; None: the directory was not listed yet."""
        self.thread = ThreadPoolExecutor(1, "compress")
        self.compressing: Future[None] | None = None

    def put_away(self, step: int) -> None:
        """Deletes the batches and rollouts that the settings do not keep, and begins to compress rollouts that are old.

        Of batches nothing goes that a resume from any checkpoint needs. `step`: of the batch that was just committed.
        """
        if self.batches.keep_last is not None:
            self.batches.delete_old(step, needed_from=self._oldest_checkpoint())
        self.rollouts.delete_old(step)
        if self.plain is None:
            self.plain = deque(numbers(self.run_dir.rollouts_dir, ".jsonl"))
        else:
            self.plain.append(step)
        if len(self.plain) > PLAIN_STEPS and (self.compressing is None or self.compressing.done()):
            count = min(2, len(self.plain) - PLAIN_STEPS)  # two: it catches up with the files of a run that an older rl began
            old = [self.plain.popleft() for _ in range(count)]
            self.compressing = self.thread.submit(self._compress, old)

    def _oldest_checkpoint(self) -> int:
        """The step of the oldest checkpoint, 0 without one. The directory is listed only when that one has gone."""
        if not (self.oldest_checkpoint and self.run_dir.checkpoint(self.oldest_checkpoint).exists()):
            there = numbers(self.run_dir.checkpoints)
            others = [step for step in there if step != self.first_step]  # a branch keeps the one that it begins with
            self.oldest_checkpoint = min(others, default=0)
            return min(others or there, default=0)
        return self.oldest_checkpoint

    def _compress(self, steps: list[int]) -> None:
        for step in steps:
            try:
                compress_rollouts(self.run_dir.rollouts(step))
            except FileNotFoundError:
                pass  # the settings do not keep it
            except (CorruptFileError, OSError) as error:
                log.warning("the rollouts of step %d stay as they are: %s", step, error)
