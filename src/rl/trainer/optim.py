"""AdamW and its steps, the learning-rate schedule, and the gradient norm."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.config.trainer import OptimConfig
from rl.system.errors import RESTART, RunError


def lr_at(step: int, config: OptimConfig, max_steps: int) -> float:
    """Learning rate of step `step` (the first is 1), whose optimizer steps all have it.

    Warm-up: lr * step / warmup_steps for step <= warmup_steps. Then with f = (step - warmup_steps) / (max_steps - warmup_steps), the
    fraction of the rest that is done: constant lr; linear lr * (1 - f); cosine lr * (1 + cos(pi f)) / 2. Decay is measured at the
    start of a step (f = 0 at the first), so that no step has learning rate 0.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    rest = max(1, max_steps - config.warmup_steps)
    fraction = min(1.0, (step - config.warmup_steps - 1) / rest)
    if config.schedule == "linear":
        return config.lr * (1.0 - fraction)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1.0 + math.cos(math.pi * fraction))
    return config.lr


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW with its state allocated at once, so that a checkpoint loads into it as it saves from it.

    Vectors (norms, biases) are not decayed. Fused and unfused AdamW differ in the last bit: a run keeps to one of them.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Euclidean norm of the whole gradient over all parameters and ranks. Every rank calls this."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales the gradient, whose norm is `norm`, down to `max_norm` if it is above."""
    if norm > max_norm:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, max_norm / norm)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimConfig, lr: float, batch: int, loss: float) -> float:
    """Applies the gradient of a loss, scaled down if its norm is above `max_grad_norm`, and clears it. Returns that norm.

    Raises RunError, which names the batch, before anything is changed, if norm or loss is not finite.
    """
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        found = f"step {batch}: loss {loss}, gradient norm {norm}"
        raise RunError(f"{found}; nothing of the step is kept. Its file in rollouts/ shows what the batch was made of", RESTART)
    clip_gradients(parameters, norm, config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm
