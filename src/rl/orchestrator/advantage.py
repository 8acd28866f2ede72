"""Rewards of a group to advantages."""


def group_mean(rewards: list[float]) -> list[float]:
    """Each rollout's reward minus the mean of its group.

    See "Understanding R1-Zero-Like Training" by Liu et al. (https://arxiv.org/abs/2503.20783): A_i = r_i - mean(r), without GRPO's
    division by the standard deviation, which weighs tasks by how even their rewards are. Exactly 0.0 for all when all are equal.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
