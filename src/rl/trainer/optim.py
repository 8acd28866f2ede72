"""AdamW, its steps, and the gradient norm."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rl.config.trainer import OptimConfig
from rl.system.errors import RESTART, RunError

MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """Fused AdamW with its moments in host memory. An optimizer step copies each parameter's
    moments to its device and back, 16 bytes per weight in total; the device holds one
    parameter's moments at a time. Results are bit-identical to those with moments on the device."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if any(parameter.is_cuda for group in self.param_groups for parameter in group["params"]):
            # the copies to the host must end before anybody reads them
            torch.cuda.current_stream().synchronize()

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        kept = [local(state[name]) for name in MOMENTS]
        tensors = [local(tensor) for tensor in (parameter, parameter.grad)]
        moments = [torch.empty_like(tensors[0]).copy_(x, non_blocking=True) for x in kept]
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        beta1, beta2 = group["betas"]
        adamw(
            *([tensor] for tensor in (*tensors, *moments)),
            [],
            [local(state["step"])],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            maximize=False,
            **settings,
        )
        for moment, after in zip(kept, moments, strict=True):
            moment.copy_(after, non_blocking=True)


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Divides tensors by the mesh that they are sharded over: torch computes with lists of
    tensors of one mesh only."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(tensor)
    return list(groups.values())


def decays(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Returns whether a parameter of a module has weight decay: matrices do. Biases and norms do
    not, also those with a row per expert or head, nor do the rates of state spaces and kernels
    of one channel each, which are no matrices despite their dimensions. They are told by class
    and name, since sharding makes new parameters without the models' `_no_weight_decay`."""
    single_channel = isinstance(module, nn.Conv1d) and module.groups == module.in_channels
    exempt = single_channel or "norm" in type(module).__name__.lower()
    return parameter.ndim >= 2 and not exempt and name != "A_log" and not name.endswith("bias")


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Returns fused AdamW with its state already allocated, so that checkpoints can be loaded into
    it before the first step.

    Only what `decays` names has weight decay. It is always the fused version, because the unfused
    one differs in the last bit. Raises RunError if offloading is set without GPUs.
    """
    matrices = {
        parameter: decays(module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    parameters = [parameter for parameter in matrices if parameter.requires_grad]
    groups = []
    for of_a_mesh in by_mesh(parameters):
        for is_matrix in (True, False):
            if group := [parameter for parameter in of_a_mesh if matrices[parameter] == is_matrix]:
                groups.append({"params": group, "weight_decay": config.weight_decay * is_matrix})
    kind, memory = torch.optim.AdamW, {}
    if config.offload:
        if not all(parameter.is_cuda for parameter in parameters):
            raise RunError(
                "trainer.optim.offload moves the optimizer's state from GPU to CPU memory; "
                "without a GPU leave it false"
            )
        kind, memory = OffloadedAdamW, {"device": "cpu", "pin_memory": True}
    optimizer = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for parameter in parameters:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter, **memory) for name in MOMENTS}
        optimizer.state[parameter] = {"step": step} | moments
    return optimizer


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Returns the Euclidean norm of the gradient over all parameters and ranks. Every rank calls
    this."""
    return math.hypot(*map(norm_of, by_mesh(p.grad for p in parameters if p.grad is not None)))


def norm_of(gradients: list[Tensor]) -> float:
    """Returns the norm of gradients on one mesh. Those of divided experts are summed over all
    ranks at once: DTensor would sum over one dimension of the mesh after the other, and does not
    promise every rank the same bits then."""
    mesh = gradients[0].device_mesh if isinstance(gradients[0], DTensor) else None
    if mesh and "expert" in (mesh.mesh_dim_names or ()):
        squared = nn.utils.get_total_norm([local(gradient) for gradient in gradients]).double() ** 2
        dist.all_reduce(squared)
        # each copy of the model has added the same
        return math.sqrt(squared / math.prod(mesh.shape[:-2]))
    norm = nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales the gradient down to norm `max_norm` if its current `norm` is larger."""
    if norm > max_norm:
        gradients = [
            local(parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        torch._foreach_mul_(gradients, max_norm / norm)


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: OptimConfig,
    lr: float,
    batch: int,
    loss: float,
) -> float:
    """Applies the gradient of a loss, clipped to norm `max_grad_norm`, and clears it. Returns the
    norm before clipping.

    Raises RunError, which names the batch, if norm or loss is not finite; nothing has been changed
    then.
    """
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if not (math.isfinite(norm) and math.isfinite(loss)):
        raise RunError(
            f"step {batch}: loss {loss}, gradient norm {norm}; the step is discarded. If that "
            "repeats itself, look at its samples, or lower trainer.optim.lr",
            RESTART,
        )
    clip_gradients(parameters, norm, config.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return norm
