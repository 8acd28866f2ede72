"""From finished groups to the next batch: which groups, what is written, which numbers (all but the writing is pure)."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rl.batch_log import write_batch, write_rollouts
from rl.files import CorruptFileError
from rl.messages import TrainBatch
from rl.orchestrator.admission import MAX_REFILL
from rl.orchestrator.config import EnvConfig, OrchestratorConfig
from rl.orchestrator.credit import group_advantages, has_group_baseline, length_penalties, mean, over_batch, reinforce_pp
from rl.orchestrator.credit_config import CreditSettings, DrGrpoConfig, ReinforcePlusPlusConfig
from rl.orchestrator.rollouts import Group, Rollout
from rl.orchestrator.samples import group_samples, is_trained, merge_turns
from rl.orchestrator.signal import Signal
from rl.orchestrator.tasks import TaskRef, TaskState
from rl.run_dir import RunDir

MAX_SILENT = 10
"""So many batches' worth of groups without any signal end the run."""


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The orchestrator after a batch: what stands beside the batch in its file."""

    tasks: TaskState
    settled: list[int]
    """Groups that this batch trained or dropped; they may still stand in pending.log after a crash."""
    signal: Signal = msgspec.field(default_factory=Signal)
    pending: list[TaskRef] = []
    """Groups that wait for a later batch: counted in `signal` and in the solve rates already. Played again if pending.log has lost them."""
    metrics: dict[str, float] = {}
    """The batch's line of metrics.jsonl, which a death right after the commit would cost."""


@dataclass(frozen=True)
class Rules:
    """How the groups of an environment are judged."""

    credit: CreditSettings = field(default_factory=DrGrpoConfig)
    taught: bool = False
    """A teacher scores the tokens: there is something to learn whatever the rewards are."""
    keep_partial: bool = False
    replace_no_signal: bool = True
    mask_truncated: bool = False


def rules_of(settings: OrchestratorConfig, env: EnvConfig, taught: bool) -> Rules:
    """What is configured for an environment."""
    return Rules(
        credit=env.credit or settings.credit,
        taught=taught,
        keep_partial=settings.keep_partial_groups,
        replace_no_signal=settings.replace_no_signal,
        mask_truncated=settings.mask_truncated,
    )


def decode_state(raw: msgspec.Raw) -> OrchestratorState:
    """The state of a batch file. Raises CorruptFileError if an older version of rl wrote another shape."""
    try:
        return msgspec.msgpack.decode(raw, type=OrchestratorState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFileError(f"the orchestrator's state in the newest batch is not of this version of rl: {error}") from None


def judge(group: Group, rules: Rules) -> Group:
    """Gives a finished group its advantages, and the reason if it is not to be trained.

    A group with a failed member trains none of it, unless `keep_partial`: what is left is biased, for failing may depend on the answer.
    """
    rollouts = group.rollouts
    whole = [rollout for rollout in rollouts if not rollout.error]
    group.advantages, group.penalties = [0.0] * len(rollouts), [0.0] * len(rollouts)
    group.why, group.signal = None, False
    if len(whole) < len(rollouts) and not (rules.keep_partial and len({rollout.episode for rollout in whole}) > 1):
        group.why = "error"
        return group
    for own in compared(group).values():
        rewards, lengths = [rollouts[i].reward for i in own], [rollouts[i].num_tokens for i in own]
        penalties = length_penalties(rewards, lengths, rules.credit.length_penalty)
        left = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        for i, penalty, advantage in zip(own, penalties, group_advantages(left, rules.credit), strict=True):
            group.penalties[i], group.advantages[i] = penalty, advantage
    group.signal = rules.taught or any(group.advantages) or (False if has_group_baseline(rules.credit) else None)
    trainable = [rollout for rollout in whole if rollout.trainable]
    if not any(rollout.num_tokens for rollout in trainable):
        group.why = "overlong" if any(rollout.overlong for rollout in trainable) else "empty"
    elif not any(rollout.num_tokens for rollout in trainable if is_trained(rollout, rules.mask_truncated)):
        group.why = "truncated"
    elif rules.replace_no_signal and group.signal is False:
        group.why = "no_signal"
    return group


def compared(group: Group) -> dict[str, list[int]]:
    """Places of the rollouts that are compared with each other: the parts that one agent played, but for failed and untrained ones."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, rollout in enumerate(group.rollouts):
        if rollout.trainable and not rollout.error:
            places[rollout.agent].append(i)
    return places


def normalise(used: list[Group], rules: Mapping[str, Rules]) -> None:
    """Final advantages for the groups of a batch, where their credit is over the batch: each environment and agent for itself."""
    members: dict[tuple[str, str], list[tuple[Group, list[int]]]] = defaultdict(list)
    for group in used:
        if over_batch(rules[group.env].credit):
            for agent, own in compared(group).items():
                members[group.env, agent].append((group, own))
    for (env, _), parts in members.items():
        credit = rules[env].credit
        assert isinstance(credit, ReinforcePlusPlusConfig)
        rewards = [[group.rollouts[i].reward - group.penalties[i] for i in own] for group, own in parts]
        for (group, own), advantages in zip(parts, reinforce_pp(rewards, credit.group_baseline), strict=True):
            for i, advantage in zip(own, advantages, strict=True):
                group.advantages[i] = advantage


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


def form(step: int, used: list[Group], dropped: list[Group], rules: Mapping[str, Rules]) -> tuple[TrainBatch, bytes]:
    """The batch, and the lines that say what became of every rollout. Advantages become final here."""
    normalise(used, rules)
    everything = [(group, rules[group.env].mask_truncated) for group in [*used, *dropped]]
    lines = [rollout_line(group, i, step, masked) for group, masked in everything for i in range(len(group.rollouts))]
    samples = [sample for group in used for sample in group_samples(group, rules[group.env].mask_truncated)]
    return TrainBatch(step=step, samples=samples), b"\n".join([*map(msgspec.json.encode, lines), b""])


def commit(run_dir: RunDir, batch: TrainBatch, rollouts: bytes, state: OrchestratorState) -> None:
    """Writes the rollouts, then the batch with the state after it: its rename is the commit."""
    write_rollouts(run_dir.rollouts(batch.step), rollouts)
    write_batch(run_dir.batch(batch.step), batch, state)


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
        "rollouts/replaced_groups": sum(group.why == "no_signal" for group in groups),
        **outcome_shares(everything),
        **environment_metrics(groups),
        **teacher_metrics(batch),
    }


def teacher_metrics(batch: TrainBatch) -> dict[str, float]:
    """Mean of log sampler - log teacher over the sampled tokens: an unbiased estimate of KL(sampler || teacher) a token, nats."""
    gaps: dict[str, list[float]] = defaultdict(list)
    for sample in batch.samples:
        if sample.teacher_logprobs is not None:
            tokens = zip(sample.loss_mask, sample.logprobs, sample.teacher_logprobs, strict=True)
            gaps[sample.env] += [logprob - teacher for sampled, logprob, teacher in tokens if sampled]
    by_env = {f"teacher_kl/{env}/mean": mean(values) for env, values in sorted(gaps.items())}
    return {"teacher_kl/mean": mean([gap for values in gaps.values() for gap in values]), **by_env} if gaps else {}


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
        own = [group for group in groups if group.env == env]
        if penalty := sum(sum(group.penalties) for group in own):
            metrics[f"reward/{env}/length_penalty"] = penalty / sum(len(group.rewards) for group in own)
        if replaced := sum(group.why == "no_signal" for group in own):
            metrics[f"rollouts/{env}/replaced_groups"] = replaced
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
