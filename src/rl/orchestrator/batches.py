"""From finished groups to the next batch: which groups, what is written, which numbers (all but the writing is pure)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from rl.batch_log import write_batch
from rl.files import CorruptFileError, write_file
from rl.messages import TrainBatch
from rl.orchestrator.advantage import group_mean
from rl.orchestrator.rollouts import Group, Rollout
from rl.orchestrator.samples import group_samples
from rl.orchestrator.tasks import TaskState
from rl.run_dir import RunDir

MAX_REFILL = 3
"""So many batches' worth of groups are played for one batch; then it is trained short."""
MAX_SILENT = 10
"""So many batches' worth of groups without any signal end the run."""


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The orchestrator after a batch: what stands beside the batch in its file."""

    tasks: TaskState
    settled: list[int]
    """Groups that this batch trained or dropped; they may still stand in pending.log after a crash."""
    silent_rewards: list[float] = []
    """Rewards since the last group with a signal."""
    reward_range: tuple[float, float] | None = None
    """Lowest and highest reward seen in the run."""


def decode_state(raw: msgspec.Raw) -> OrchestratorState:
    """The state of a batch file. Raises CorruptFileError if an older version of rl wrote another shape."""
    try:
        return msgspec.msgpack.decode(raw, type=OrchestratorState)
    except msgspec.DecodeError as error:
        raise CorruptFileError(f"the orchestrator's state in the newest batch is not of this version of rl: {error}") from None


def judge(group: Group) -> Group:
    """Gives a finished group its advantages, and the reason if it is not to be trained. A group with a failed member trains none of it:
    its mean would be biased."""
    if any(rollout.error for rollout in group.rollouts):
        group.why = "error"
        group.advantages = [0.0] * len(group.rollouts)
        return group
    group.advantages = group_mean([rollout.reward for rollout in group.rollouts])
    if not any(rollout.num_tokens for rollout in group.rollouts):
        group.why = "empty"
    elif not any(group.advantages):
        group.why = "no_signal"
    return group


def choose(finished: list[Group], num_groups: int, num_playing: int) -> list[Group] | None:
    """The groups of the next batch, oldest first; None while it is not full.

    Short once MAX_REFILL batches' worth were played for it, but not while groups are playing: they would age by a version.
    """
    usable = sorted((group for group in finished if group.why is None), key=lambda group: group.group_id)
    if len(usable) >= num_groups:
        return usable[:num_groups]
    return usable if usable and not num_playing and len(finished) >= MAX_REFILL * num_groups else None


def room(finished: list[Group], num_groups: int, num_playing: int, batches_ahead: int) -> int:
    """How many groups may be started when `batches_ahead` batches may still be sampled: as many as they lack, and with their
    replacements at most MAX_REFILL times as many in all, unless there is not one to train on yet."""
    usable = sum(group.why is None for group in finished)
    lacking = batches_ahead * num_groups - usable - num_playing
    if not usable:
        return lacking
    return min(lacking, batches_ahead * MAX_REFILL * num_groups - len(finished) - num_playing)


def commit(run_dir: RunDir, step: int, used: list[Group], dropped: list[Group], state: OrchestratorState, temperature: float) -> TrainBatch:
    """Writes the rollouts, then the batch with the state after it: its rename is the commit."""
    lines = [rollout_line(group, i, step) for group in [*used, *dropped] for i in range(len(group.rollouts))]
    write_file(run_dir.rollouts(step), "".join(json.dumps(line) + "\n" for line in lines).encode())
    batch = TrainBatch(step=step, samples=[sample for group in used for sample in group_samples(group, temperature)])
    write_batch(run_dir.batch(step), batch, state)
    return batch


def rollout_line(group: Group, i: int, step: int) -> dict[str, Any]:
    """One line of rollouts/*.jsonl."""
    rollout = group.rollouts[i]
    return {
        "step": step,
        "env": group.env,
        "task": group.task,
        "group_id": group.group_id,
        "rollout_id": i,
        "messages": rollout.messages,
        "reward": rollout.reward,
        "metrics": rollout.metrics,
        "advantage": group.advantages[i] if group.advantages else 0.0,
        "stop": rollout.stop,
        "truncated": rollout.truncated,
        "num_tokens": rollout.num_tokens,
        "versions": sorted({span.policy_version for turn in rollout.turns for span in turn.policy_versions}),
        "trained": group.why is None and rollout.num_tokens > 0,
        "why": group.why if group.why or rollout.num_tokens else "empty",
        **({"error": rollout.error} if rollout.error else {}),
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def batch_metrics(batch: TrainBatch, groups: list[Group], group_size: int) -> dict[str, float]:
    """Numbers of a step: rewards over every finished rollout, trained or not; lag over the trained tokens."""
    played = [(group.env, rollout) for group in groups for rollout in group.rollouts if rollout.error is None]
    rollouts = [rollout for _, rollout in played]
    everything = sum(len(group.rollouts) for group in groups)
    lags = Counter[int]()
    for sample in batch.samples:
        for span in sample.policy_versions:
            lags[batch.step - 1 - span.policy_version] += span.num_tokens
    metrics = {
        "reward/mean": mean([rollout.reward for rollout in rollouts]),
        "lag/mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
        "lag/max": max(lags, default=0),
        "rollouts/finished": everything,
        "rollouts/trained": sum(len(group.rollouts) for group in groups if group.why is None),
        "rollouts/length_mean": mean([rollout.num_tokens for rollout in rollouts]),
        "rollouts/turns_mean": mean([len(rollout.turns) for rollout in rollouts]),
        "rollouts/truncated": mean([float(rollout.truncated) for rollout in rollouts]),
        "rollouts/errored": (everything - len(rollouts)) / max(1, everything),
        "rollouts/zero_advantage": sum(group.why == "no_signal" for group in groups) * group_size / max(1, everything),
    }
    for env in sorted({env for env, _ in played}):
        own = [rollout for name, rollout in played if name == env]
        metrics[f"reward/{env}/mean"] = mean([rollout.reward for rollout in own])
        for key in sorted({key for rollout in own for key in rollout.metrics}):
            metrics[f"reward/{env}/{key}"] = mean([rollout.metrics[key] for rollout in own if key in rollout.metrics])
    return metrics


def write_eval(path: Path, version: int, label: str, results: list[tuple[int, list[Rollout]]]) -> dict[str, float]:
    """Writes one evaluation's rollouts and returns its metrics. A failed rollout counts as reward 0 here, and is counted."""
    lines = []
    for task, rollouts in results:
        for i in range(len(rollouts)):
            line = rollout_line(Group(group_id=task, env=label, task=task, rollouts=rollouts), i, version)
            lines.append({key: line[key] for key in line if key not in ("step", "group_id", "advantage", "trained", "why")})
    write_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    rollouts = [rollout for _, group in results for rollout in group]
    metrics = {
        f"eval/{label}/reward_mean": mean([0.0 if rollout.error else rollout.reward for rollout in rollouts]),
        f"eval/{label}/length_mean": mean([rollout.num_tokens for rollout in rollouts]),
        f"eval/{label}/errored": mean([float(rollout.error is not None) for rollout in rollouts]),
    }
    samples = min(len(group) for _, group in results)
    if samples > 1:
        solved = [any(rollout.error is None and rollout.reward >= 1.0 for rollout in group) for _, group in results]
        metrics[f"eval/{label}/pass@{samples}"] = mean([float(one) for one in solved])
    return metrics
