"""The parts that all losses share. Pure: tensors to tensors. docs/algorithms.md has the sources.

For a trained token, let p be its probability under the trainer, q that under the sampler
(inference), and A its advantage::

    r = exp(clamp(log p - log q, -10, 10))           importance ratio

r is the product of two factors: the change of the policy since the token was sampled, and the
numerical mismatch with the inference engine. Clips bound r and keep its gradient within the bounds.
Truncation and masks treat r as a constant. With several optimizer steps per batch, clipped losses
split r at o, the probability under the policy that the batch began with: they clip p / o, and use
o / q for weights and masks.

A loss function (see losses.py) returns one number per token, and which tokens its own clip leaves
without gradient. The objective is the sum of these numbers, weighted by `LossInputs.weights` (see
`minibatch_weights`), over all tokens of all samples, micro batches and ranks.

All results are finite for finite log-probabilities (the sampler's may be -inf): the clamp bounds r
by e^10 before anything multiplies it, sums over sequences are clamped as well or stay logarithms,
and masked tokens are dropped by selection, because multiplying by 0 would keep an inf or nan.
Beyond the clamp r has no gradient: a ratio of e^10 is a fault of an engine, not a step of the
policy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl.config.loss import EVERYTHING, Band, LossSettings
from rl.run_dir.numbers import MAX_LOG_RATIO


def k3(log_ratio: Tensor) -> Tensor:
    """e^x - 1 - x with x = log(a / b) at tokens sampled from b: an unbiased, non-negative estimate
    of KL(b || a).

    http://joschu.net/blog/kl-approx.html
    """
    return torch.expm1(log_ratio) - log_ratio


def reference_kl(trainer_logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Returns an estimate of KL(p || reference), with gradient, from x = log(reference / p).

    The value of k3 is unbiased; GRPO minimises it. k2 = x^2 / 2 is biased, but on-policy its
    gradient is that of the KL divergence (https://arxiv.org/abs/2506.09477). Only e^x can overflow,
    so k3 is constant beyond x = 10.
    """
    x = reference_logprobs - trainer_logprobs
    return x.square() / 2 if estimator == "k2" else k3(x.clamp(max=MAX_LOG_RATIO))


def teacher_advantages(
    trainer_logprobs: Tensor, teacher_logprobs: Tensor, coefficient: float
) -> Tensor:
    """Returns coefficient * (log teacher - log p), to be added to the advantage, without gradient;
    0 for tokens without a teacher, which are nan in `teacher_logprobs`.

    On-policy distillation: the policy gradient with this advantage descends KL(p || teacher), token
    by token (https://arxiv.org/abs/2306.13649,
    https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    gap = (teacher_logprobs - trainer_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(gap.isnan(), 0.0, coefficient * gap)


@dataclass(frozen=True)
class LossInputs:
    """The N loss tokens of one micro batch on this rank; the batch has S sequences. All are [N]
    float32 unless noted otherwise.

    With context parallelism a rank has only some tokens of a sequence; `sequence_sum` then sums
    over the ranks that share it.
    """

    trainer_logprobs: Tensor
    """log p, with gradient; over the ids that truncation kept, if it did (docs/algorithms.md)."""
    logprobs: Tensor
    """log q."""
    advantages: Tensor
    entropies: Tensor
    """Entropy of the distribution that `trainer_logprobs` are of, in nats; with gradient if
    entropy_coefficient is not 0."""
    weights: Tensor
    """Weight of the token's loss in the batch's loss, e.g. 1 / (loss tokens of the batch)."""
    sequences: Tensor
    """[N] int64: index of the token's sequence, in 0..S-1."""
    sequence_sum: Callable[[Tensor], Tensor]
    """[N] -> [S]: sums a value over each sequence's tokens on all ranks that hold some;
    gradients flow through."""
    reference_logprobs: Tensor | None = None
    """Log-probability under the frozen reference model."""
    teacher_logprobs: Tensor | None = None
    """Log-probability under the teacher; nan for tokens without one."""
    old_logprobs: Tensor | None = None
    """log o, for clipped and custom losses if a batch has several optimizer steps; else None."""


LossFunction = Callable[[LossInputs, Any], tuple[Tensor, Tensor]]
"""(inputs, settings) -> ([N] float32: loss of each token, with gradient; [N] bool: tokens that
its own clip leaves without gradient)."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of N tokens, and measurements of it. All are [N]; only `loss` has a gradient."""

    loss: Tensor
    """Float32 with gradient, to be weighted and summed; 0 where one of the masks on r applies."""
    clipped: Tensor
    """Bool: the loss's own clip removes the token's gradient."""
    masked: Tensor
    """Bool: whether a mask on r excludes the token; MASKED in the token log."""
    ratio: Tensor
    """r."""
    kl: Tensor
    """k3 of the log ratio that masks act on: an estimate of KL(q || p), or of KL(q || o) if o is
    known."""
    reference_kl: Tensor | None
    """The `kl_estimator`'s estimate of KL(p || reference), before the coefficient; None without
    a reference."""
    update_kl: Tensor | None
    """k3 of log p - log o: an estimate of KL(o || p), how far the batch's optimizer steps have
    moved the policy; None without o."""

    @property
    def without_gradient(self) -> Tensor:
        """Bool: the policy term has no gradient at the token, clipped or masked;
        `masked_fraction` counts these."""
        return self.clipped | self.masked


def compute_loss(inputs: LossInputs, config: LossSettings, function: LossFunction) -> LossTerms:
    """Computes the loss `function` of each token with the teacher, KL and entropy terms; 0 for
    tokens that a mask on r excludes.

    An excluded token is not trained at all, so it has no KL or entropy term either. A token that
    the loss's own clip stops keeps both.
    """
    kl = None
    if inputs.teacher_logprobs is not None:
        bonus = teacher_advantages(
            inputs.trainer_logprobs, inputs.teacher_logprobs, config.teacher_coefficient
        )
        inputs = replace(inputs, advantages=inputs.advantages + bonus)
    loss, clipped = function(inputs, config)
    if config.kl_coefficient:
        assert inputs.reference_logprobs is not None, "a KL coefficient needs a reference model"
        kl = reference_kl(inputs.trainer_logprobs, inputs.reference_logprobs, config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    if config.entropy_coefficient:
        assert inputs.entropies.requires_grad or not inputs.trainer_logprobs.requires_grad, (
            "the entropies have no gradient"
        )
        loss = loss - config.entropy_coefficient * inputs.entropies
    log_ratios = log_mask_ratio(inputs)
    masked = masked_tokens(inputs, config, log_ratios)
    return LossTerms(
        loss=torch.where(masked, 0.0, loss),
        clipped=clipped,
        masked=masked,
        ratio=log_ratio(inputs).detach().exp(),
        kl=k3(log_ratios),
        reference_kl=None if kl is None else kl.detach(),
        update_kl=None if inputs.old_logprobs is None else k3(log_update(inputs).detach()),
    )


def log_ratio(inputs: LossInputs) -> Tensor:
    """Returns log r [N], with gradient."""
    return (inputs.trainer_logprobs - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_update(inputs: LossInputs) -> Tensor:
    """Returns log p - log o [N], with gradient; log r if o is not known."""
    return log_ratio(
        inputs if inputs.old_logprobs is None else replace(inputs, logprobs=inputs.old_logprobs)
    )


def log_mask_ratio(inputs: LossInputs) -> Tensor:
    """Returns the log ratio [N] that masks act on, without gradient: log o - log q, or log r
    if o is not known."""
    first = inputs.trainer_logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return (first - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(inputs: LossInputs, values: Tensor) -> Tensor:
    """Returns the mean [S] of `values` [N] over the tokens of each sequence, on all ranks that
    hold some."""
    return inputs.sequence_sum(values) / inputs.sequence_sum(torch.ones_like(values)).clamp(min=1.0)


def outside(log_values: Tensor, band: Band) -> Tensor:
    """Returns where exp(log_values) lies outside the band, whose bounds are inclusive. Compares
    logarithms, which do not overflow."""
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in band)
    return (log_values < low) | (log_values > high)


def masked_tokens(inputs: LossInputs, config: LossSettings, log_r: Tensor) -> Tensor:
    """Returns [N] bool: the token's r, or the product or geometric mean of r over its sequence,
    lies outside its band.

    Tokens: IcePop (https://arxiv.org/abs/2510.18855). Sequences: masked importance sampling and the
    geometric mask (https://yingru.notion.site/271211a558b7808d8b12d403fd15edda).
    """
    masked = outside(log_r, config.token_mask)
    if config.sequence_mask != EVERYTHING:
        masked |= outside(inputs.sequence_sum(log_r), config.sequence_mask)[inputs.sequences]
    if config.geometric_mask != EVERYTHING:
        masked |= outside(sequence_means(inputs, log_r), config.geometric_mask)[inputs.sequences]
    return masked
