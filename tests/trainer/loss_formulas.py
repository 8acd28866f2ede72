"""The losses once more, from the papers: float64 NumPy, one sequence after another, each with the
gradient derived by hand.

Written without looking at rl/trainer/loss/common.py: sequences are separate arrays, ratios are
plain quotients, nothing is clamped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass
class Sequence:
    """Log-probabilities of the n trained tokens of one sequence, float64 [n]."""

    trainer: np.ndarray
    sampler: np.ndarray
    advantages: np.ndarray
    entropies: np.ndarray
    reference: np.ndarray
    teacher: np.ndarray
    old: np.ndarray
    """Of the policy that the batch began with."""

    @property
    def ratio(self) -> np.ndarray:
        return np.exp(self.trainer) / np.exp(self.sampler)


Result = tuple[np.ndarray, np.ndarray]
"""Loss of each token of a sequence, and its derivative by each token's trainer log-probability
(of the sum over the sequence)."""


def policy_gradient(s: Sequence, importance: str, truncate: float) -> Result:
    weight = {
        "token": s.ratio,
        "sequence": np.full_like(s.ratio, np.prod(s.ratio)),
        "none": np.ones_like(s.ratio),
    }[importance]
    if importance != "none":
        weight = np.minimum(weight, truncate)
    return -weight * s.advantages * s.trainer, -weight * s.advantages


def dual_clip(
    ratio: np.ndarray, advantages: np.ndarray, low: float, high: float, delta: float
) -> Result:
    """(what is maximised: GRPO's equation 3 with DAPO's two widths, where A < 0 the maximum of
    it and delta A as in https://arxiv.org/abs/1912.09729; its derivative by log ratio)."""
    plain, clipped = ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages
    lower, bound = np.minimum(plain, clipped), delta * advantages
    bounded = (advantages < 0) & (lower < bound)
    return np.where(bounded, bound, lower), np.where((plain <= clipped) & ~bounded, plain, 0.0)


def clip(s: Sequence, low: float, high: float, delta: float) -> Result:
    surrogate, slope = dual_clip(s.ratio, s.advantages, low, high, delta)
    return -surrogate, -slope


def cispo(s: Sequence, low: float, high: float) -> Result:
    weight = np.clip(s.ratio, 1 - low, 1 + high)
    return -weight * s.advantages * s.trainer, -weight * s.advantages


def gspo(s: Sequence, low: float, high: float, delta: float) -> Result:
    """GSPO's equation 5, one ratio a sequence, its value given to each token. For equal
    advantages; d s / d log p_t = s / n."""
    n = len(s.trainer)
    ratio = np.prod(s.ratio) ** (1 / n)
    surrogate, slope = dual_clip(ratio, s.advantages, low, high, delta)
    assert np.ptp(s.advantages) == 0
    # slope / n: of the value at one token, by each token's log-probability
    return -surrogate, np.full(n, -(slope / n).sum())


def dppo(s: Sequence, low: float, high: float, delta: float, tau: float) -> Result:
    moved = np.exp(s.trainer) - np.exp(s.sampler)
    keep = ~(((s.advantages > 0) & (moved > high)) | ((s.advantages < 0) & (moved < -low)))
    beyond, log_r = (s.advantages < 0) & (s.ratio > delta), s.trainer - s.sampler
    surrogate = np.where(keep, -np.where(beyond, delta, s.ratio) * s.advantages, 0.0)
    return surrogate + tau * log_r**2, np.where(beyond, 0.0, surrogate) + 2 * tau * log_r


def dro(s: Sequence, beta: float) -> Result:
    log_r = s.trainer - s.sampler
    return beta / 2 * log_r**2 - s.advantages * s.trainer, beta * log_r - s.advantages


def decoupled(
    s: Sequence, loss: Callable[[Sequence], Result], truncate: float, geometric: bool = False
) -> Result:
    """https://arxiv.org/abs/2110.00641 with a truncated weight: the loss as if the old policy
    had sampled, times old / sampler."""
    weight = np.exp(s.old) / np.exp(s.sampler)
    weight = np.minimum(np.prod(weight) ** (1 / len(weight)) if geometric else weight, truncate)
    value, slope = loss(replace(s, sampler=s.old))
    return weight * value, weight * slope


def cross_entropy(s: Sequence) -> Result:
    return -s.advantages * s.trainer, -s.advantages


def k2(s: Sequence) -> Result:
    x = s.reference - s.trainer
    return x**2 / 2, -x


def k3(s: Sequence) -> Result:
    quotient = np.exp(s.reference) / np.exp(s.trainer)
    return quotient - 1 - np.log(quotient), 1 - quotient


def kept(s: Sequence, token: tuple, sequence: tuple, geometric: tuple) -> np.ndarray:
    """Tokens that no mask leaves out."""
    product = np.prod(s.ratio)
    mean = product ** (1 / len(s.ratio))
    whole = sequence[0] <= product <= sequence[1] and geometric[0] <= mean <= geometric[1]
    return whole & (s.ratio >= token[0]) & (s.ratio <= token[1])


def weights(lengths: list[int], aggregation: str, constant: int) -> list[float]:
    """What a token of each sequence counts."""
    if aggregation == "token":
        return [1 / sum(lengths)] * len(lengths)
    return [1 / len(lengths) / (n if aggregation == "sequence" else constant) for n in lengths]
