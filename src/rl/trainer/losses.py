"""The losses beside the default one, a pure function each, chosen by `type`. loss.py says what they have in common."""

from functools import cache

import torch
from torch import Tensor

from rl.config.loss import AnyLossConfig, CispoConfig, ClipConfig, CrossEntropyConfig, CustomConfig, DppoConfig, GspoConfig
from rl.system.functions import load_function
from rl.trainer.loss import LossFunction, LossInputs, log_ratio, policy_gradient, sequence_means


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
    """-A log p, by any sampler."""
    return -inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(inputs.sequences, dtype=torch.bool)


@cache
def custom_function(name: str) -> LossFunction:
    """The function of `trainer.loss.function`, loaded once. Raises RunError."""
    return load_function("trainer.loss.function", name)


def custom(inputs: LossInputs, config: CustomConfig) -> tuple[Tensor, Tensor]:
    """Calls the user's function with the same inputs. Raises ValueError unless it returns (loss [N] float, clipped [N] bool)."""
    result = custom_function(config.function)(inputs, config)
    shape = inputs.trainer_logprobs.shape
    sound = isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Tensor) and part.shape == shape for part in result)
    if not sound or not result[0].is_floating_point() or result[1].dtype != torch.bool:
        raise ValueError(
            f"trainer.loss.function {config.function}: return two tensors of shape {list(shape)}, the loss of each token (float) and "
            "whether it is clipped (bool), as the functions of rl/trainer/losses.py do"
        )
    return result


def loss_function(config: AnyLossConfig) -> LossFunction:
    """The loss function that the setting `type` names."""
    functions = (policy_gradient, clip, cispo, gspo, dppo, cross_entropy, custom)
    return {function.__name__: function for function in functions}[config.type]
