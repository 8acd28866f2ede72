"""Keeps, compresses or deletes batches and rollouts once there are newer ones."""

import logging

from rl.config.orchestrator import OrchestratorConfig
from rl.run_dir.files import CorruptFileError
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.retention import Retention
from rl.wire.batch_file import PLAIN_STEPS, ROLLOUT_SUFFIXES, compress_rollouts

log = logging.getLogger(__name__)


class OldFiles:
    """Called after each commit. Lists the checkpoints, but neither batches nor rollouts, of
    which a run has as many as steps."""

    def __init__(self, run_dir: RunDir, config: OrchestratorConfig):
        self.run_dir, kept = run_dir, config.rollouts
        self.batches = Retention(
            run_dir.batches, (".batch",), config.batches.keep_last, config.batches.keep_every
        )
        self.rollouts = Retention(
            run_dir.rollouts_dir, ROLLOUT_SUFFIXES, kept.keep_last, kept.keep_every
        )
        self.first_step = first_step(run_dir)

    def put_away(self, step: int) -> None:
        """Deletes the batches and rollouts that the settings do not keep, and compresses old
        rollouts.

        Batches that a resume from any checkpoint needs are kept. `step`: the batch that was just
        committed.
        """
        if self.batches.keep_last is not None:
            self.batches.delete_old(step, needed_from=self._oldest_checkpoint())
        self.rollouts.delete_old(step)
        old = step - PLAIN_STEPS
        # the one before, too: a process may have died between its commit and its compression
        for number in (old - 1, old):
            self._compress(number)

    def _oldest_checkpoint(self) -> int:
        """Returns the step of the oldest checkpoint; 0 if there is none."""
        there = numbers(self.run_dir.checkpoints)
        # a branch keeps the checkpoint that it begins with
        others = [step for step in there if step != self.first_step]
        return min(others or there, default=0)

    def _compress(self, step: int) -> None:
        try:
            compress_rollouts(self.run_dir.rollouts(step))
        except FileNotFoundError:
            pass  # it is compressed already, or the settings do not keep it
        except (CorruptFileError, OSError) as error:
            log.warning("the rollouts of step %d are not compressed: %s", step, error)
