"""Settings of the loss: one class a loss, told apart by `type`. Formulas and sources: docs/algorithms.md and rl/trainer/loss.py.

r is the ratio of the trainer's to the sampler's probability of a token. There is one optimizer step a batch, so r holds both: how far
the policy has moved since the token was sampled, and how differently the inference engine computes.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl.functions import find_fault
from rl.settings import Settings

Band = tuple[float, float]
"""Lowest and highest value that is trained; [0, inf]: everything is."""
EVERYTHING: Band = (0.0, math.inf)


class LossSettings(Settings):
    """What every loss has: how tokens are averaged, which tokens are left out, and what is added."""

    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over the batch's tokens (DAPO), over sequences of the mean over each one's tokens (GRPO), or sum over tokens divided by
    sequences times `constant_length` (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """With aggregation = "constant": what each sequence's sum is divided by. Default: orchestrator.sampling.max_tokens."""
    token_mask: Band = EVERYTHING
    """A token whose ratio r lies outside is not trained (IcePop): neither its own loss nor KL nor entropy."""
    sequence_mask: Band = EVERYTHING
    """A sequence whose product of ratios lies outside is not trained."""
    geometric_mask: Band = EVERYTHING
    """A sequence whose geometric mean of ratios lies outside is not trained."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Times the KL divergence to the frozen reference model, added to the loss; 0: no reference model is loaded."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """k3: ref/p - 1 - log(ref/p), as in GRPO; k2: log(ref/p)^2 / 2, whose gradient is that of the KL divergence on-policy."""
    kl_reference: str | None = None
    """The reference model, a folder or an id. Default: the model that the run starts from."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Times the policy's entropy at each trained token, subtracted from the loss."""
    teacher_coefficient: float = Field(1.0, ge=0)
    """Times log teacher - log trainer (reverse KL), added to the advantage of every token that has a teacher's log-probability."""


class PolicyGradientConfig(LossSettings):
    """REINFORCE with truncated importance sampling: -w A log p, w = min(r, truncate) without gradient."""

    type: Literal["policy_gradient"] = "policy_gradient"
    importance: Literal["token", "sequence", "none"] = "token"
    """Which ratio weighs a token: its own, its sequence's product, or none at all (w = 1)."""
    truncate: float = Field(2.0, gt=0)
    """Highest importance weight; inf: not truncated."""
    token_mask: Band = (0.125, 8.0)
    """A token whose ratio r lies outside is not trained (IcePop)."""


class ClipConfig(LossSettings):
    """PPO's clipped surrogate as GRPO and DAPO use it: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, ge=0, le=1)
    """r counts as 1 - this below it."""
    clip_high: float = Field(0.28, ge=0)
    """r counts as 1 + this above it (DAPO's clip-higher)."""


class CispoConfig(LossSettings):
    """CISPO: -clip(r, 1 - clip_low, 1 + clip_high) A log p, the clipped ratio without gradient: every token keeps one."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """1: no lower clip, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """r is at most 1 + this."""


class GspoConfig(LossSettings):
    """GSPO: the clipped surrogate with one ratio a sequence, the geometric mean of its tokens' ratios."""

    type: Literal["gspo"] = "gspo"
    aggregation: Literal["token", "sequence", "constant"] = "sequence"
    """As above; the paper's is "sequence"."""
    clip_low: float = Field(3e-4, ge=0, le=1)
    """The paper's value."""
    clip_high: float = Field(4e-4, ge=0)
    """The paper's value."""


class DppoConfig(LossSettings):
    """DPPO with binary total variation: -r A where the probability has not moved too far in the direction of A, + kl_tau (log r)^2."""

    type: Literal["dppo"] = "dppo"
    mask_low: float = Field(0.2, ge=0)
    """A < 0: a token whose probability fell by more than this is not trained."""
    mask_high: float = Field(0.2, ge=0)
    """A > 0: a token whose probability rose by more than this is not trained."""
    kl_tau: float = Field(0.0, ge=0)
    """Times (log r)^2, on every token."""


class CrossEntropyConfig(LossSettings):
    """-A log p: imitation of the tokens in the batch; supervised fine-tuning has A = 1."""

    type: Literal["cross_entropy"] = "cross_entropy"


class CustomConfig(LossSettings):
    """A function of yours, (LossInputs, CustomConfig) -> (loss [N] float, clipped [N] bool), like those in rl/trainer/loss.py."""

    type: Literal["custom"] = "custom"
    function: str
    """`module:function` or `file.py:function`."""
    args: dict[str, Any] = {}
    """For the function to read, as `config.args`."""


AnyLossConfig = PolicyGradientConfig | ClipConfig | CispoConfig | GspoConfig | DppoConfig | CrossEntropyConfig | CustomConfig


def default_type(value: object) -> object:
    """A table without `type` is the default loss's."""
    return {"type": "policy_gradient", **value} if isinstance(value, dict) else value


LossConfig = Annotated[Annotated[AnyLossConfig, Field(discriminator="type")], BeforeValidator(default_type)]


def check_loss(loss: LossSettings) -> list[tuple[str, object, str]]:
    """Combinations that make no sense: (key, its value, what to do about it)."""
    faults: list[tuple[str, object, str]] = []
    for name in ("token_mask", "sequence_mask", "geometric_mask"):
        low, high = getattr(loss, name)
        if not low <= 1 <= high:
            remedy = "leaves out r = 1, where trainer and sampler agree; give lowest and highest value, around 1: [0.5, 2.0]"
            faults.append((f"trainer.loss.{name}", [low, high], remedy))
    if loss.constant_length is not None and loss.aggregation != "constant":
        remedy = f'divides only with trainer.loss.aggregation = "constant", which is "{loss.aggregation}": set that, or leave this out'
        faults.append(("trainer.loss.constant_length", loss.constant_length, remedy))
    if loss.kl_reference is not None and not loss.kl_coefficient:
        remedy = "has no effect while trainer.loss.kl_coefficient is 0: set that, or leave this out"
        faults.append(("trainer.loss.kl_reference", loss.kl_reference, remedy))
    if isinstance(loss, ClipConfig | CispoConfig | GspoConfig):
        faults += check_clip(loss)
    if isinstance(loss, PolicyGradientConfig) and loss.importance == "none" and loss.truncate != PolicyGradientConfig().truncate:
        remedy = 'has no weight to truncate with trainer.loss.importance = "none": set that to "token", or leave this out'
        faults.append(("trainer.loss.truncate", loss.truncate, remedy))
    if isinstance(loss, CustomConfig) and (fault := find_fault(loss.function)):
        faults.append(("trainer.loss.function", loss.function, fault))
    return faults


def check_clip(loss: ClipConfig | CispoConfig | GspoConfig) -> list[tuple[str, object, str]]:
    """A clip must leave something, and what it acts on must not all have been masked before."""
    faults: list[tuple[str, object, str]] = []
    if loss.clip_low == 0 and loss.clip_high == 0:
        remedy = 'and trainer.loss.clip_low = 0 leave no ratio unclipped; raise one, or use type = "policy_gradient", which has no clip'
        faults.append(("trainer.loss.clip_high", 0.0, remedy))
    name = "geometric_mask" if isinstance(loss, GspoConfig) else "token_mask"  # of the ratio that is clipped
    low, high = getattr(loss, name)
    if (low, high) != EVERYTHING and low >= 1 - loss.clip_low and high <= 1 + loss.clip_high:
        remedy = (
            f"masks every ratio that the clip to [{1 - loss.clip_low:g}, {1 + loss.clip_high:g}] would act on; widen it, or leave it out"
        )
        faults.append((f"trainer.loss.{name}", [low, high], remedy))
    return faults
