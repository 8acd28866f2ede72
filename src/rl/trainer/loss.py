"""The losses. Pure: tensors to tensors, one function each. docs/algorithms.md has them in one table with their sources.

Per trained token, with p the trainer's and q the sampler's (inference) probability of it and A its advantage::

    r = exp(clamp(log p - log q, -10, 10))           importance ratio

There is one optimizer step a batch, so there is this one ratio: how far the policy has moved since the token was sampled, times how
differently the inference engine computes. Clips act on r with its gradient; truncation and masks act on r without gradient.

A loss function gives one number a token, and which tokens its own clip leaves without gradient. What is minimised is their sum, weighted
by `LossInputs.weights` (see `sample_weights`), over all tokens of all samples, micro batches and ranks.

Everything is always finite for finite log-probabilities (the sampler's may be -inf): the clamp bounds r by e^10 before anything multiplies
it, sums over sequences are clamped as well or stay logarithms, and a masked token is selected away, because a product with 0 would keep
an inf or nan. Where a bound of the clamp is passed there is no gradient through r: no policy moves that far in a step, engines do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from rl.functions import load_function
from rl.messages import TrainingSample
from rl.trainer.loss_config import (
    EVERYTHING,
    Band,
    CispoConfig,
    ClipConfig,
    CrossEntropyConfig,
    CustomConfig,
    DppoConfig,
    GspoConfig,
    LossSettings,
    PolicyGradientConfig,
)

MAX_LOG_RATIO = 10.0
"""e^10 = 22026: far outside every sensible mask, far inside float32."""


@dataclass(frozen=True)
class LossInputs:
    """N loss tokens of S whole sequences, as one rank has them. All [N] float32 unless said otherwise.

    With context parallelism a rank has only some tokens of a sequence; `sequence_sum` then sums over the ranks that share it.
    """

    trainer_logprobs: Tensor
    """log p, with gradient."""
    logprobs: Tensor
    """log q."""
    advantages: Tensor
    entropies: Tensor
    """Of the trainer's distribution at the token, nats; with gradient if entropy_coefficient is not 0."""
    weights: Tensor
    """What the token's loss counts in the batch's: 1 / (loss tokens of the batch), for example."""
    sequences: Tensor
    """[N] int64, which of the S sequences a token belongs to."""
    sequence_sum: Callable[[Tensor], Tensor]
    """[N] -> [S], the sum of a value over each sequence's tokens, on all ranks that hold some; gradients flow through."""
    reference_logprobs: Tensor | None = None
    """Of the frozen reference model."""
    teacher_logprobs: Tensor | None = None
    """nan where there is none."""


@dataclass(frozen=True)
class LossTerms:
    """What a loss makes of N tokens. All [N], and without gradient but for `loss`."""

    loss: Tensor
    """Float32, to be weighted and summed, with gradient; 0 where one of the masks on r applies."""
    masked: Tensor
    """Bool: the policy's own term has no gradient at the token, by the loss's own clip or by one of the masks on r."""
    clipped: Tensor
    """Bool: those of them that the loss's own clip leaves without gradient, whatever the masks say."""
    ratio: Tensor
    """r."""
    kl: Tensor
    """k3 = r - 1 - log r: an unbiased, never negative estimate of KL(q || p) (http://joschu.net/blog/kl-approx.html)."""
    reference_kl: Tensor | None
    """The estimate of KL(p || reference) by `kl_estimator`, before the coefficient; None without a reference."""
    teacher_kl: Tensor | None
    """log p - log teacher, whose mean over sampled tokens is KL(p || teacher); nan where there is no teacher, None if nowhere."""


def sample_weights(samples: Sequence[TrainingSample], config: LossSettings, constant_length: int) -> list[float]:
    """What each loss token of each sample counts in the batch's loss, by `config.aggregation`.

    N loss tokens in the batch, n_i of them in sample i, S samples that have any: token 1/N (DAPO, https://arxiv.org/abs/2503.14476);
    sequence 1/(S n_i) (GRPO, https://arxiv.org/abs/2402.03300); constant 1/(S constant_length) (Dr. GRPO,
    https://arxiv.org/abs/2503.20783). Masked tokens are counted.
    """
    lengths = [sum(sample.loss_mask) for sample in samples]
    trained = max(1, sum(length > 0 for length in lengths))
    if config.aggregation == "token":
        return [1.0 / max(1, sum(lengths))] * len(lengths)
    if config.aggregation == "sequence":
        return [1.0 / (trained * max(1, length)) for length in lengths]
    return [1.0 / (trained * constant_length)] * len(lengths)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log r [N], with gradient."""
    return (inputs.trainer_logprobs - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(inputs: LossInputs, values: Tensor) -> Tensor:
    """Mean of `values` [N] over the tokens of each sequence [S], on all ranks that hold some."""
    return inputs.sequence_sum(values) / inputs.sequence_sum(torch.ones_like(values)).clamp(min=1.0)


def policy_gradient(inputs: LossInputs, config: PolicyGradientConfig) -> tuple[Tensor, Tensor]:
    """-w A log p, w = min(r, truncate) without gradient: REINFORCE with truncated importance sampling.

    https://fengyao.notion.site/off-policy-rl. `importance` = "sequence": r is the product over the sequence's tokens
    (https://yingru.notion.site/271211a558b7808d8b12d403fd15edda);
    "none": w = 1. On-policy and without mismatch r = 1, and all three are plain REINFORCE.
    """
    log_weight = log_ratio(inputs).detach()
    if config.importance == "sequence":
        log_weight = inputs.sequence_sum(log_weight).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sequences]
    weight = torch.ones_like(log_weight) if config.importance == "none" else log_weight.exp().clamp(max=config.truncate)
    return -weight * inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(weight, dtype=torch.bool)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) and where it has no gradient, all [N].

    PPO (https://arxiv.org/abs/1707.06347). The minimum is the upper clip where A > 0 and the lower one where A < 0.
    """
    rises = advantages > 0
    loss = -advantages * torch.where(rises, ratio.clamp(max=1.0 + high), ratio.clamp(min=1.0 - low))
    return loss, torch.where(rises, ratio > 1.0 + high, (advantages < 0) & (ratio < 1.0 - low))


def clip(inputs: LossInputs, config: ClipConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with two widths: GRPO (https://arxiv.org/abs/2402.03300), DAPO
    (https://arxiv.org/abs/2503.14476)."""
    return clipped_surrogate(log_ratio(inputs).exp(), inputs.advantages, config.clip_low, config.clip_high)


def cispo(inputs: LossInputs, config: CispoConfig) -> tuple[Tensor, Tensor]:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log p, the clipped ratio without gradient (https://arxiv.org/abs/2506.13585)."""
    weight = log_ratio(inputs).detach().exp().clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -weight * inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(weight, dtype=torch.bool)


def gspo(inputs: LossInputs, config: GspoConfig) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of s p / sg(p), where s = (prod r)^(1/n) over the n tokens of the sequence, sg: without gradient.

    This is GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3). Its value at a token is that of s, its gradient s A d log p.
    GSPO's own gradient of s A is s A (1/n) sum d log p, once a sequence. With equal A and weight at all n tokens the sums over the
    sequence agree, sum_t w s A d log p_t = n w s A (1/n) sum_t d log p_t, and no gradient has to cross ranks.
    """
    s = sequence_means(inputs, log_ratio(inputs).detach()).exp()[inputs.sequences]
    ratio = s * (inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).exp()
    return clipped_surrogate(ratio, inputs.advantages, config.clip_low, config.clip_high)


def dppo(inputs: LossInputs, config: DppoConfig) -> tuple[Tensor, Tensor]:
    """-r A unless p has moved too far from q in the direction of A, + kl_tau (log r)^2 on every token.

    DPPO with binary total variation |p - q| (https://arxiv.org/abs/2602.04879); the squared log ratio as in Kimi k1.5
    (https://arxiv.org/abs/2501.12599), per token.
    """
    moved = inputs.trainer_logprobs.detach().exp() - inputs.logprobs.exp()
    masked = torch.where(inputs.advantages > 0, moved > config.mask_high, (inputs.advantages < 0) & (moved < -config.mask_low))
    log_r = log_ratio(inputs)
    return torch.where(masked, 0.0, -log_r.exp() * inputs.advantages) + config.kl_tau * log_r.square(), masked


def cross_entropy(inputs: LossInputs, config: CrossEntropyConfig) -> tuple[Tensor, Tensor]:
    """-A log p, whoever sampled the token."""
    return -inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(inputs.sequences, dtype=torch.bool)


@cache
def custom_function(name: str) -> Callable[[LossInputs, CustomConfig], tuple[Tensor, Tensor]]:
    """The function of `trainer.loss.function`, loaded once. Raises FunctionError."""
    return load_function("trainer.loss.function", name)


def custom(inputs: LossInputs, config: CustomConfig) -> tuple[Tensor, Tensor]:
    """What the user's function makes of the same inputs. Raises ValueError when that is not (loss [N] float, clipped [N] bool)."""
    result = custom_function(config.function)(inputs, config)
    shape = inputs.trainer_logprobs.shape
    sound = isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) and part.shape == shape for part in result)
    if not sound or not result[0].is_floating_point() or result[1].dtype != torch.bool:
        raise ValueError(
            f"trainer.loss.function {config.function}: return two tensors of shape {list(shape)}, the loss of each token (float) and "
            "whether it is clipped (bool), as the functions of rl/trainer/loss.py do"
        )
    return result


def own_term(inputs: LossInputs, config: LossSettings) -> tuple[Tensor, Tensor]:
    """The configured loss function's loss and clipped tokens."""
    match config:
        case PolicyGradientConfig():
            return policy_gradient(inputs, config)
        case ClipConfig():
            return clip(inputs, config)
        case CispoConfig():
            return cispo(inputs, config)
        case GspoConfig():
            return gspo(inputs, config)
        case DppoConfig():
            return dppo(inputs, config)
        case CrossEntropyConfig():
            return cross_entropy(inputs, config)
        case CustomConfig():
            return custom(inputs, config)
    raise AssertionError(f"no loss function for {type(config).__name__}")


def outside(log_values: Tensor, band: Band) -> Tensor:
    """Where exp(log_values) lies outside the band; its bounds are inside. Compared as logarithms, which do not overflow."""
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in band)
    return (log_values < low) | (log_values > high)


def outside_masks(inputs: LossInputs, config: LossSettings, log_r: Tensor) -> Tensor:
    """[N] bool: the token's r, its sequence's product of r, or the geometric mean of these lies outside its band.

    Tokens: IcePop (https://arxiv.org/abs/2510.18855). Sequences: masked importance sampling and the geometric mask
    (https://yingru.notion.site/271211a558b7808d8b12d403fd15edda).
    """
    masked = outside(log_r, config.token_mask)
    if config.sequence_mask != EVERYTHING:
        masked |= outside(inputs.sequence_sum(log_r), config.sequence_mask)[inputs.sequences]
    if config.geometric_mask != EVERYTHING:
        masked |= outside(sequence_means(inputs, log_r), config.geometric_mask)[inputs.sequences]
    return masked


def reference_kl(trainer_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(p || reference) from each sampled token [N], with gradient. x = log(reference / p).

    k3 = e^x - 1 - x is unbiased, as a value (http://joschu.net/blog/kl-approx.html); GRPO minimises it. k2 = x^2 / 2 is biased, but its
    gradient is that of the KL divergence on-policy (https://arxiv.org/abs/2506.09477). Only e^x can overflow: beyond x = 10 k3 is
    constant.
    """
    x = reference_logprobs - trainer_logprobs
    if estimator == "k2":
        return x.square() / 2
    x = x.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(x) - x


def with_teacher(inputs: LossInputs, coefficient: float) -> tuple[LossInputs, Tensor | None]:
    """Adds coefficient * (log teacher - log p), without gradient, to the advantages where there is a teacher; and log p - log teacher.

    On-policy distillation: the policy gradient with this advantage descends KL(p || teacher), token by token
    (https://arxiv.org/abs/2306.13649, https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    if inputs.teacher_logprobs is None:
        return inputs, None
    teacher_kl = inputs.trainer_logprobs.detach() - inputs.teacher_logprobs
    bonus = torch.where(teacher_kl.isnan(), 0.0, -coefficient * teacher_kl.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return replace(inputs, advantages=inputs.advantages + bonus), teacher_kl


def compute_loss(inputs: LossInputs, config: LossSettings) -> LossTerms:
    """The configured loss of each token, with the teacher, KL and entropy terms, and 0 for tokens that a mask on r leaves out.

    Such a token has no KL and no entropy term either: it is not trained. A token that the loss's own clip stops keeps both.
    """
    inputs, teacher_kl = with_teacher(inputs, config.teacher_coefficient)
    loss, clipped = own_term(inputs, config)
    kl = None
    if config.kl_coefficient:
        assert inputs.reference_logprobs is not None, "a KL coefficient needs a reference model"
        kl = reference_kl(inputs.trainer_logprobs, inputs.reference_logprobs, config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    if config.entropy_coefficient:
        assert inputs.entropies.requires_grad or not inputs.trainer_logprobs.requires_grad, "the entropies have no gradient"
        loss = loss - config.entropy_coefficient * inputs.entropies
    log_r = log_ratio(inputs).detach()
    masked = outside_masks(inputs, config, log_r)
    return LossTerms(
        loss=torch.where(masked, 0.0, loss),
        masked=masked | clipped,
        clipped=clipped,
        ratio=log_r.exp(),
        kl=torch.expm1(log_r) - log_r,
        reference_kl=None if kl is None else kl.detach(),
        teacher_kl=teacher_kl,
    )
