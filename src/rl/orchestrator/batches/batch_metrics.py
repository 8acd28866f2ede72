"""The metrics of a batch, under their names in metrics.jsonl. Pure."""

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable

from rl.orchestrator.batches.samples import is_trained, join_spans
from rl.orchestrator.groups.credit import mean
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import unpack_logprobs

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
    used = [
        (group.env, rollout) for group in groups if group.why is None for rollout in group.rollouts
    ]
    trained = [(env, rollout) for env, rollout in used if is_trained(rollout, mask_truncated)]
    lags = Counter[int]()
    for answer in (answer for _, rollout in trained for answer in rollout.turns.answers):
        for span in join_spans(answer.policy_versions):
            if span.policy_version >= 0:  # known
                lags[step - 1 - span.policy_version] += span.num_tokens
    return {
        "reward/mean": mean([rollout.reward for rollout in finished if rollout.trainable]),
        "lag/mean": sum(lag * count for lag, count in lags.items()) / max(1, lags.total()),
        "lag/max": max(lags, default=0),
        "rollouts/finished": sum(len(group.rollouts) for group in groups),
        "rollouts/trained": len(trained),
        "rollouts/length_mean": mean([rollout.num_tokens for rollout in finished]),
        "rollouts/turns_mean": mean([len(rollout.turns) for rollout in finished]),
        "rollouts/zero_advantage": mean(
            [float(without_signal(group)) for group in told for _ in group.rollouts]
        ),
        "rollouts/replaced_groups": sum(group.why == "no_signal" for group in told),
        **outcome_shares(everything),
        **environment_counts(Counter(env for env, _ in trained), groups, envs),
        **environment_metrics(told),
        **teacher_metrics(trained),
        **route_metrics([rollout for _, rollout in trained]),
    }


def route_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns the size of the routes, with trainer.router_replay = engine."""
    chains = [chain for rollout in rollouts for chain in rollout.turns.chains]
    size = sum(len(chain.routes) for chain in chains)
    tokens = sum(chain.num_tokens - 1 for chain in chains)
    return {"rollouts/route_bytes": size / tokens} if size else {}


def teacher_metrics(trained: Iterable[tuple[str, Rollout]]) -> dict[str, float]:
    """Returns the mean of log p(sampler) - log p(teacher) over the sampled tokens of
    (environment, rollout): an unbiased estimate of KL(sampler || teacher) per token, nats."""
    gaps: dict[str, array[float]] = defaultdict(lambda: array("d"))
    for env, answer in (
        (env, answer)
        for env, rollout in trained
        for answers in rollout.turns.by_chain()
        for answer in answers
    ):
        if answer.teacher_logprobs:
            pairs = zip(
                unpack_logprobs(answer.logprobs),
                unpack_logprobs(answer.teacher_logprobs),
                strict=True,
            )
            gaps[env].extend(logprob - teacher for logprob, teacher in pairs)
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
    return {
        "rollouts/truncated": mean(
            [float(rollout.truncated) for rollout in rollouts if not rollout.error]
        ),
        **{
            f"rollouts/{name}": outcomes[name] / max(1, len(rollouts))
            for name in ("overlong", "empty", "timeout")
        },
        "rollouts/errored": mean([float(rollout.error is not None) for rollout in rollouts]),
        "rollouts/filtered": mean([float(rollout.filtered) for rollout in rollouts]),
        "rollouts/retried": mean([float(rollout.retries > 0) for rollout in rollouts]),
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


def environment_counts(
    trained: Counter[str], groups: list[Group], envs: Iterable[str]
) -> dict[str, float]:
    """Returns how many rollouts of each environment were settled and trained, including zeros."""
    finished = Counter(dict.fromkeys(envs, 0))
    for group in groups:
        finished[group.env] += len(group.rollouts)
    pairs = {f"rollouts/{env}": (count, trained[env]) for env, count in sorted(finished.items())}
    return {
        f"{env}/{name}": count
        for env, both in pairs.items()
        for name, count in zip(("finished", "trained"), both, strict=True)
    }


def environment_metrics(groups: list[Group]) -> dict[str, float]:
    """Returns each environment's rewards, its own metrics, its share of the rollouts, and its
    failures by cause."""
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for group in groups:
        by_env[group.env].extend(group.rollouts)
    everything = sum(map(len, by_env.values()))
    metrics: dict[str, float] = {}
    for env, rollouts in sorted(by_env.items()):
        finished = [rollout for rollout in rollouts if not rollout.error]
        if finished:
            metrics[f"reward/{env}/mean"] = mean(
                [rollout.reward for rollout in finished if rollout.trainable]
            )
        of_env = [group for group in groups if group.env == env]
        if penalty := sum(sum(group.penalties) for group in of_env):
            metrics[f"reward/{env}/length_penalty"] = penalty / sum(
                len(group.rewards) for group in of_env
            )
        if replaced := sum(group.why == "no_signal" for group in of_env):
            metrics[f"rollouts/{env}/replaced_groups"] = replaced
        if filtered := sum(rollout.filtered for rollout in rollouts):
            metrics[f"rollouts/{env}/filtered"] = filtered / len(rollouts)
        metrics |= {
            f"reward/{env}/{name}": mean(values) for name, values in metric_values(finished).items()
        }
        agents = sorted({rollout.agent for rollout in finished})
        for agent in agents if len(agents) > 1 else ():
            metrics[f"reward/{env}/agent_{agent}"] = mean(
                [rollout.reward for rollout in finished if rollout.agent == agent]
            )
        if len(by_env) > 1:
            metrics[f"rollouts/{env}/share"] = len(rollouts) / everything
        causes = Counter(rollout.cause for rollout in rollouts if rollout.cause)
        metrics |= {
            f"rollouts/{env}/failed_{cause}": count for cause, count in sorted(causes.items())
        }
    return metrics
