"""Credit assignment: turns rewards into advantages. Pure, one function per method;
docs/algorithms.md lists them with their sources.

r_1..r_n are the rewards of the rollouts of one group that are compared with each other. Equal
rewards give exactly 0.0 (`all_equal`), regardless of how their mean is rounded, because groups
whose advantages are all zero are replaced.

std is the unbiased estimate (divided by n - 1), because a group is a small sample of the rewards
the policy would get. The papers leave this open; TRL and verl use torch.std, which is also
unbiased.
"""

import math
from collections.abc import Sequence

from rl.config.orchestrator import (
    CreditSettings,
    DrGrpoConfig,
    GrpoConfig,
    MaxRlConfig,
    NoCreditConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from rl.wire.rollouts import all_equal

BATCH_EPSILON = 1e-8
"""Added to a batch's standard deviation, as by the authors of REINFORCE++; far below any spread
of a batch's rewards."""


def mean(values: Sequence[float]) -> float:
    """Returns the arithmetic mean; 0.0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def deviation(values: list[float]) -> float:
    """Returns the unbiased standard deviation of at least two values."""
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def dr_grpo(rewards: list[float]) -> list[float]:
    """A_i = r_i - mean(r).

    See "Understanding R1-Zero-Like Training" by Liu et al. (https://arxiv.org/abs/2503.20783):
    GRPO's division by the standard deviation gives more weight to tasks with uniform rewards.
    """
    if all_equal(rewards):
        return [0.0] * len(rewards)
    center = mean(rewards)
    return [reward - center for reward in rewards]


def grpo(rewards: list[float], epsilon: float) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon).

    See "DeepSeekMath" by Shao et al. (https://arxiv.org/abs/2402.03300), which uses no epsilon.
    """
    scale = deviation(rewards) + epsilon
    return [advantage / scale for advantage in dr_grpo(rewards)]


def rloo(rewards: list[float]) -> list[float]:
    """A_i = r_i - (sum of the other rewards) / (n - 1).

    See "Back to Basics" by Ahmadian et al. (https://arxiv.org/abs/2402.14740): a baseline that does
    not depend on the rollout itself. It is n / (n - 1) times dr_grpo.
    """
    if all_equal(rewards):
        return [0.0] * len(rewards)
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def max_rl(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / mean(r); 0.0 if mean(r) <= 0.

    See "Maximum Likelihood Reinforcement Learning" by Tajwar et al.
    (https://arxiv.org/abs/2602.02710): with rewards of 0 and 1 the gradient is that of the log pass
    rate to order n, instead of that of the pass rate, so hard tasks weigh more.
    """
    center = mean(rewards)
    if center <= 0:
        return [0.0] * len(rewards)
    return [advantage / center for advantage in dr_grpo(rewards)]


def reinforce_pp(groups: list[list[float]], group_baseline: bool) -> list[list[float]]:
    """b_i = r_i, or with `group_baseline` r_i - mean(r of its group); A_i = (b_i - mean(b)) /
    (std(b) + 1e-8), over all of `groups`.

    See "REINFORCE++" by Hu et al. (https://arxiv.org/abs/2501.03262). `groups`: the rewards of one
    environment's groups in a batch.
    """
    groups = [dr_grpo(rewards) if group_baseline else rewards for rewards in groups]
    values = [value for rewards in groups for value in rewards]
    if all_equal(values):
        return [[0.0] * len(rewards) for rewards in groups]
    # With a group baseline the mean is 0 up to rounding; subtracting the rest would turn exact
    # zeros into nonzero values.
    center = 0.0 if group_baseline else mean(values)
    scale = deviation(values) + BATCH_EPSILON
    return [[(value - center) / scale for value in rewards] for rewards in groups]


def length_penalties(rewards: list[float], lengths: list[int], coefficient: float) -> list[float]:
    """Returns the penalty on each reward of a group: coefficient * p * length_i / max(length), with
    p = mean(r) clamped to 0..1.

    Lengths are in sampled tokens. Groups that fail are not penalised, so that short failures gain
    nothing; groups that always succeed learn to be shorter. This is the linear length penalty of
    prime-rl.
    """
    longest = max(lengths, default=0)
    if coefficient == 0 or longest == 0:
        return [0.0] * len(rewards)
    pass_rate = min(1.0, max(0.0, mean(rewards)))
    return [coefficient * pass_rate * length / longest for length in lengths]


def group_advantages(rewards: list[float], config: CreditSettings) -> list[float]:
    """Returns the configured advantages of one group, for all credit types but `custom`.

    For credit that is normalised over a batch, the advantages before normalisation; 0.0 if it has
    no group baseline.
    """
    if all_equal(rewards):
        return [0.0] * len(rewards)
    match config:
        case GrpoConfig():
            return grpo(rewards, config.epsilon)
        case RlooConfig():
            return rloo(rewards)
        case MaxRlConfig():
            return max_rl(rewards)
        case DrGrpoConfig() | ReinforcePlusPlusConfig(group_baseline=True):
            return dr_grpo(rewards)
        case ReinforcePlusPlusConfig() | NoCreditConfig():
            return [0.0] * len(rewards)
        case _:
            raise TypeError(
                f"credit of type {type(config).__name__} is computed by a user function"
            )
