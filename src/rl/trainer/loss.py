"""What every loss has in common. Pure: tensors to tensors. docs/algorithms.md has the sources.

Per trained token, with p the trainer's and q the sampler's (inference) probability of it and A its advantage::

    r = exp(clamp(log p - log q, -10, 10))           importance ratio

It says how far the policy has moved since the token was sampled, times how differently the inference engine computes. Clips act on r
with its gradient; truncation and masks act on r without gradient. With several optimizer steps a batch the clipped losses split r at o,
the policy that the batch began with: p / o is clipped, o / q weighs and masks.

A loss function (they are in losses.py) gives one number a token, and which tokens its own clip leaves without gradient. What is minimised
is their sum, weighted by `LossInputs.weights` (see minibatches.py), over all tokens of all samples, micro batches and ranks.

Everything is always finite for finite log-probabilities (the sampler's may be -inf): the clamp bounds r by e^10 before anything multiplies
it, sums over sequences are clamped as well or stay logarithms, and a masked token is selected away, because a product with 0 would keep
an inf or nan. Where a bound of the clamp is passed there is no gradient through r: no policy moves that far in a step, engines do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl.config.loss import EVERYTHING, Band, LossSettings
from rl.trainer.kl import MAX_LOG_RATIO, k3, reference_kl, teacher_terms


@dataclass(frozen=True)
class LossInputs:
    """N loss tokens of whole sequences, S in the batch, as one rank has them. All [N] float32 unless noted otherwise.

    With context parallelism a rank has only some tokens of a sequence; `sequence_sum` then sums over the ranks that share it.
    """

    trainer_logprobs: Tensor
    """log p, with gradient."""
    logprobs: Tensor
    """log q."""
    advantages: Tensor
    entropies: Tensor
    """Entropy of the trainer's distribution at the token, nats; with gradient if entropy_coefficient is not 0."""
    weights: Tensor
    """Weight of the token's loss in the batch's: 1 / (loss tokens of the batch), for example."""
    sequences: Tensor
    """[N] int64, which of the S sequences a token belongs to."""
    sequence_sum: Callable[[Tensor], Tensor]
    """[N] -> [S], the sum of a value over each sequence's tokens, on all ranks that hold some; gradients flow through."""
    reference_logprobs: Tensor | None = None
    """log-probability under the frozen reference model."""
    teacher_logprobs: Tensor | None = None
    """log-probability under the teacher; nan where there is none."""
    old_logprobs: Tensor | None = None
    """log o, for a loss that is clipped or of the user's where a batch has several optimizer steps; else None."""


LossFunction = Callable[[LossInputs, Any], tuple[Tensor, Tensor]]
"""(inputs, its settings) -> loss of each token [N] float32 with gradient; [N] bool, which tokens its own clip leaves without gradient."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of N tokens and what is measured of them. All [N], and without gradient but for `loss`."""

    loss: Tensor
    """Float32, to be weighted and summed, with gradient; 0 where one of the masks on r applies."""
    masked: Tensor
    """Bool: the policy's own term has no gradient at the token, by the loss's own clip or by one of the masks on r."""
    ratio: Tensor
    """r."""
    kl: Tensor
    """k3 of the log ratio that masks act on: an estimate of KL(q || p), or of KL(q || o)."""
    reference_kl: Tensor | None
    """The estimate of KL(p || reference) by `kl_estimator`, before the coefficient; None without a reference."""
    teacher_kl: Tensor | None
    """log p - log teacher, whose mean over sampled tokens is KL(p || teacher); nan where there is no teacher, None if nowhere."""
    update_kl: Tensor | None = None
    """k3 of log p - log o: an estimate of KL(o || p), how far the batch's optimizer steps have moved the policy; None without o."""
    clipped: Tensor | None = None
    """Bool: the loss's own clip stops the token."""
    outside: Tensor | None = None
    """Bool: one of the masks on r leaves it out."""


def compute_loss(inputs: LossInputs, config: LossSettings, function: LossFunction) -> LossTerms:
    """The loss `function` of each token, with the teacher, KL and entropy terms, and 0 for tokens that a mask on r leaves out.

    Such a token has no KL and no entropy term either: it is not trained. A token that the loss's own clip stops keeps both.
    """
    kl = teacher_kl = None
    if inputs.teacher_logprobs is not None:
        bonus, teacher_kl = teacher_terms(inputs.trainer_logprobs, inputs.teacher_logprobs, config.teacher_coefficient)
        inputs = replace(inputs, advantages=inputs.advantages + bonus)
    loss, clipped = function(inputs, config)
    if config.kl_coefficient:
        assert inputs.reference_logprobs is not None, "a KL coefficient needs a reference model"
        kl = reference_kl(inputs.trainer_logprobs, inputs.reference_logprobs, config.kl_estimator)
        loss = loss + config.kl_coefficient * kl
    if config.entropy_coefficient:
        assert inputs.entropies.requires_grad or not inputs.trainer_logprobs.requires_grad, "the entropies have no gradient"
        loss = loss - config.entropy_coefficient * inputs.entropies
    log_mismatch = mismatch(inputs)
    masked = outside_masks(inputs, config, log_mismatch)
    return LossTerms(
        loss=torch.where(masked, 0.0, loss),
        masked=masked | clipped,
        ratio=log_ratio(inputs).detach().exp(),
        kl=k3(log_mismatch),
        reference_kl=None if kl is None else kl.detach(),
        teacher_kl=teacher_kl,
        update_kl=None if inputs.old_logprobs is None else k3(log_update(inputs).detach()),
        clipped=clipped,
        outside=masked,
    )


def log_ratio(inputs: LossInputs) -> Tensor:
    """log r [N], with gradient."""
    return (inputs.trainer_logprobs - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_update(inputs: LossInputs) -> Tensor:
    """log p - log o [N], with gradient; where o is not known, log r."""
    return log_ratio(inputs if inputs.old_logprobs is None else replace(inputs, logprobs=inputs.old_logprobs))


def mismatch(inputs: LossInputs) -> Tensor:
    """The log ratio [N] that masks act on, without gradient: log o - log q where o is known, else log r."""
    first = inputs.trainer_logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    return (first - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_means(inputs: LossInputs, values: Tensor) -> Tensor:
    """Mean of `values` [N] over the tokens of each sequence [S], on all ranks that hold some."""
    return inputs.sequence_sum(values) / inputs.sequence_sum(torch.ones_like(values)).clamp(min=1.0)


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
