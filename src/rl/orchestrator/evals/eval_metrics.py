"""Evaluation metrics: means, their standard errors, and the difference of two policies. Pure except
for `write_eval`.

Examples are the independent units: samples of the same example are correlated, so every standard
error here is over examples.
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rl.orchestrator.batches.contents import metric_values
from rl.run_dir.files import write_file
from rl.wire.rollouts import Rollout, at_least

RESAMPLES = 2000
"""Bootstrap resamples; enough for interval bounds that are accurate to about a twentieth of the
interval's width."""

Results = list[tuple[int, list[Rollout]]]
"""(task, its rollouts) for every example of an evaluation."""


class EpisodeScore(NamedTuple):
    """The score of one episode."""

    reward: float
    failed: bool

    @property
    def solved(self) -> bool:
        return not self.failed and at_least(self.reward, 1.0)


class Difference(NamedTuple):
    """Reward of one policy minus another's on the same examples, with a 95% confidence interval."""

    mean: float
    low: float
    high: float
    num_examples: int


def episodes(rollouts: Sequence[Rollout]) -> list[EpisodeScore]:
    """Returns the scores of one example's episodes. With several agents, an episode's reward is
    the mean over the trainable ones (over all if none is); a failed rollout counts as 0 and
    marks the episode as failed."""
    by_episode: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_episode[rollout.episode].append(rollout)
    scores = []
    for episode in by_episode.values():
        counted = [rollout for rollout in episode if rollout.trainable] or episode
        reward = statistics.fmean(map(reward_of, counted))
        scores.append(EpisodeScore(reward, any(rollout.error for rollout in episode)))
    return scores


def reward_of(rollout: Rollout) -> float:
    return 0.0 if rollout.error else rollout.reward


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the probability that at least one of k samples solves an example that c of n samples
    solved.

    See "Evaluating Large Language Models Trained on Code" by Chen et al.
    (https://arxiv.org/abs/2107.03374), equation 1: the unbiased estimate 1 - C(n - c, k) / C(n, k).
    """
    assert 0 <= c <= n and 1 <= k <= n
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_up_to(n: int) -> list[int]:
    """Returns 1, 2, 4, ... below n, then n."""
    return [2**i for i in range(n.bit_length()) if 2**i < n] + [n]


def with_error(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the mean over examples and, if there is more than one, its standard error as
    `<name>_stderr`.

    For means of clusters of equal size this is the clustered standard error of "Adding Error Bars
    to Evals" by Miller (https://arxiv.org/abs/2411.00640), section 2.2, with the small-sample
    factor G / (G - 1).
    """
    metrics = {name: statistics.fmean(values)}
    if len(values) > 1:
        metrics[f"{name}_stderr"] = statistics.stdev(values) / math.sqrt(len(values))
    return metrics


def example_rewards(results: Results) -> dict[int, float]:
    """Returns each example's mean reward, by task."""
    return {
        task: statistics.fmean(play.reward for play in episodes(rollouts))
        for task, rollouts in results
    }


def eval_metrics(label: str, results: Results) -> dict[str, float]:
    """Returns the metrics of one evaluation. A failed rollout counts as reward 0, and in `errored`.

    `reward_mean` is the mean over examples; `avg@k` is the same value under a name that gives the
    number k of samples per example; `pass@k` is reported for k = 1, 2, 4, ... and the number of
    samples; `agent_<name>` is one agent's mean, if there are several. The environment's own metrics
    are means over the rollouts that have them.
    """
    assert results and all(rollouts for _, rollouts in results), f"eval {label} has no rollouts"
    played = [episodes(rollouts) for _, rollouts in results]
    rollouts = [rollout for _, group in results for rollout in group]
    samples = min(map(len, played))
    rewards = list(example_rewards(results).values())
    metrics = with_error("reward_mean", rewards)
    metrics[f"avg@{samples}"] = metrics["reward_mean"]
    for k in powers_up_to(samples):
        metrics |= with_error(
            f"pass@{k}",
            [pass_at_k(len(group), sum(play.solved for play in group), k) for group in played],
        )
    lengths = [rollout.num_tokens for rollout in rollouts]
    if any(lengths):  # an endpoint may not say how many tokens it sampled
        metrics["length_mean"] = statistics.fmean(lengths)
    metrics["errored"] = statistics.fmean(play.failed for group in played for play in group)
    metrics["truncated"] = statistics.fmean(rollout.truncated for rollout in rollouts)
    metrics |= agent_rewards(results)
    for name, values in metric_values(rollouts).items():
        metrics[name] = statistics.fmean(values)
    return {f"eval/{label}/{name}": float(value) for name, value in metrics.items()}


def agent_rewards(results: Results) -> dict[str, float]:
    """Returns `agent_<name>`, the mean reward of each agent over the examples in which it plays,
    if there are several agents; a failed rollout counts as 0. In a zero-sum game the mean over
    all agents is meaningless."""
    by_agent: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for task, rollouts in results:
        for rollout in rollouts:
            by_agent[rollout.agent][task].append(reward_of(rollout))
    metrics: dict[str, float] = {}
    for agent, examples in sorted(by_agent.items()) if len(by_agent) > 1 else ():
        metrics |= with_error(f"agent_{agent}", [*map(statistics.fmean, examples.values())])
    return metrics


def difference(ours: Mapping[str, float], theirs: Mapping[str, float], seed: int) -> Difference:
    """Returns the mean of `ours - theirs` over the examples both have, with an interval from the
    paired percentile bootstrap.

    See "An Introduction to the Bootstrap" by Efron and Tibshirani, chapter 13: examples are
    resampled with replacement, and the 2.5% and 97.5% quantiles of the mean differences are the
    interval. Pairing removes the variance due to the examples' difficulty.
    """
    common = sorted(set(ours) & set(theirs))
    assert common, "the two policies have no example in common"
    gaps = [ours[task] - theirs[task] for task in common]
    generator = random.Random(seed)
    means = sorted(statistics.fmean(generator.choices(gaps, k=len(gaps))) for _ in range(RESAMPLES))
    tail = round(0.025 * RESAMPLES)
    return Difference(statistics.fmean(gaps), means[tail - 1], means[RESAMPLES - tail], len(common))


def rollout_line(env: str, task: int, rollout: Rollout) -> dict[str, Any]:
    """Returns the line for one finished rollout in evals/*/*.jsonl and in the output of `rl
    collect`."""
    return {"env": env, "task": task, "rollout": rollout.episode, **rollout.as_record()}


def write_eval(path: Path, version: int | None, label: str, results: Results) -> None:
    """Writes one evaluation's rollouts, one per line. `version` is the policy version; None if
    there is none."""
    lines = [
        {"policy_version": version} | rollout_line(label, task, rollout)
        for task, rollouts in results
        for rollout in rollouts
    ]
    write_file(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
