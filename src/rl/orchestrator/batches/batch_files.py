"""Files of batches and of what waits for one.

BatchFiles commits batches with the orchestrator's state after them, and keeps, compresses or
deletes old ones. PendingLog keeps groups that no batch has used yet in `batches/pending.log`,
finished or not, so that no finished rollout is lost if the orchestrator dies.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rl.config.orchestrator import OrchestratorConfig
from rl.orchestrator.batches.contents import batch_metrics, group_samples
from rl.orchestrator.batches.early_stop import RewardHistory
from rl.orchestrator.groups.group_credit import Rules, normalise
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir import spans
from rl.run_dir.files import UNREADABLE, CorruptFileError, TakenError, append_file, write_file
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import NEWEST_BYTES, MetricsLog, read_metrics
from rl.run_dir.paths import Retention, RunDir, first_step, numbers
from rl.system.errors import RunError
from rl.wire.batch_file import (
    PLAIN_STEPS,
    ROLLOUT_SUFFIXES,
    compress_rollouts,
    decode_batch,
    remove_rollouts,
    sound_batch,
    write_batch,
    write_rollouts,
)
from rl.wire.messages import TrainBatch
from rl.wire.rollouts import Drawn, Group, Rollout, TaskRef, encoded, read_records, rollout_lines

log = logging.getLogger(__name__)


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The orchestrator's state after a batch, stored with the batch in its file."""

    tasks: TaskState
    settled: list[int] = []
    """Groups that this batch trained or dropped; after a crash they may still be in pending.log."""
    history: RewardHistory = msgspec.field(default_factory=RewardHistory)
    pending: list[TaskRef] = []
    """Groups waiting for a later batch, already counted in `history` and the solve rates. Played
    again if pending.log lost them."""
    metrics: dict[str, float] = {}
    """The batch's line of metrics.jsonl, which would be lost if the process died right after the
    commit."""


def decode_state(raw: msgspec.Raw) -> OrchestratorState:
    """Decodes the state in a batch file. Raises CorruptFileError if another version of rl wrote
    another schema."""
    try:
        return msgspec.msgpack.decode(raw, type=OrchestratorState)
    except UNREADABLE as error:
        raise CorruptFileError(
            "the orchestrator's state in the newest batch was written by another version of "
            f"rl: {error}"
        ) from None


def state_after(run_dir: RunDir, step: int) -> OrchestratorState:
    """Returns the state after a batch. Raises CorruptFileError for a damaged batch file,
    RunError for an intact one written by another version of rl."""
    data = sound_batch(path := run_dir.batch(step))
    try:
        return decode_state(decode_batch(data, str(path)).state)
    except CorruptFileError as error:
        raise RunError(
            f"{error}. Continue with the version of rl that wrote it, or start another run"
        ) from None


def commit(
    run_dir: RunDir, batch: TrainBatch, lines: bytes, state: Any, fence: Callable[[], None]
) -> None:
    """Writes the rollouts, then the batch with the state after it. Renaming the batch file to its
    final name is the commit.

    Raises RunError if the batch exists already, or if this process has lost its role (`fence`).
    """
    path = run_dir.batch(batch.step)
    if path.exists():
        fence()
        raise TakenError(path)  # before rollouts are overwritten
    write_rollouts(run_dir.rollouts(batch.step), lines, fence)
    write_batch(path, batch, state, fence)


class BatchFiles:
    """The files of a run's batches and rollouts. Lists the checkpoints at each commit, but
    neither batches nor rollouts, of which a run has as many as steps."""

    def __init__(self, run_dir: RunDir, settings: OrchestratorConfig, rules: Mapping[str, Rules]):
        self.run_dir, self.rules, self.mask_truncated = run_dir, rules, settings.mask_truncated
        self.fence = partial(check_fence, run_dir.lock("orchestrator"))
        self.metrics = MetricsLog(run_dir.metrics, "orchestrator", self.fence)
        batches, rollouts = settings.batches, settings.rollouts
        self.batches = Retention(
            run_dir.batches, (".batch",), batches.keep_last, batches.keep_every
        )
        self.rollouts = Retention(
            run_dir.rollouts_dir, ROLLOUT_SUFFIXES, rollouts.keep_last, rollouts.keep_every
        )
        self.first = first_step(run_dir)

    def newest(self) -> tuple[int, OrchestratorState | None]:
        """Returns the newest batch's number and the state after it. Deletes the rollouts of a
        batch that was never committed, and writes a line of metrics that is missing."""
        newest = self.run_dir.newest_batch()
        remove_rollouts(self.run_dir, after=newest)
        if not newest:
            return 0, None
        state = state_after(self.run_dir, newest)
        # a branch begins with a batch of another run
        if newest > self.first:
            lines = read_metrics(self.run_dir.metrics, last_bytes=NEWEST_BYTES)
            if (newest, "orchestrator") not in lines:
                self.metrics.write(newest, state.metrics)
        return newest, state

    def commit(
        self, step: int, settled: list[Group], state: OrchestratorState, counts: Mapping[str, float]
    ) -> None:
        """Commits the batch of the groups that are trained, with its metrics and `counts` in the
        state, and the rollouts of all groups.

        Advantages become final here. A large batch takes seconds. Raises RunError if the batch
        exists already, or if another process has taken over the role.
        """
        used = [group for group in settled if group.why is None]
        with spans.span("commit", "batches", step):
            normalise(used, self.rules)
            samples = [
                sample for group in used for sample in group_samples(group, self.mask_truncated)
            ]
            state.settled = sorted(group.group_id for group in settled)
            state.metrics = batch_metrics(step, settled, self.mask_truncated, self.rules) | {
                **counts
            }
            batch = TrainBatch(step=step, samples=samples)
            lines = rollout_lines(settled, step, self.mask_truncated)
            commit(self.run_dir, batch, lines, state, self.fence)

    def put_away(self, step: int) -> None:
        """Deletes the batches and rollouts that the settings do not keep, and compresses old
        rollouts. Batches that a resume from any checkpoint needs are kept.

        step: the batch that was just committed.
        """
        if self.batches.keep_last is not None:
            checkpoints = numbers(self.run_dir.checkpoints)
            # a branch keeps the checkpoint that it begins with
            later = [number for number in checkpoints if number != self.first]
            self.batches.delete_old(step, needed_from=min(later or checkpoints, default=0))
        self.rollouts.delete_old(step)
        # the one before, too: a process may have died between its commit and its compression
        for old in (step - PLAIN_STEPS - 1, step - PLAIN_STEPS):
            try:
                compress_rollouts(self.run_dir.rollouts(old))
            except FileNotFoundError:
                pass  # it is compressed already, or the settings do not keep it
            except (CorruptFileError, OSError) as error:
                log.warning("the rollouts of step %d are not compressed: %s", old, error)


class PendingLog:
    """Groups in the order in which they finished, and unfinished ones with finished episodes.
    Each record is complete or absent."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []
        self.unfinished: dict[int, Group] = {}
        """By group id."""
        self.drawn: list[Drawn] = []
        """Tasks drawn since the newest batch."""

    def load(self, settled: set[int], newest: int) -> list[str]:
        """Reads the records that no batch has settled, except damaged ones and episodes sampled
        by versions after `newest`.

        newest: the newest batch; later versions no longer exist if the run was rolled back. Returns
        a warning for each omission.
        """
        records, warnings = read_records(self.path)
        self.groups, self.unfinished, num_begun_again = [], {}, 0
        self.drawn = [record for record in records if isinstance(record, Drawn)]
        for group in records:
            if isinstance(group, Group) and group.group_id not in settled:
                rollouts = episodes_where(
                    group.rollouts, lambda rollout: max(rollout.versions, default=0) <= newest
                )
                if len(rollouts) < len(group.rollouts):
                    num_begun_again += group.finished
                    group.finished, group.rollouts = False, rollouts
                self._take(group)
        self.groups = list({group.group_id: group for group in self.groups}.values())
        if num_begun_again:
            warnings.append(
                f"{num_begun_again} finished groups are played on: versions after {newest}, which "
                "were rolled back, sampled some of their episodes"
            )
        self.rewrite()
        return warnings

    def append(self, records: Iterable[Group | Drawn]) -> None:
        """Appends groups, or further episodes of them, and drawn tasks durably."""
        append_file(self.path, encoded(records))
        for record in records:
            if isinstance(record, Drawn):
                self.drawn.append(record)
            else:
                self._take(record)

    def _take(self, group: Group) -> None:
        """Adds a group, or episodes of one, of which the newest attempt counts."""
        before = self.unfinished.pop(group.group_id, None)
        if group.finished:
            self.groups.append(group)
            return
        if before:
            new = {rollout.episode for rollout in group.rollouts}
            kept = episodes_where(before.rollouts, lambda rollout: rollout.episode not in new)
            group = msgspec.structs.replace(group, rollouts=[*kept, *group.rollouts])
        self.unfinished[group.group_id] = group

    def rewrite(self) -> None:
        """Rewrites the log, after a batch has settled the other groups."""
        write_file(self.path, encoded([*self.groups, *self.unfinished.values(), *self.drawn]))


def episodes_where(rollouts: list[Rollout], holds: Callable[[Rollout], bool]) -> list[Rollout]:
    """Returns the rollouts of the episodes for all of whose rollouts `holds`."""
    others = {rollout.episode for rollout in rollouts if not holds(rollout)}
    return [rollout for rollout in rollouts if rollout.episode not in others]
