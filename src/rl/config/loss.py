"""Settings of the loss: one class per loss, selected by `type`. Formulas and sources:
docs/algorithms.md and rl/trainer/loss/common.py.

r is the ratio of the trainer's to the sampler's probability of a token. It reflects both how far
the policy has moved since the token was sampled, and how the inference engine's computation
differs. With several optimizer steps per batch, the clipped losses factor it at the policy that the
batch began with.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rl.config.base import PAIR, PATH_IF_EXISTS, FunctionConfig, Settings, Unbounded, default_type

Ratio = Annotated[Unbounded, Field(ge=0)]


def around_one(band: tuple[float, float]) -> tuple[float, float]:
    """Returns a band of ratios. Raises ValueError if it lacks 1."""
    if not band[0] <= 1 <= band[1]:
        raise ValueError(
            "excludes r = 1, where trainer and sampler agree; give a lowest and a highest "
            "value around 1: [0.5, 2.0]"
        )
    return band


Band = Annotated[tuple[Ratio, Ratio], PAIR, AfterValidator(around_one)]
"""Lowest and highest value that is trained on; [0, inf]: all."""
EVERYTHING = (0.0, math.inf)


class LossSettings(Settings):
    """Settings of every loss: how tokens are averaged, which tokens are masked, and which terms
    are added."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses are aggregated. `token`: mean over the batch's tokens (DAPO); `sequence`:
    mean over sequences of each one's token mean (GRPO); `constant`: sum over tokens, divided by
    the number of sequences times `constant_length` (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of each sequence's sum if aggregation = "constant". Default:
    orchestrator.sampling.max_tokens."""
    token_mask: Band = EVERYTHING
    """Band of the ratio r outside of which a token is masked (IcePop): it adds neither loss nor
    KL nor entropy."""
    sequence_mask: Band = EVERYTHING
    """Band of the product of a sequence's ratios outside of which the sequence is masked."""
    geometric_mask: Band = EVERYTHING
    """Band of the geometric mean of a sequence's ratios outside of which the sequence is masked."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence to a frozen reference model, added to the loss; 0: no
    reference model is loaded."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL divergence. k3: ref/p - 1 - log(ref/p), as in GRPO; k2: log(ref/p)^2 /
    2, whose on-policy gradient is that of the KL divergence."""
    kl_reference: Annotated[str | None, PATH_IF_EXISTS] = None
    """The reference model, a folder or an id. Default: the model that the run starts from."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the policy's entropy at each trained token, subtracted from the loss."""
    teacher_coefficient: float = Field(1.0, ge=0)
    """Weight of log teacher - log trainer (reverse KL), added to the advantage of every token
    that has a teacher log-probability."""

    def sample_weights(self, lengths: Sequence[int], constant_length: int) -> list[float]:
        """Returns the weight of each sample's loss tokens in the batch's loss, by `aggregation`.
        `lengths`: their numbers n_i.

        With N loss tokens in the batch, n_i of them in sample i, and S samples that have any: token
        1/N (DAPO, https://arxiv.org/abs/2503.14476); sequence 1/(S n_i) (GRPO,
        https://arxiv.org/abs/2402.03300); constant 1/(S constant_length) (Dr. GRPO,
        https://arxiv.org/abs/2503.20783). Loss tokens that a clip or a mask on r leaves without
        gradient count in N and n_i as well.
        """
        trained = max(1, sum(length > 0 for length in lengths))
        if self.aggregation == "token":
            return [1.0 / max(1, sum(lengths))] * len(lengths)
        if self.aggregation == "sequence":
            return [1.0 / (trained * max(1, length)) for length in lengths]
        return [1.0 / (trained * constant_length)] * len(lengths)


class PolicyGradientConfig(LossSettings):
    """REINFORCE with truncated importance sampling: -w A log p, w = min(r, truncate) without
    gradient."""

    type: Literal["policy_gradient"] = "policy_gradient"
    importance: Literal["token", "sequence", "none"] = "token"
    """Ratio that weights a token: its own, the product over its sequence, or none (w = 1)."""
    truncate: Unbounded = Field(2.0, gt=0)
    """Highest importance weight; inf: no truncation."""
    token_mask: Band = (0.125, 8.0)
    """Band of the ratio r outside of which a token is masked (IcePop)."""


class ClippedSettings(LossSettings):
    """Settings of the losses that clip a ratio. With several optimizer steps per batch they clip
    how far the policy has moved within the batch; the ratio of the batch's first policy to the
    sampler is a separate weight."""

    truncate: Unbounded = Field(2.0, gt=0)
    """Highest weight of the batch's first policy against the sampler; inf: no limit. Used only
    with several optimizer steps per batch."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower clip: r counts as at least 1 minus this."""
    clip_high: Unbounded = Field(0.28, ge=0)
    """Upper clip: r counts as at most 1 plus this (DAPO's clip-higher)."""


class ClipConfig(ClippedSettings):
    """PPO's clipped surrogate as GRPO and DAPO use it: -min(r A, clip(r, 1 - clip_low, 1 +
    clip_high) A)."""

    type: Literal["clip"] = "clip"
    delta: Unbounded = Field(3.0, gt=1)
    """Dual clip: where A < 0, r counts as at most this; inf: no such bound."""


class CispoConfig(ClippedSettings):
    """CISPO: -clip(r, 1 - clip_low, 1 + clip_high) A log p, the clipped ratio without gradient,
    so that every token keeps its gradient."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """Lower clip: r counts as at least 1 minus this; 1: no lower clip, as in the paper."""
    clip_high: Unbounded = Field(4.0, ge=0)
    """Upper clip: r counts as at most 1 plus this."""


class GspoConfig(ClippedSettings):
    """GSPO: the clipped surrogate with one ratio per sequence, the geometric mean of its tokens'
    ratios."""

    type: Literal["gspo"] = "gspo"
    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As for every loss; the paper uses "sequence"."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """Lower clip: the ratio counts as at least 1 minus this. The default is the paper's value."""
    clip_high: Unbounded = Field(4e-4, ge=0)
    """Upper clip: the ratio counts as at most 1 plus this. The default is the paper's value."""
    delta: Unbounded = Field(3.0, gt=1)
    """Dual clip: where A < 0, the ratio counts as at most this; inf: no such bound."""


class DppoConfig(LossSettings):
    """DPPO with binary total variation: -r A where the probability has not moved too far in the
    direction of A, + kl_tau (log r)^2."""

    type: Literal["dppo"] = "dppo"
    mask_low: Unbounded = Field(0.2, ge=0)
    """For A < 0: a token whose probability fell by more than this is not trained."""
    mask_high: Unbounded = Field(0.2, ge=0)
    """For A > 0: a token whose probability rose by more than this is not trained."""
    delta: Unbounded = Field(20.0, gt=1)
    """Dual clip: where A < 0, r counts as at most this; inf: no such bound."""
    kl_tau: float = Field(0.0, ge=0)
    """Weight of (log r)^2, on every token."""


class DroConfig(LossSettings):
    """DRO: -A log p + beta (log r)^2 / 2, which ties the policy to the sampler by a penalty
    instead of a clip."""

    type: Literal["dro"] = "dro"
    beta: float = Field(0.05, ge=0)
    """Weight of the squared log ratio."""


class CrossEntropyConfig(LossSettings):
    """-A log p: imitation of the tokens in the batch; supervised fine-tuning has A = 1."""

    type: Literal["cross_entropy"] = "cross_entropy"


class CustomConfig(LossSettings, FunctionConfig):
    """A user function (LossInputs, CustomConfig) -> (loss [N] float, clipped [N] bool); see
    docs/functions.md."""

    type: Literal["custom"] = "custom"


AnyLossConfig = (
    PolicyGradientConfig
    | ClipConfig
    | CispoConfig
    | GspoConfig
    | DppoConfig
    | DroConfig
    | CrossEntropyConfig
    | CustomConfig
)
LossConfig = Annotated[
    Annotated[AnyLossConfig, Field(discriminator="type")], default_type("policy_gradient")
]
