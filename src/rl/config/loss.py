"""Settings of the loss: one class a loss, told apart by `type`. Formulas and sources: docs/algorithms.md and rl/trainer/loss.py.

r is the ratio of the trainer's to the sampler's probability of a token. It holds both: how far the policy has moved since the token was
sampled, and how differently the inference engine computes. With several optimizer steps a batch the clipped losses split it at the policy
that the batch began with.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from rl.config.base import PAIR, PATH_IF_FOLDER, FunctionConfig, Settings, Unbounded, default_type

Ratio = Annotated[Unbounded, Field(ge=0)]
Band = Annotated[tuple[Ratio, Ratio], PAIR]
"""Lowest and highest value that is trained; [0, inf]: everything is."""
EVERYTHING = (0.0, math.inf)


class LossSettings(Settings):
    """What every loss has: how tokens are averaged, which tokens are left out, and what is added."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How losses of tokens become one: mean over the batch's tokens (DAPO), over sequences of the mean over each one's tokens (GRPO), or
    sum over tokens divided by sequences times `constant_length` (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor of each sequence's sum with aggregation = "constant". Default: orchestrator.sampling.max_tokens."""
    token_mask: Band = EVERYTHING
    """Band of the ratio r outside of which a token is not trained (IcePop): neither its own loss nor KL nor entropy."""
    sequence_mask: Band = EVERYTHING
    """Band of the product of a sequence's ratios outside of which the sequence is not trained."""
    geometric_mask: Band = EVERYTHING
    """Band of the geometric mean of a sequence's ratios outside of which the sequence is not trained."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence to a frozen reference model that is added to the loss; 0: no reference model is loaded."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """How the KL divergence is estimated. k3: ref/p - 1 - log(ref/p), as in GRPO; k2: log(ref/p)^2 / 2, whose gradient is that of the KL
    divergence on-policy."""
    kl_reference: Annotated[str | None, PATH_IF_FOLDER] = None
    """The reference model, a folder or an id. Default: the model that the run starts from."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the policy's entropy at each trained token, which is subtracted from the loss."""
    teacher_coefficient: float = Field(1.0, ge=0)
    """Weight of log teacher - log trainer (reverse KL), which is added to the advantage of every token that has a teacher's
    log-probability."""


class PolicyGradientConfig(LossSettings):
    """REINFORCE with truncated importance sampling: -w A log p, w = min(r, truncate) without gradient."""

    type: Literal["policy_gradient"] = "policy_gradient"
    importance: Literal["token", "sequence", "none"] = "token"
    """Which ratio weighs a token: its own, its sequence's product, or none at all (w = 1)."""
    truncate: Unbounded = Field(2.0, gt=0)
    """Highest importance weight; inf: weights are not truncated."""
    token_mask: Band = (0.125, 8.0)
    """Band of the ratio r outside of which a token is not trained (IcePop)."""


class ClippedSettings(LossSettings):
    """What the losses have that clip a ratio. With several optimizer steps a batch they clip how far the policy has moved within the batch;
    the policy that the batch began with is weighed against the sampler's by itself."""

    truncate: Unbounded = Field(2.0, gt=0)
    """Highest such weight, with several optimizer steps a batch; inf: it is not truncated. With one step there is none."""


class ClipConfig(ClippedSettings):
    """PPO's clipped surrogate as GRPO and DAPO use it: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, le=1)
    """Lower clip: r counts as at least 1 minus this."""
    clip_high: Unbounded = Field(0.28, ge=0)
    """Upper clip: r counts as at most 1 plus this (DAPO's clip-higher)."""
    delta: Unbounded = Field(3.0, gt=1)
    """Dual clip: where A < 0, r counts as at most this; inf: no such bound."""


class CispoConfig(ClippedSettings):
    """CISPO: -clip(r, 1 - clip_low, 1 + clip_high) A log p, the clipped ratio without gradient: every token keeps one."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """Lower clip: r counts as at least 1 minus this; 1: no lower clip, as in the paper."""
    clip_high: Unbounded = Field(4.0, ge=0)
    """Upper clip: r counts as at most 1 plus this."""


class GspoConfig(ClippedSettings):
    """GSPO: the clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As for every loss; the paper's is "sequence"."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """Lower clip: the ratio counts as at least 1 minus this. The default is the paper's value."""
    clip_high: Unbounded = Field(4e-4, ge=0)
    """Upper clip: the ratio counts as at most 1 plus this. The default is the paper's value."""
    delta: Unbounded = Field(3.0, gt=1)
    """Dual clip: where A < 0, the ratio counts as at most this; inf: no such bound."""


class DppoConfig(LossSettings):
    """DPPO with binary total variation: -r A where the probability has not moved too far in the direction of A, + kl_tau (log r)^2."""

    type: Literal["dppo"] = "dppo"
    mask_low: Unbounded = Field(0.2, ge=0)
    """For A < 0: a token whose probability fell by more than this is not trained."""
    mask_high: Unbounded = Field(0.2, ge=0)
    """For A > 0: a token whose probability rose by more than this is not trained."""
    delta: Unbounded = Field(20.0, gt=1)
    """Dual clip: where A < 0, r counts as at most this; inf: no such bound."""
    kl_tau: float = Field(0.0, ge=0)
    """Weight of (log r)^2, on every token."""


class CrossEntropyConfig(LossSettings):
    """-A log p: imitation of the tokens in the batch; supervised fine-tuning has A = 1."""

    type: Literal["cross_entropy"] = "cross_entropy"


class CustomConfig(LossSettings, FunctionConfig):
    """A function of yours, (LossInputs, CustomConfig) -> (loss [N] float, clipped [N] bool); see docs/functions.md."""

    type: Literal["custom"] = "custom"


AnyLossConfig = PolicyGradientConfig | ClipConfig | CispoConfig | GspoConfig | DppoConfig | CrossEntropyConfig | CustomConfig
LossConfig = Annotated[Annotated[AnyLossConfig, Field(discriminator="type")], default_type("policy_gradient")]
