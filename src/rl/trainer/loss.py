"""The losses. Pure: tensors to tensors, one function each. docs/algorithms.md has them in one table with their sources.

Per trained token, with p the trainer's and q the sampler's (inference) probability of it and A its advantage::

    r = exp(clamp(log p - log q, -10, 10))           importance ratio

A loss function gives one number a token; what is minimised is their sum, weighted by `LossInputs.weights` (see `sample_weights`), over
all tokens of all samples, micro batches and ranks.

Everything is always finite: the clamp bounds r by e^10 before anything multiplies it, and a masked token is selected away, because a
product with 0 would keep an inf or nan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.messages import TrainingSample
from rl.trainer.loss_config import LossSettings, PolicyGradientConfig

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
    """What a loss makes of N tokens. All [N]."""

    loss: Tensor
    """Float32, to be weighted and summed, with gradient; 0 where masked."""
    masked: Tensor
    """Bool: the token has no gradient by the loss's own clip or mask, or by one of the masks on r."""
    ratio: Tensor
    """r, without gradient."""
    kl: Tensor
    """k3 = r - 1 - log r, without gradient: an unbiased, never negative estimate of KL(q || p) (http://joschu.net/blog/kl-approx.html)."""


def sample_weights(samples: Sequence[TrainingSample], config: LossSettings, constant_length: int) -> list[float]:
    """What each loss token of each sample counts in the batch's loss, by `config.aggregation`.

    N loss tokens in the batch, n_i of them in sample i, S samples that have any: token 1/N (DAPO, https://arxiv.org/abs/2503.14476);
    sequence 1/(S n_i) (GRPO, https://arxiv.org/abs/2402.03300); constant 1/(S constant_length) (Dr. GRPO,
    https://arxiv.org/abs/2503.20783). Masked tokens are counted.
    """
    lengths = [sum(sample.loss_mask) for sample in samples]
    trained = sum(length > 0 for length in lengths)
    if config.aggregation == "token":
        return [1.0 / max(1, sum(lengths))] * len(lengths)
    if config.aggregation == "sequence":
        return [1.0 / (trained * max(1, length)) for length in lengths]
    return [1.0 / (trained * constant_length)] * len(lengths)


def importance_ratio(inputs: LossInputs) -> Tensor:
    """r, without gradient."""
    return (inputs.trainer_logprobs.detach() - inputs.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def policy_gradient(inputs: LossInputs, config: PolicyGradientConfig) -> tuple[Tensor, Tensor]:
    """-min(r, truncate) A log p, the weight without gradient: REINFORCE with truncated importance sampling.

    https://fengyao.notion.site/off-policy-rl. On-policy and without mismatch r = 1, and it is plain REINFORCE.
    """
    weight = importance_ratio(inputs).clamp(max=config.truncate)
    return -weight * inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(weight, dtype=torch.bool)


def compute_loss(inputs: LossInputs, config: LossSettings) -> LossTerms:
    """The configured loss of each token, masked, with the KL, entropy and teacher terms."""
    assert isinstance(config, PolicyGradientConfig)
    ratio = importance_ratio(inputs)
    loss, masked = policy_gradient(inputs, config)
    low, high = config.token_mask
    masked = masked | (ratio < low) | (ratio > high)
    return LossTerms(torch.where(masked, 0.0, loss), masked, ratio, ratio - 1.0 - ratio.log())
