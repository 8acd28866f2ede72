"""The policy-gradient loss. Pure: tensors to tensors.

Per trained token, with p the trainer's and q the sampler's (inference) probability of it and A its advantage::

    r    = exp(clamp(log p - log q, -10, 10))           importance ratio
    w    = stop_gradient(min(r, ratio_cap))
    keep = ratio_low <= r <= ratio_high
    L    = -1/N * sum over tokens of keep * w * A * log p

N is the number of loss tokens of the whole batch, masked ones included, over all samples, micro batches and ranks. The gradient is
-1/N sum keep * w * A * grad log p: REINFORCE with truncated importance sampling, which corrects for tokens that older weights, or the
inference engine's other kernels, sampled. On-policy and without mismatch r = 1 and it is plain REINFORCE with the group mean as baseline.

It is always finite: the clamp bounds r by e^10 before anything multiplies it, a masked token is selected away (a product with 0 would
keep an inf or nan), and no gradient flows through r.

What differs from published GRPO (https://arxiv.org/abs/2402.03300): advantages are not divided by the group's standard deviation and
the loss is normalised by tokens of the whole batch instead of by each answer's length, as in Dr. GRPO
(https://arxiv.org/abs/2503.20783) and DAPO (https://arxiv.org/abs/2503.14476); there is one optimizer step a batch, so no clip on a
ratio between old and new policy and no reference-model KL term. w is truncated importance sampling (https://fengyao.notion.site/off-policy-rl),
keep is IcePop's two-sided mask (https://arxiv.org/abs/2510.18855).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.trainer.config import LossConfig

MAX_LOG_RATIO = 10.0
"""e^10 = 22026: far outside every sensible mask, far inside float32."""


@dataclass(frozen=True)
class LossStats:
    """Sums over tokens, without gradient; each a scalar tensor."""

    mismatch_kl: Tensor
    mismatch_kl_max: Tensor
    masked: Tensor
    ratio: Tensor


def policy_gradient_loss(trainer_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, LossStats]:
    """N times L above for the tokens given, and sums for the metrics.

    Args (all [N] float32): `trainer_logprobs` log p, with gradient; `logprobs` log q; `advantages` A. N may be 0.
    mismatch_kl is k3 = r - 1 - log r, an unbiased, never negative estimate of KL(q || p) (http://joschu.net/blog/kl-approx.html).
    """
    assert trainer_logprobs.shape == logprobs.shape == advantages.shape
    log_ratio = (trainer_logprobs.detach() - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    keep = (ratio >= config.ratio_low) & (ratio <= config.ratio_high)
    weights = torch.where(keep, ratio.clamp(max=config.ratio_cap) * advantages, 0.0)
    loss = -(weights * trainer_logprobs).sum()
    kl = ratio - 1.0 - log_ratio
    kl_max = kl.max() if kl.numel() else kl.new_zeros(())
    return loss, LossStats(kl.sum(), kl_max, (~keep).sum(), ratio.sum())
