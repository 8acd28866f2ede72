"""Estimates, at each of N sampled tokens, KL divergences of the policy from other models. Pure:
tensors to tensors, all [N] in nats."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0
"""e^10 = 22026 is far beyond every sensible mask and far within the range of float32."""


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
