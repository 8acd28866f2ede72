"""Experts. Their load: the tokens that each layer's router sends to each of them in training.
Expert parallelism: each rank holds some of the experts of every layer, and tokens travel to their
experts and back.

The ranks of an expert group are neighbours, and hold all experts together. Ranks of several groups
that would hold the same experts shard them (FSDP), and sum their gradients. All tokens of a group
come to its experts, so the sum of the groups' gradients is whole. The dispatch of tokens is
transformers' own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import (
    EpDispatchExpertsParallel,
    replace_layer_number_by_wildcard,
)

from rl.system.errors import RunError
from rl.trainer.parallel.world import World


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Returns the modules, by name, that hold all routed experts of a layer as stacked matrices,
    and whose computation transformers can replace."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
    }


def num_chosen(config: PreTrainedConfig) -> int:
    """Returns the number of experts of a token; 0 if the config does not tell."""
    keys = ("num_experts_per_tok", "top_k_experts", "moe_topk")
    counts = (getattr(config, key, None) for key in keys)
    return next((count for count in counts if isinstance(count, int)), 0)


def check_experts(model: PreTrainedModel, world: World) -> None:
    """Raises RunError unless the experts of a model, which may be on the meta device, can be
    divided as `world` says."""
    if not world.experts:
        return
    name, experts, groups = type(model).__name__, experts_of(model), world.experts["expert"].size()
    setting = f"trainer.expert_parallel = {groups}"
    if not experts:
        raise RunError(
            f"{setting}: {name} has no experts that transformers could divide; set it to 1"
        )
    if any(
        model.ep_plan.get(replace_layer_number_by_wildcard(module)) != "ep_dispatch_experts"
        for module in experts
    ):
        raise RunError(
            f"{setting}: transformers has no plan that sends tokens to the experts of "
            f"{name}; set it to 1"
        )
    for module in experts.values():
        for parameter in module.parameters(recurse=False):
            count, shards = len(parameter), world.experts["shard"].size()
            if count % groups:
                divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                raise RunError(
                    f"{setting} does not divide the {count} experts of {name}; set one of "
                    f"{divisors}"
                )
            if shard_of(parameter, world.experts).dim and parameter.shape[1] % shards:
                raise RunError(
                    f"{setting}: {shards} ranks share {count // groups} experts of {name}, "
                    "but divide neither their number nor their rows "
                    f"({parameter.shape[1]}); set a larger trainer.expert_parallel or "
                    "trainer.dp_replicate"
                )


def shard_of(parameter: Tensor, mesh: DeviceMesh) -> Shard:
    """Returns along which dimension FSDP shards a parameter [experts, ...] over the ranks that
    hold the same experts: whole experts if that is even, else the rows of each, because FSDP's
    uneven shards of a divided dimension would be wrong."""
    return Shard(int(len(parameter) % (mesh["shard"].size() * mesh["expert"].size()) > 0))


def placements_of(parameter: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Returns the placements of a parameter [experts, ...] on a mesh of (shard, expert) or
    (replicate, shard, expert), as FSDP makes them: first divided over the expert groups, then
    within."""
    inner: Placement = shard_of(parameter, mesh)
    if inner == Shard(0):
        inner = _StridedShard(0, split_factor=mesh["expert"].size())
    return (*(Replicate() for _ in range(mesh.ndim - 2)), inner, Shard(0))


def dispatch_tokens(model: PreTrainedModel, world: World) -> None:
    """Makes each layer send its tokens to their experts' ranks. Every rank of an expert group
    then calls every layer at the same time."""
    for experts in experts_of(model).values() if world.experts else ():
        experts.num_experts //= world.experts["expert"].size()
        experts.first_expert = experts.num_experts * world.experts["expert"].get_local_rank()
        EpDispatchExpertsParallel().install_forward(experts, world.experts["expert"])


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
