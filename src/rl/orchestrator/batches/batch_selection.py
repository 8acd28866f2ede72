"""Chooses the next batch from finished groups, and writes it. Everything but the writing is
pure."""

import math
from collections.abc import Iterable
from functools import partial

import msgspec

from rl.orchestrator.batches.early_stop import RewardHistory
from rl.orchestrator.batches.samples import group_samples
from rl.orchestrator.tasks.task_source import TaskState
from rl.run_dir.files import UNREADABLE, CorruptFileError, TakenError
from rl.run_dir.lease import check_fence
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from rl.wire.batch_file import (
    ENCODER,
    EncodedBatch,
    decode_batch,
    sound_batch,
    write_batch,
    write_rollouts,
)
from rl.wire.rollouts import Group, TaskRef


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The orchestrator's state after a batch, stored with the batch in its file."""

    tasks: TaskState
    settled: list[int]
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


def choose(
    finished: list[Group],
    batch_size: int,
    num_playing: int,
    max_refill: int,
    before: float = math.inf,
) -> list[Group] | None:
    """Returns the groups of the next batch, oldest first: `batch_size` episodes, rounded up to
    whole groups; None if there are not enough.

    A short batch is returned once `max_refill` batches' worth were played for it, but not while
    groups are still playing: they would age by a version. `before`: only groups with a lower id are
    used.
    """
    usable = sorted(
        (group for group in finished if group.why is None and group.group_id < before),
        key=lambda group: group.group_id,
    )
    count = 0
    for i, group in enumerate(usable):
        count += group.num_episodes
        if count >= batch_size:
            return usable[: i + 1]
    played = sum(group.num_episodes for group in finished if group.why != "surplus")
    return usable if usable and not num_playing and played >= max_refill * batch_size else None


def encoded_samples(used: Iterable[Group], mask_truncated: bool) -> list[msgspec.Raw]:
    """Returns the samples of a batch's groups, each encoded as soon as it is made: as lists all
    of them would take several times the memory of their groups, and stall the process while the
    garbage collector walks through them."""
    return [
        msgspec.Raw(ENCODER.encode(sample))
        for group in used
        for sample in group_samples(group, mask_truncated)
    ]


def commit(run_dir: RunDir, batch: EncodedBatch, lines: bytes, state: OrchestratorState) -> None:
    """Writes the rollouts, then the batch with the state after it. Renaming the batch file to its
    final name is the commit.

    lines: those of rollouts/*.jsonl, one for every rollout, trained or not. Raises RunError if the
    batch exists already, or if another process has taken over the role.
    """
    fence, path = partial(check_fence, run_dir.lock("orchestrator")), run_dir.batch(batch.step)
    if path.exists():
        fence()
        raise TakenError(path)  # before rollouts are overwritten
    write_rollouts(run_dir.rollouts(batch.step), lines, fence)
    write_batch(path, batch, state, fence)
