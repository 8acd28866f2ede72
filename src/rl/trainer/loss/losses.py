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
    LossFunction,
    LossInputs,
    log_ratio,
    log_update,
    mismatch,
    sequence_means,
)
from rl.trainer.loss.kl import MAX_LOG_RATIO
from rl.trainer.measure.memory import is_out_of_memory


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
    weight = (
        torch.ones_like(log_weight)
        if config.importance == "none"
        else log_weight.exp().clamp(max=config.truncate)
    )
    return -weight * inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(
        weight, dtype=torch.bool
    )


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
    return 1.0 if inputs.old_logprobs is None else mismatch(inputs).exp().clamp(max=config.truncate)


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
    return -weight * inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(
        weight, dtype=torch.bool
    )


def gspo(inputs: LossInputs, config: GspoConfig) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of s p / sg(p), where s = (prod r)^(1/n) over the n tokens of the
    sequence and sg stops the gradient.

    This is GSPO-token (https://arxiv.org/abs/2507.18071, section 4.3). At a token its value is that
    of s and its gradient s A d log p. GSPO's own gradient of s A is s A (1/n) sum d log p, once per
    sequence. With equal A and weight at all n tokens the sums over the sequence agree, sum_t w s A
    d log p_t = n w s A (1/n) sum_t d log p_t, and no gradient has to cross ranks. A token whose log
    r is clamped has no gradient here, as it has none in the product.

    If o is known (see `sampler_weight`), s is made from p / o and weighted by the truncated
    geometric mean of o / q.
    """
    log_r = log_update(inputs)
    s = sequence_means(inputs, log_r.detach()).exp()[inputs.sequences]
    loss, clipped = clipped_surrogate(s * (log_r - log_r.detach()).exp(), inputs.advantages, config)
    if inputs.old_logprobs is None:
        return loss, clipped
    return sequence_means(inputs, mismatch(inputs)).exp().clamp(max=config.truncate)[
        inputs.sequences
    ] * loss, clipped


def dppo(inputs: LossInputs, config: DppoConfig) -> tuple[Tensor, Tensor]:
    """-r A, with r capped at delta if A < 0, and 0 where p has moved too far from q in A's
    direction; + kl_tau (log r)^2 on all tokens.

    This is DPPO with binary total variation |p - q| (https://arxiv.org/abs/2602.04879), which
    compares with the sampler whatever the number of optimizer steps. The dual clip delta is PPO's
    (https://arxiv.org/abs/1912.09729); the squared log ratio is that of Kimi k1.5
    (https://arxiv.org/abs/2501.12599), per token.
    """
    moved = inputs.trainer_logprobs.detach().exp() - inputs.logprobs.exp()
    moved_too_far = torch.where(
        inputs.advantages > 0,
        moved > config.mask_high,
        (inputs.advantages < 0) & (moved < -config.mask_low),
    )
    log_r = log_ratio(inputs)
    ratio = torch.where(inputs.advantages < 0, log_r.exp().clamp(max=config.delta), log_r.exp())
    loss = (
        torch.where(moved_too_far, 0.0, -ratio * inputs.advantages) + config.kl_tau * log_r.square()
    )
    return loss, moved_too_far | ((inputs.advantages < 0) & (log_r.exp() > config.delta))


def dro(inputs: LossInputs, config: DroConfig) -> tuple[Tensor, Tensor]:
    """-A log p + beta (log r)^2 / 2: the policy's part of Direct Reward Optimisation
    (https://arxiv.org/abs/2405.19107), with an advantage in place of reward minus learned value."""
    log_r = log_ratio(inputs)
    loss = 0.5 * config.beta * log_r.square() - inputs.advantages * inputs.trainer_logprobs
    return loss, torch.zeros_like(inputs.sequences, dtype=torch.bool)


def cross_entropy(inputs: LossInputs, config: CrossEntropyConfig) -> tuple[Tensor, Tensor]:
    """-A log p, whatever the sampler."""
    return -inputs.advantages * inputs.trainer_logprobs, torch.zeros_like(
        inputs.sequences, dtype=torch.bool
    )


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
        if isinstance(error.__cause__, RuntimeError) and not_its_own(error.__cause__):
            raise error.__cause__ from None
        raise
    if fault := form_fault(result, inputs) or value_fault(result[0], inputs):
        wanted = (
            f"return two tensors of shape {list(inputs.trainer_logprobs.shape)}, the loss of "
            "each token (float, finite, with gradient)"
        )
        raise function.wrong(
            fault, f"{wanted} and whether it is clipped (bool), as docs/functions.md shows"
        )
    return result


def not_its_own(error: RuntimeError) -> bool:
    """Whether an error is not the user function's fault: memory ran out, or another rank died
    within `sequence_sum`."""
    frames = traceback.extract_tb(error.__traceback__)
    return is_out_of_memory(error) or any(
        "/torch/distributed/" in frame.filename for frame in frames
    )


def form_fault(result: object, inputs: LossInputs) -> str:
    """Describes what is wrong with the type, shape, dtype or device of a user's loss; empty if
    nothing is."""
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and all(isinstance(part, Tensor) for part in result)
    ):
        return (
            f"returned one tensor of shape {list(result.shape)}"
            if isinstance(result, Tensor)
            else returned(result)
        )
    wanted = inputs.trainer_logprobs
    for name, part in zip(("loss", "clipped"), result, strict=True):
        if part.shape != wanted.shape or part.device != wanted.device:
            return (
                f"returned a {name} of shape {list(part.shape)} on {part.device}, not "
                f"{list(wanted.shape)} on {wanted.device}"
            )
    loss, clipped = result
    if not loss.is_floating_point() or clipped.dtype != torch.bool:
        return f"returned a loss of {loss.dtype} and a clipped of {clipped.dtype}"
    return ""


def value_fault(loss: Tensor, inputs: LossInputs) -> str:
    """Describes what is wrong with the values or gradient of a user's loss; empty if nothing is, or
    if the inputs are not finite either.

    The gradient with respect to the inputs is cheap; that of the parameters, computed later, would
    not show whose fault it is.
    """
    fault = first_not_finite("a loss that", loss, inputs)
    scores = [
        scores for scores in (inputs.trainer_logprobs, inputs.entropies) if scores.requires_grad
    ]
    if scores and not fault:
        found = (
            torch.autograd.grad(loss.sum(), scores, retain_graph=True, allow_unused=True)
            if loss.requires_grad
            else ()
        )
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients:
            return "returned a loss with no gradient for inputs.trainer_logprobs: was it detached?"
        faults = (
            first_not_finite("a loss whose gradient", gradient, inputs) for gradient in gradients
        )
        fault = next(filter(None, faults), "")
    given = (inputs.trainer_logprobs, inputs.entropies, inputs.advantages)
    return fault if fault and all(bool(values.isfinite().all()) for values in given) else ""


def first_not_finite(what: str, values: Tensor, inputs: LossInputs) -> str:
    """Describes where values are nan or infinite, with the inputs there; empty if all are
    finite."""
    bad = ~values.isfinite()
    if not bool(bad.any()):
        return ""
    i = int(bad.nonzero()[0])
    there = ", ".join(
        f"{name} {getattr(inputs, name)[i].item():g}"
        for name in ("trainer_logprobs", "logprobs", "advantages")
    )
    return (
        f"returned {what} is {values[i].item():g} at {int(bad.sum())} of {len(values)} tokens, "
        f"the first with {there}"
    )


def loss_function(config: AnyLossConfig) -> LossFunction:
    """Returns the loss function that the setting `type` names."""
    functions = (policy_gradient, clip, cispo, gspo, dppo, dro, cross_entropy, custom)
    return {function.__name__: function for function in functions}[config.type]
