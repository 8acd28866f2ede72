"""Credit: rewards to advantages. Pure, one function each; docs/algorithms.md has them in one table with their sources.

r_1..r_n are the rewards of the rollouts of one group that are compared with each other. Equal rewards give exactly 0.0 (`all_equal`),
whatever rounding does to their mean, for a group of zeros is replaced.

std is the unbiased one, divided by n - 1: a group is a small sample of what the policy would get, and it is that spread which is meant.
The papers leave it open; TRL and verl take torch.std, which is the same.
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

BATCH_EPSILON = 1e-8
"""Added to a batch's standard deviation, as the authors of REINFORCE++ do; far below any spread of a batch's rewards."""


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0.0 of no values."""
    return sum(values) / len(values) if values else 0.0


def deviation(values: list[float]) -> float:
    """Unbiased standard deviation of at least two values."""
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def all_equal(values: list[float]) -> bool:
    return not values or min(values) == max(values)


def dr_grpo(rewards: list[float]) -> list[float]:
    """A_i = r_i - mean(r).

    See "Understanding R1-Zero-Like Training" by Liu et al. (https://arxiv.org/abs/2503.20783): GRPO's division by the standard deviation
    weighs tasks by how even their rewards are.
    """
    if all_equal(rewards):
        return [0.0] * len(rewards)
    center = mean(rewards)
    return [reward - center for reward in rewards]


def grpo(rewards: list[float], epsilon: float) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon).

    See "DeepSeekMath" by Shao et al. (https://arxiv.org/abs/2402.03300), which has no epsilon.
    """
    scale = deviation(rewards) + epsilon
    return [advantage / scale for advantage in dr_grpo(rewards)]


def rloo(rewards: list[float]) -> list[float]:
    """A_i = r_i - (sum of the other rewards) / (n - 1).

    See "Back to Basics" by Ahmadian et al. (https://arxiv.org/abs/2402.14740): a baseline that does not depend on the rollout itself.
    It is n / (n - 1) times dr_grpo.
    """
    total, others = sum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


def max_rl(rewards: list[float]) -> list[float]:
    """A_i = (r_i - mean(r)) / mean(r); 0.0 if mean(r) <= 0.

    See "Maximum Likelihood Reinforcement Learning" by Tajwar et al. (https://arxiv.org/abs/2602.02710): with rewards of 0 and 1 the
    gradient is that of log pass rate, to the order n, instead of that of the pass rate: hard tasks weigh more.
    """
    center = mean(rewards)
    if center <= 0:
        return [0.0] * len(rewards)
    return [advantage / center for advantage in dr_grpo(rewards)]


def reinforce_pp(groups: list[list[float]], group_baseline: bool) -> list[list[float]]:
    """b_i = r_i, or with `group_baseline` r_i - mean(r of its group); A_i = (b_i - mean(b)) / (std(b) + 1e-8), over all of `groups`.

    See "REINFORCE++" by Hu et al. (https://arxiv.org/abs/2501.03262). `groups`: the rewards of one environment's groups in a batch.
    """
    groups = [dr_grpo(rewards) if group_baseline else rewards for rewards in groups]
    values = [value for rewards in groups for value in rewards]
    if all_equal(values):
        return [[0.0] * len(rewards) for rewards in groups]
    # What is left of every group's mean is rounding: taking it off would make a zero something else.
    center = 0.0 if group_baseline else mean(values)
    scale = deviation(values) + BATCH_EPSILON
    return [[(value - center) / scale for value in rewards] for rewards in groups]


def length_penalties(rewards: list[float], lengths: list[int], coefficient: float) -> list[float]:
    """The penalty of each reward of a group: coefficient * p * length_i / max(length), with p = mean(r) clamped to 0..1.

    Lengths are in sampled tokens. Groups that fail lose nothing, so that short failures do not pay; groups that always succeed learn to be
    shorter. The linear length penalty of prime-rl.
    """
    longest = max(lengths, default=0)
    if coefficient == 0 or longest == 0:
        return [0.0] * len(rewards)
    pass_rate = min(1.0, max(0.0, mean(rewards)))
    return [coefficient * pass_rate * length / longest for length in lengths]


def group_advantages(rewards: list[float], config: CreditSettings) -> list[float]:
    """The configured advantages of one group, where they are not a function of the user's.

    Of credit over a batch: those before it is normalised, 0.0 where it has no group baseline.
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
