"""From finished groups to the next batch: which groups, what is written, which numbers (all but the writing is pure)."""

from collections import Counter, defaultdict
from typing import Any

import msgspec

from rl.batch_log import write_batch
from rl.files import CorruptFileError, write_file
from rl.messages import TrainBatch
from rl.orchestrator.admission import MAX_REFILL
from rl.orchestrator.advantage import group_mean
from rl.orchestrator.rollouts import Group, Rollout
from rl.orchestrator.samples import group_samples, merge_turns
from rl.orchestrator.signal import Signal
from rl.orchestrator.tasks import TaskState
from rl.run_dir import RunDir

MAX_SILENT = 10
"""So many batches' worth of groups without any signal end the run."""


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The orchestrator after a batch: what stands beside the batch in its file."""

    tasks: TaskState
    settled: list[int]
    """Groups that this batch trained or dropped; they may still stand in pending.log after a crash."""
    signal: Signal = msgspec.field(default_factory=Signal)


def decode_state(raw: msgspec.Raw) -> OrchestratorState:
    """The state of a batch file. Raises CorruptFileError if an older version of rl wrote another shape."""
    try:
        return msgspec.msgpack.decode(raw, type=OrchestratorState)
    except msgspec.DecodeError as error:
        raise CorruptFileError(f"the orchestrator's state in the newest batch is not of this version of rl: {error}") from None


def judge(group: Group, keep_partial: bool = False, replace_no_signal: bool = True) -> Group:
    """Gives a finished group its advantages, and the reason if it is not to be trained.

    A group with a failed member trains none of it, unless `keep_partial`: what is left is biased, for failing may depend on the answer.
    The parts that one agent played in a group's episodes are compared with each other, not with those of other agents.
    """
    rollouts = group.rollouts
    whole = [rollout for rollout in rollouts if not rollout.error]
    group.advantages = [0.0] * len(rollouts)
    if len(whole) < len(rollouts) and not (keep_partial and len({rollout.episode for rollout in whole}) > 1):
        group.why = "error"
        return group
    for agent in {rollout.agent for rollout in whole if rollout.trainable}:
        own = [i for i, rollout in enumerate(rollouts) if rollout.agent == agent and rollout.trainable and not rollout.error]
        for i, advantage in zip(own, group_mean([rollouts[i].reward for i in own]), strict=True):
            group.advantages[i] = advantage
    trainable = [rollout for rollout in whole if rollout.trainable]
    if not any(rollout.num_tokens for rollout in trainable):
        group.why = "overlong" if any(rollout.overlong for rollout in trainable) else "empty"
    elif replace_no_signal and not any(group.advantages):
        group.why = "no_signal"
    return group


def choose(finished: list[Group], batch_size: int, num_playing: int) -> list[Group] | None:
    """The groups of the next batch, oldest first, `batch_size` episodes or a part of a group more; None while there are not enough.

    Short once MAX_REFILL batches' worth were played for it, but not while groups are playing: they would age by a version.
    """
    usable = sorted((group for group in finished if group.why is None), key=lambda group: group.group_id)
    count = 0
    for i, group in enumerate(usable):
        count += group.num_episodes
        if count >= batch_size:
            return usable[: i + 1]
    played = sum(group.num_episodes for group in finished)
    return usable if usable and not num_playing and played >= MAX_REFILL * batch_size else None


def commit(
    run_dir: RunDir, step: int, used: list[Group], dropped: list[Group], state: OrchestratorState, mask_truncated: bool
) -> TrainBatch:
    """Writes the rollouts, then the batch with the state after it: its rename is the commit."""
    lines = [rollout_line(group, i, step, mask_truncated) for group in [*used, *dropped] for i in range(len(group.rollouts))]
    write_file(run_dir.rollouts(step), b"\n".join([*map(msgspec.json.encode, lines), b""]))
    batch = TrainBatch(step=step, samples=[sample for group in used for sample in group_samples(group, mask_truncated)])
    write_batch(run_dir.batch(step), batch, state)
    return batch


def why_not_trained(group: Group, rollout: Rollout, mask_truncated: bool) -> str | None:
    """Why a rollout is not in its batch; None if it is. Its own reason, if it has one, goes before its group's."""
    if rollout.error:
        return rollout.cause or "environment"
    if group.why:
        return group.why
    if not rollout.trainable:
        return "not_trainable"
    if not rollout.num_tokens:
        return "overlong" if rollout.overlong else "empty"
    return "truncated" if rollout.truncated and mask_truncated else None


def rollout_line(group: Group, i: int, step: int, mask_truncated: bool = False) -> dict[str, Any]:
    """One line of rollouts/*.jsonl."""
    rollout = group.rollouts[i]
    why = why_not_trained(group, rollout, mask_truncated)
    return {
        "step": step,
        "env": group.env,
        "task": group.task,
        "group_id": group.group_id,
        "rollout_id": i,
        "episode": rollout.episode,
        "advantage": group.advantages[i] if group.advantages else 0.0,
        "retries": rollout.retries,
        "trained": why is None,
        "why": why,
        **rollout.in_words(),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def batch_metrics(batch: TrainBatch, groups: list[Group]) -> dict[str, float]:
    """Numbers of a step: rewards over every finished rollout, trained or not; lag over the trained tokens."""
    everything = [rollout for group in groups for rollout in group.rollouts]
    finished = [rollout for rollout in everything if not rollout.error]
    lags = Counter[int]()
    for sample in batch.samples:
        for span in sample.policy_versions:
            lags[batch.step - 1 - span.policy_version] += span.num_tokens
    return {
        "reward/mean": mean([rollout.reward for rollout in finished if rollout.trainable]),
        "lag/mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
        "lag/max": max(lags, default=0),
        "rollouts/finished": len(everything),
        "rollouts/trained": len({(sample.group_id, sample.rollout_id) for sample in batch.samples}),
        "rollouts/length_mean": mean([rollout.num_tokens for rollout in finished]),
        "rollouts/turns_mean": mean([len(rollout.turns) for rollout in finished]),
        "rollouts/zero_advantage": mean([float(without_signal(group)) for group in groups for _ in group.rollouts]),
        **outcome_shares(everything),
        **environment_metrics(groups),
    }


def without_signal(group: Group) -> bool:
    return group.why == "no_signal" or (group.why is None and not any(group.advantages))


def outcome_shares(rollouts: list[Rollout]) -> dict[str, float]:
    """What became of the rollouts, as shares of all; and of the turns that followed another, how many started a new sample."""
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    followers = sum(max(0, len(rollout.turns) - 1) for rollout in rollouts)
    cuts = sum(len(merge_turns(rollout.turns)) - 1 for rollout in rollouts if len(rollout.turns) > 1)
    return {
        "rollouts/truncated": mean([float(rollout.truncated) for rollout in rollouts if not rollout.error]),
        "rollouts/overlong": outcomes["overlong"] / max(1, len(rollouts)),
        "rollouts/empty": outcomes["empty"] / max(1, len(rollouts)),
        "rollouts/timeout": outcomes["timeout"] / max(1, len(rollouts)),
        "rollouts/errored": sum(rollout.error is not None for rollout in rollouts) / max(1, len(rollouts)),
        "rollouts/retried": mean([float(rollout.retries > 0) for rollout in rollouts]),
        "rollouts/unmerged_turns": cuts / max(1, followers),
    }


def environment_metrics(groups: list[Group]) -> dict[str, float]:
    """Each environment's rewards, its own metrics, its share of the rollouts, and its failures by cause."""
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for group in groups:
        by_env[group.env].extend(group.rollouts)
    everything = sum(map(len, by_env.values()))
    metrics: dict[str, float] = {}
    for env, rollouts in sorted(by_env.items()):
        finished = [rollout for rollout in rollouts if not rollout.error]
        if finished:
            metrics[f"reward/{env}/mean"] = mean([rollout.reward for rollout in finished if rollout.trainable])
        values: dict[str, list[float]] = defaultdict(list)
        for rollout in finished:
            for key, value in rollout.metrics.items():
                values[key].append(value)
        metrics |= {f"reward/{env}/{key}": mean(values[key]) for key in sorted(values)}
        for agent in sorted({rollout.agent for rollout in finished}) if len({rollout.agent for rollout in finished}) > 1 else []:
            metrics[f"reward/{env}/agent_{agent}"] = mean([rollout.reward for rollout in finished if rollout.agent == agent])
        if len(by_env) > 1:
            metrics[f"rollouts/{env}/share"] = len(rollouts) / everything
        causes = Counter(rollout.cause for rollout in rollouts if rollout.cause)
        metrics |= {f"rollouts/{env}/failed_{cause}": count for cause, count in sorted(causes.items())}
    return metrics
