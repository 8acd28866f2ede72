"""The losses once more, from the papers: float64 NumPy, one sequence after another, each with the gradient derived by hand.

Written without looking at rl/trainer/loss.py: sequences are separate arrays, ratios are plain quotients, nothing is clamped.
"""

from dataclasses import dataclass

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

    @property
    def ratio(self) -> np.ndarray:
        return np.exp(self.trainer) / np.exp(self.sampler)


Result = tuple[np.ndarray, np.ndarray]
"""Loss of each token of a sequence, and its derivative by each token's trainer log-probability (of the sum over the sequence)."""


def policy_gradient(s: Sequence, importance: str, truncate: float) -> Result:
    weight = {"token": s.ratio, "sequence": np.full_like(s.ratio, np.prod(s.ratio)), "none": np.ones_like(s.ratio)}[importance]
    if importance != "none":
        weight = np.minimum(weight, truncate)
    return -weight * s.advantages * s.trainer, -weight * s.advantages


def clip(s: Sequence, low: float, high: float) -> Result:
    """GRPO's equation 3 with DAPO's two widths."""
    plain, clipped = s.ratio * s.advantages, np.clip(s.ratio, 1 - low, 1 + high) * s.advantages
    return -np.minimum(plain, clipped), -np.where(plain <= clipped, plain, 0.0)


def cispo(s: Sequence, low: float, high: float) -> Result:
    weight = np.clip(s.ratio, 1 - low, 1 + high)
    return -weight * s.advantages * s.trainer, -weight * s.advantages


def gspo(s: Sequence, low: float, high: float) -> Result:
    """GSPO's equation 5, one ratio a sequence, its value given to each token. For equal advantages; d s / d log p_t = s / n."""
    n = len(s.trainer)
    ratio = np.prod(s.ratio) ** (1 / n)
    plain, clipped = ratio * s.advantages, np.clip(ratio, 1 - low, 1 + high) * s.advantages
    assert np.ptp(s.advantages) == 0
    slope = np.where(plain <= clipped, plain, 0.0) / n  # of the value at one token, by each token's log-probability
    return -np.minimum(plain, clipped), np.full(n, -slope.sum())


def dppo(s: Sequence, low: float, high: float, tau: float) -> Result:
    moved = np.exp(s.trainer) - np.exp(s.sampler)
    keep = ~(((s.advantages > 0) & (moved > high)) | ((s.advantages < 0) & (moved < -low)))
    surrogate, log_r = np.where(keep, -s.ratio * s.advantages, 0.0), s.trainer - s.sampler
    return surrogate + tau * log_r**2, surrogate + 2 * tau * log_r


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
