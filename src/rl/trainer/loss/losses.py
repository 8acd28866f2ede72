"""The losses: one pure function each, chosen by `type`. See common.py for what they have in
common."""

import traceback
from functools import cache

import torch
from torch import Tensor

from rl.config.loss import (
    AnyLossConfig,
    CispoConfig,
    ClipConfig,
    ClippedSettings,
    CrossEntropyConfig,
    CustomConfig,
    DppoConfig,
    DroConfig,
    GspoConfig,
    PolicyGradientConfig,
)
from rl.system.errors import RunError
from rl.system.functions import UserFunction, returned
from rl.trainer.loss.common import (
    MAX_LOG_RATIO,
    LossFunction,
    LossInputs,
    log_mask_ratio,
    log_ratio,
    log_update,
    sequence_means,
)
from rl.trainer.measure.performance import is_out_of_memory


def none_clipped(inputs: LossInputs) -> Tensor:
    """Returns [N] bool, all False: no token is clipped."""
    return torch.zeros_like(inputs.sequences, dtype=torch.bool)


def policy_gradient(inputs: LossInputs, config: PolicyGradientConfig) -> tuple[Tensor, Tensor]:
    """-w A log p with w = min(r, truncate) without gradient: REINFORCE with truncated importance
    sampling.

    https://fengyao.notion.site/off-policy-rl. `importance` = "sequence": r is the product over the
    sequence's tokens (https://yingru.notion.site/271211a558b7808d8b12d403fd15edda); "none": w = 1.
    With r = 1 all three are plain REINFORCE.
    """
    log_weight = log_ratio(inputs).detach()
    if config.importance == "sequence":
        log_weight = inputs.sequence_sum(log_weight).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[
            inputs.sequences
        ]
    weight = log_weight.exp().clamp(max=config.truncate)
    if config.importance == "none":
        weight = torch.ones_like(weight)
    return -weight * inputs.advantages * inputs.trainer_logprobs, none_clipped(inputs)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, config: ClipConfig | GspoConfig
) -> tuple[Tensor, Tensor]:
    """Returns -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), at most -delta A if A < 0,
    and where it has no gradient; all [N].

    This is PPO (https://arxiv.org/abs/1707.06347). Its minimum acts as the upper clip if A > 0 and
    as the lower one if A < 0; delta is the bound of its dual clip
    (https://arxiv.org/abs/1912.09729).
    """
    low, high, rises = 1.0 - config.clip_low, 1.0 + config.clip_high, advantages > 0
    loss = -advantages * torch.where(rises, ratio.clamp(max=high), ratio.clamp(low, config.delta))
    return loss, torch.where(
        rises, ratio > high, (advantages < 0) & ((ratio < low) | (ratio > config.delta))
    )


def sampler_weight(inputs: LossInputs, config: ClippedSettings) -> Tensor | float:
    """Returns w = min(o / q, truncate) [N] without gradient, with o the policy that the batch began
    with; 1 if o is not known.

    This is decoupled PPO (https://arxiv.org/abs/2110.00641, https://arxiv.org/abs/2505.24298):
    clips bound p / o, and the mismatch of o and q gets its own, truncated weight
    (https://fengyao.notion.site/off-policy-rl). Without clip and truncation w p / o = r.
    """
    return (
        1.0
        if inputs.old_logprobs is None
        else log_mask_ratio(inputs).exp().clamp(max=config.truncate)
    )


def clip(inputs: LossInputs, config: ClipConfig) -> tuple[Tensor, Tensor]:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with separate low and high widths:
    GRPO (https://arxiv.org/abs/2402.03300), DAPO (https://arxiv.org/abs/2503.14476). If o is
    known, r = p / o; w: see `sampler_weight`."""
    loss, clipped = clipped_surrogate(log_update(inputs).exp(), inputs.advantages, config)
    return sampler_weight(inputs, config) * loss, clipped


def cispo(inputs: LossInputs, config: CispoConfig) -> tuple[Tensor, Tensor]:
    """-w clip(r, 1 - clip_low, 1 + clip_high) A log p, with the clipped ratio without gradient
    (https://arxiv.org/abs/2506.13585); r and w as in `clip`."""
    weight = log_update(inputs).detach().exp().clamp(
        1.0 - config.clip_low, 1.0 + config.clip_high
    ) * sampler_weight(inputs, config)
    return -weight * inputs.advantages * inputs.trainer_logprobs, none_clipped(inputs)


def gspo(inputs: LossInputs, config: GspoConfig) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of s p / sg(p), where s = (prod r)^(1/n) over the n tokens of the
    sequence and sg stops the gradient.

    This is GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3). Its gradient equals GSPO's
    if A and weight are equal at all tokens of the sequence; docs/algorithms.md has the derivation.
    No gradient has to cross ranks. A token whose log r is clamped has no gradient here, as in the
    product.

    If o is known (see `sampler_weight`), s is made from p / o and weighted by the truncated
    geometric mean of o / q.
    """
    log_r = log_update(inputs)
    s = sequence_means(inputs, log_r.detach()).exp()[inputs.sequences]
    loss, clipped = clipped_surrogate(s * (log_r - log_r.detach()).exp(), inputs.advantages, config)
    if inputs.old_logprobs is not None:
        weight = sequence_means(inputs, log_mask_ratio(inputs)).exp().clamp(max=config.truncate)
        loss = weight[inputs.sequences] * loss
    return loss, clipped


def dppo(inputs: LossInputs, config: DppoConfig) -> tuple[Tensor, Tensor]:
    """-r A, with r capped at delta if A < 0, and 0 where p has moved too far from q in A's
    direction; + kl_tau (log r)^2 on all tokens.

    This is DPPO with binary total variation |p - q| (https://arxiv.org/abs/2602.04879), which
    compares with the sampler whatever the number of optimizer steps. The dual clip delta is PPO's
    (https://arxiv.org/abs/1912.09729); the squared log ratio is that of Kimi k1.5
    (https://arxiv.org/abs/2501.12599), per token.
    """
    moved = inputs.trainer_logprobs.detach().exp() - inputs.logprobs.exp()
    rises, falls = inputs.advantages > 0, inputs.advantages < 0
    far = torch.where(rises, moved > config.mask_high, falls & (moved < -config.mask_low))
    log_r = log_ratio(inputs)
    r = log_r.exp()
    surrogate = -torch.where(falls, r.clamp(max=config.delta), r) * inputs.advantages
    loss = torch.where(far, 0.0, surrogate) + config.kl_tau * log_r.square()
    return loss, far | (falls & (r > config.delta))


def dro(inputs: LossInputs, config: DroConfig) -> tuple[Tensor, Tensor]:
    """-A log p + beta (log r)^2 / 2: the policy's part of Direct Reward Optimisation
    (https://arxiv.org/abs/2405.19107), with an advantage in place of reward minus learned value."""
    log_r = log_ratio(inputs)
    loss = 0.5 * config.beta * log_r.square() - inputs.advantages * inputs.trainer_logprobs
    return loss, none_clipped(inputs)


def cross_entropy(inputs: LossInputs, config: CrossEntropyConfig) -> tuple[Tensor, Tensor]:
    """-A log p, whatever the sampler."""
    return -inputs.advantages * inputs.trainer_logprobs, none_clipped(inputs)


@cache
def custom_function(name: str) -> UserFunction:
    """Loads the function of `trainer.loss.function`, once. Raises RunError if it cannot be
    loaded."""
    return UserFunction("trainer.loss.function", name, "inputs, config")


def custom(inputs: LossInputs, config: CustomConfig) -> tuple[Tensor, Tensor]:
    """Calls the user's function with the same inputs. Raises RunError with file and line if it
    raises or returns an invalid result."""
    function = custom_function(config.function)
    try:
        result = function(inputs, config)
    except RunError as error:
        cause = error.__cause__
        # not its own fault: memory ran out, or another rank died within `sequence_sum`
        if isinstance(cause, RuntimeError) and (
            is_out_of_memory(cause)
            or any(
                "/torch/distributed/" in f.filename
                for f in traceback.extract_tb(cause.__traceback__)
            )
        ):
            raise cause from None
        raise
    if fault := fault_of(result, inputs):
        raise function.wrong(
            fault,
            f"return two tensors of shape {list(inputs.trainer_logprobs.shape)}, the loss of each "
            "token (float, finite, with gradient) and whether it is clipped (bool), as "
            "docs/functions.md shows",
        )
    return result


def fault_of(result: object, inputs: LossInputs) -> str:
    """Describes what is wrong with a user's loss; empty if nothing is, or if the inputs are not
    finite either."""
    if isinstance(result, Tensor):
        return f"returned one tensor of shape {list(result.shape)}"
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(isinstance(tensor, Tensor) for tensor in result):
        return returned(result)
    (loss, clipped), wanted = result, inputs.trainer_logprobs
    for name, tensor in (("loss", loss), ("clipped", clipped)):
        if tensor.shape != wanted.shape or tensor.device != wanted.device:
            return (
                f"returned a {name} of shape {list(tensor.shape)} on {tensor.device}, not "
                f"{list(wanted.shape)} on {wanted.device}"
            )
    if not loss.is_floating_point() or clipped.dtype != torch.bool:
        return f"returned a loss of {loss.dtype} and a clipped of {clipped.dtype}"
    checked = [("a loss that", loss)]
    # That with respect to the inputs is cheap; that of the parameters would not show whose fault
    # it is.
    scores = [scores for scores in (wanted, inputs.entropies) if scores.requires_grad]
    if scores and bool(loss.isfinite().all()):
        gradients = loss.requires_grad and torch.autograd.grad(
            loss.sum(), scores, retain_graph=True, allow_unused=True
        )
        checked = [("a loss whose gradient", x) for x in gradients or () if x is not None]
        if not checked:
            return "returned a loss with no gradient for inputs.trainer_logprobs: was it detached?"
    if not all(bool(x.isfinite().all()) for x in (wanted, inputs.entropies, inputs.advantages)):
        return ""
    for what, values in checked:
        if len(bad := (~values.isfinite()).nonzero()):
            at = ", ".join(
                f"{name} {getattr(inputs, name)[bad[0]].item():g}"
                for name in ("trainer_logprobs", "logprobs", "advantages")
            )
            return (
                f"returned {what} is {values[bad[0]].item():g} at {len(bad)} of {len(values)} "
                f"tokens, the first with {at}"
            )
    return ""


def loss_function(config: AnyLossConfig) -> LossFunction:
    """Returns the loss function that the setting `type` names."""
    functions = (policy_gradient, clip, cispo, gspo, dppo, dro, cross_entropy, custom)
    return {function.__name__: function for function in functions}[config.type]
