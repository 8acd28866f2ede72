"""What a batch has: flat training samples, made from the turns of rollouts, and metrics, under
their names in metrics.jsonl. Pure.

The ids of samples are those that were sent and sampled: nothing is tokenized again.
"""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from operator import sub

from rl.orchestrator.groups.credit import mean
from rl.wire.messages import KeptTokens, TrainedSpan, TrainingSample, VersionSpan
from rl.wire.rollouts import Group, Rollout, why_left_out, why_untrained
from rl.wire.turns import AnswerSpan, unpack_logprobs


def join_spans(spans: list[VersionSpan]) -> list[VersionSpan]:
    """Joins adjacent spans of the same version, and drops empty ones."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].policy_version == span.policy_version:
            joined[-1] = VersionSpan(span.policy_version, joined[-1].num_tokens + span.num_tokens)
        elif span.num_tokens:
            joined.append(span)
    return joined


def rollout_samples(group: Group, rollout_id: int) -> Iterator[TrainingSample]:
    """Yields one sample per chain of turns; every sampled token gets the rollout's advantage."""
    turns, advantage = group.rollouts[rollout_id].turns, group.advantages[rollout_id]
    for number, answers in enumerate(turns.by_chain()):
        spans = [span for answer in answers for span in spans_of(answer, advantage)]
        teacher = [
            answer.of_trained(answer.teacher_logprobs or bytes(len(answer.logprobs)))
            for answer in answers
        ]
        yield TrainingSample(
            packed_ids=turns.ids(number),
            spans=spans,
            packed_logprobs=b"".join(answer.of_trained(answer.logprobs) for answer in answers),
            packed_teacher=b"".join(teacher)
            if any(answer.teacher_logprobs for answer in answers)
            else None,
            kept=kept_tokens(answers),
            env=group.env,
            group_id=group.group_id,
            rollout_id=rollout_id,
            temperature=group.temperature,
            routes=turns.routes(number, max((span.end for span in spans), default=1) - 1) or None,
        )


def spans_of(answer: AnswerSpan, advantage: float) -> Iterator[TrainedSpan]:
    """Yields the spans of one version in an answer, without its untrained tokens."""
    untrained = [answer.start + index for index in answer.untrained]
    begin = answer.start
    for span in join_spans(answer.policy_versions):
        start, end = begin, begin + span.num_tokens
        for stop in [*(index for index in untrained if start <= index < end), end]:
            if start < stop:
                yield TrainedSpan(start, stop, span.policy_version, advantage)
            start = stop + 1
        begin = end


def kept_tokens(answers: list[AnswerSpan]) -> KeptTokens | None:
    """Returns the ids that were kept at the trained tokens of a chain; None for the whole
    vocabulary."""
    counts, ids = b"", b""
    for answer in answers:
        kept = answer.kept or KeptTokens(bytes(len(answer.logprobs)), b"")
        counts += answer.of_trained(kept.packed_counts)
        ids += kept.packed_ids
    return KeptTokens(counts, ids) if ids else None


def is_trained(rollout: Rollout, mask_truncated: bool) -> bool:
    """Whether a rollout is trained if its group is."""
    return why_left_out(rollout, mask_truncated) is None


def group_samples(group: Group, mask_truncated: bool = False) -> Iterator[TrainingSample]:
    """Yields the samples of a group one at a time."""
    for i, rollout in enumerate(group.rollouts):
        if is_trained(rollout, mask_truncated):
            yield from (sample for sample in rollout_samples(group, i) if sample.spans)


# Metrics ------------------------------------------------------------------------------------------


TAKEN = re.compile(
    r"mean|length_penalty|reward_mean(_stderr)?|length_mean|errored|truncated|(agent_|pass@|avg@).*"
)
"""Built-in names in the same namespaces of metrics.jsonl as the metrics of environments and
users."""


def batch_metrics(
    step: int, groups: list[Group], mask_truncated: bool = False, envs: Iterable[str] = ()
) -> dict[str, float]:
    """Returns the metrics of a step that settles `groups`: rewards over all finished rollouts,
    trained or not; lag over the trained tokens. `envs`: environments that are reported even if none
    of their rollouts has finished.

    Surplus groups are counted but left out of the means: they are biased towards fast groups, and
    may be of an older version.
    """
    told = [group for group in groups if group.why != "surplus"]
    everything = [rollout for group in told for rollout in group.rollouts]
    finished = [rollout for rollout in everything if not rollout.error]
    trained = [
        (group.env, rollout)
        for group in groups
        for rollout in group.rollouts
        if group.why is None and is_trained(rollout, mask_truncated)
    ]
    lags, finished_of, trained_of = Counter[int](), Counter(dict.fromkeys(envs, 0)), Counter[str]()
    for env, rollout in trained:
        trained_of[env] += 1
        for answer in rollout.turns.answers:
            for span in join_spans(answer.policy_versions):
                if span.policy_version >= 0:  # known
                    lags[step - 1 - span.policy_version] += span.num_tokens
    for group in groups:
        finished_of[group.env] += len(group.rollouts)
    return {
        "reward/mean": mean([rollout.reward for rollout in finished if rollout.trainable]),
        "lag/mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
        "lag/max": max(lags, default=0),
        "rollouts/finished": finished_of.total(),
        "rollouts/trained": len(trained),
        "rollouts/length_mean": mean([rollout.num_tokens for rollout in finished]),
        "rollouts/turns_mean": mean([len(rollout.turns) for rollout in finished]),
        "rollouts/zero_advantage": mean(
            [without_signal(group) for group in told for _ in group.rollouts]
        ),
        "rollouts/replaced_groups": sum(group.why == "no_signal" for group in told),
        **outcome_shares(everything),
        **{f"rollouts/{env}/finished": count for env, count in sorted(finished_of.items())},
        **{f"rollouts/{env}/trained": trained_of[env] for env in sorted(finished_of)},
        **environment_metrics(told),
        **teacher_metrics(trained),
        **route_metrics([rollout for _, rollout in trained]),
        **kept_metrics(group for group in groups if group.why in (None, "kept_overflow")),
    }


def token_metrics(groups: list[Group], mask_truncated: bool) -> dict[str, float]:
    """Returns the tokens of groups that are settled, and those of them that were sampled in vain,
    by the reason."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    dropped = Counter[str]()
    for group, rollout in pairs:
        why = why_untrained(group, rollout, mask_truncated)
        dropped[why or "kept_overflow"] += rollout.num_sampled if why else rollout.num_untrained
        dropped["retried"] += rollout.retried.get("sampled", 0)
    whys = {f"tokens/dropped_{why}": count for why, count in sorted(dropped.items()) if count}
    return usage_metrics("tokens", (rollout for _, rollout in pairs)) | whys


def usage_metrics(folder: str, rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Returns what inference did for rollouts, failed attempts included."""
    used = Counter[str](prefilled=0, cached=0, sampled=0)
    for rollout in rollouts:
        used.update(rollout.turns.usage)
        used.update(rollout.retried)
    return {f"{folder}/{name}": count for name, count in used.items()}


def route_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns the size of the routes, with trainer.router_replay = engine."""
    chains = [chain for rollout in rollouts for chain in rollout.turns.chains]
    size = sum(len(chain.routes) for chain in chains)
    tokens = sum(chain.num_tokens - 1 for chain in chains)
    return {"rollouts/route_bytes": size / tokens} if size else {}


def kept_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Returns how many tokens are not trained because too many ids were kept, and the mean number
    of ids at the others; nothing if sampling is not truncated."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    answers = [answer for rollout in rollouts for answer in rollout.turns.answers]
    if not (kept := [answer.kept for answer in answers if answer.kept]):
        return {}
    sizes = [size for sets in kept for size in sets.sizes if size]
    overflow = sum(rollout.num_untrained for rollout in rollouts)
    return {"tokens/kept_overflow": overflow, "tokens/kept_mean": mean(sizes)}


def teacher_metrics(trained: Iterable[tuple[str, Rollout]]) -> dict[str, float]:
    """Returns the mean of log p(sampler) - log p(teacher) over the sampled tokens of
    (environment, rollout): an unbiased estimate of KL(sampler || teacher) per token, nats."""
    gaps: dict[str, array[float]] = defaultdict(lambda: array("d"))
    for env, rollout in trained:
        for answers in rollout.turns.by_chain():
            for answer in answers:
                if answer.teacher_logprobs:
                    logprobs = unpack_logprobs(answer.logprobs)
                    teacher = unpack_logprobs(answer.teacher_logprobs)
                    gaps[env].extend(map(sub, logprobs, teacher))
    by_env = {f"teacher_kl/{env}/mean": mean(values) for env, values in sorted(gaps.items())}
    every = sum(gaps.values(), start=array("d"))
    return {"teacher_kl/mean": mean(every), **by_env} if gaps else {}


def without_signal(group: Group) -> bool:
    """Whether there is nothing to learn from a group although its rollouts are valid."""
    return group.why == "no_signal" or (group.why is None and not any(group.advantages))


def outcome_shares(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns outcomes as shares of all rollouts and, of the turns after a rollout's first, the
    share that started a new sample."""
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    followers = sum(max(0, len(rollout.turns) - 1) for rollout in rollouts)
    cuts = sum(len(rollout.turns.chains) - 1 for rollout in rollouts if len(rollout.turns) > 1)
    finished = [rollout for rollout in rollouts if not rollout.error]
    return {
        "rollouts/truncated": mean([rollout.truncated for rollout in finished]),
        **{
            f"rollouts/{name}": outcomes[name] / max(1, len(rollouts))
            for name in ("overlong", "empty", "timeout")
        },
        "rollouts/errored": mean([rollout.error is not None for rollout in rollouts]),
        "rollouts/filtered": mean([rollout.filtered for rollout in rollouts]),
        "rollouts/retried": mean([rollout.retries > 0 for rollout in rollouts]),
        "rollouts/unmerged_turns": cuts / max(1, followers),
    }


def own_name(name: str) -> str:
    """Returns the name under which an environment's metric is reported: prefixed if it would
    replace a built-in metric."""
    return f"own_{name}" if TAKEN.fullmatch(name) else name


def metric_values(rollouts: Iterable[Rollout]) -> dict[str, list[float]]:
    """Returns the values of each of the environment's own metrics, by `own_name`, over the
    rollouts that have it and did not fail."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in {} if rollout.error else rollout.metrics.items():
            values[own_name(name)].append(value)
    return dict(sorted(values.items()))


def environment_metrics(groups: list[Group]) -> dict[str, float]:
    """Returns each environment's rewards, its own metrics, its share of the rollouts, and its
    failures by cause."""
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_env[group.env].append(group)
    everything = sum(len(group.rollouts) for group in groups)
    metrics: dict[str, float] = {}
    for env, of_env in sorted(by_env.items()):
        rollouts = [rollout for group in of_env for rollout in group.rollouts]
        finished = [rollout for rollout in rollouts if not rollout.error]
        if finished:
            rewards = [rollout.reward for rollout in finished if rollout.trainable]
            metrics[f"reward/{env}/mean"] = mean(rewards)
        if penalty := sum(sum(group.penalties) for group in of_env):
            count = sum(len(group.rewards) for group in of_env)
            metrics[f"reward/{env}/length_penalty"] = penalty / count
        if replaced := sum(group.why == "no_signal" for group in of_env):
            metrics[f"rollouts/{env}/replaced_groups"] = replaced
        if filtered := sum(rollout.filtered for rollout in rollouts):
            metrics[f"rollouts/{env}/filtered"] = filtered / len(rollouts)
        for name, values in metric_values(finished).items():
            metrics[f"reward/{env}/{name}"] = mean(values)
        agents: dict[str, list[float]] = defaultdict(list)
        for rollout in finished:
            agents[rollout.agent].append(rollout.reward)
        for agent, rewards in sorted(agents.items()) if len(agents) > 1 else ():
            metrics[f"reward/{env}/agent_{agent}"] = mean(rewards)
        if len(by_env) > 1:
            metrics[f"rollouts/{env}/share"] = len(rollouts) / everything
        causes = Counter(rollout.cause for rollout in rollouts if rollout.cause)
        for cause, count in sorted(causes.items()):
            metrics[f"rollouts/{env}/failed_{cause}"] = count
    return metrics
