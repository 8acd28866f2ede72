"""How evenly a mixture of experts uses its experts: the tokens that each layer's router sends to
each of them in training."""

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rl.trainer.parallel.experts import experts_of
from rl.trainer.parallel.world import World


def count_tokens(model: PreTrainedModel, device: torch.device) -> None:
    """Makes the experts of each layer count the tokens that they get in passes with a gradient.
    Call it before experts are divided."""
    for experts in experts_of(model).values():
        experts.load = torch.zeros(experts.num_experts, dtype=torch.int64, device=device)
        experts.register_forward_pre_hook(count)


def count(experts: Any, inputs: tuple[Any, ...]) -> None:
    """Counts the experts of each token, [T, k], the second of three inputs."""
    if torch.is_grad_enabled() and len(inputs) == 3 and inputs[1].dtype == torch.int64:
        chosen = inputs[1].flatten()
        experts.load.scatter_add_(0, chosen, torch.ones_like(chosen))


def load_metrics(model: PreTrainedModel, world: World) -> dict[str, float]:
    """Returns the metrics of all ranks' tokens since the last call; empty for a model without
    experts. Every rank calls this."""
    layers = [experts.load for experts in experts_of(model).values()]
    if not layers:
        return {}
    counts = world.reduce(torch.stack(layers).double(), dist.ReduceOp.SUM)
    for load in layers:
        load.zero_()
    busiest = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
    return {
        "experts/load_mean": float(busiest.mean()),
        "experts/load_max": float(busiest.max()),
        "experts/unused": float((counts == 0).double().mean()),
    }
