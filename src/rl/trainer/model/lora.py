"""Low-rank adapters: y = W x + (alpha / rank) B A x, where W is frozen and B starts at 0 (Hu et
al., https://arxiv.org/abs/2106.09685).

The layers, their names and the files are peft's. The base model is kept in the dtype that it
computes in, the adapters are float32 masters; both are held like the weights of any model, so norm,
clipping, optimizer and checkpoints need no special case. peft is imported only where it is used, so
runs without adapters do not need it.
"""

import copy
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear
from transformers.pytorch_utils import Conv1D

from rl.config.trainer import ALL_LINEAR, EXPERTS, LoraConfig
from rl.system.errors import RunError
from rl.trainer.parallel.experts import experts_of

ADAPTER = "default"
"""peft's name for a single adapter; it is part of parameter names, but not of names in files."""
WEIGHTS_FILE = "adapter_model.safetensors"
BYPASSED = re.compile(r"\b(mamba|mixer)\.(dt|out)_proj$|\bindexer\.|\bcorrection_coefs$")
"""Layers that get no adapter: kernels of state spaces read their weights directly, they choose
tokens without a gradient, or Gemma 3n clamps their weight."""


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes the model and gives its target layers trainable float32 adapters. Call it before the
    model is sharded.

    A is drawn from torch's generator, so ranks with the same seed get the same adapters. Raises
    RunError for invalid targets.
    """
    import peft

    targets, stacked = target_layers(model, config.targets)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        target_parameters=stacked or None,
        # GPT-2's layers, with transposed weights
        fan_in_fan_out=bool(targets) and isinstance(model.get_submodule(targets[0]), Conv1D),
    )
    with as_they_are(model):
        peft.inject_adapter_in_model(settings, model, ADAPTER)
    adapt_experts(model)
    for parameter in trainable(model).values():
        parameter.data = parameter.data.float()  # peft gives them the base's dtype


@contextmanager
def as_they_are(model: PreTrainedModel) -> Iterator[None]:
    """Context in which peft gives adapters to the layers that it is told. The meshes of
    parameters have no names: it takes a named one (HSDP's) for tensor parallelism, and gives
    adapters the shape of a shard. The model has no type: of many mixtures it takes the shared
    experts' `gate_proj` for that of the routed ones in transformers 4."""
    meshes = {
        id(mesh): mesh
        for parameter in model.parameters()
        if isinstance(parameter, DTensor) and (mesh := parameter.device_mesh)
    }
    names = [(mesh, mesh._mesh_dim_names) for mesh in meshes.values()]
    for mesh in meshes.values():
        mesh._mesh_dim_names = None
    try:
        with patch.dict(vars(model.config), model_type=""):
            yield
    finally:
        for mesh, before in names:
            mesh._mesh_dim_names = before


def target_layers(model: PreTrainedModel, targets: list[str] | str) -> tuple[list[str], list[str]]:
    """Returns the names of the layers and of the stacked matrices of experts that get an adapter:
    all linear layers but the head for all-linear, all such matrices for experts, and layers whose
    names end with another target.

    A router that also chooses the experts (Llama 4, PhiMoE) gets none: peft cannot add to its
    result. Nor does a layer whose weight is used without it. Raises RunError for a target without a
    layer, and names the targets that exist.
    """
    targets = [targets] if isinstance(targets, str) else targets
    head = model.get_output_embeddings()
    every = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and "Router" not in type(module).__name__
    ]
    linear, bypassed = (
        [name for name in every if not BYPASSED.search(name)],
        last_names(filter(BYPASSED.search, every)),
    )
    fused = last_names(
        name for name, p in model.named_parameters() if p.ndim == 3 and not name.endswith(".weight")
    )
    stacked = [
        f"{path}.{name}"
        for path, module in experts_of(model).items()
        for name, p in module.named_parameters()
        if p.ndim == 3
    ]
    also = f'; "{EXPERTS}" in trainer.lora.targets trains them' if stacked else ""
    if fused and EXPERTS not in targets:
        warn(
            f"{', '.join(fused)} hold all experts of a layer in one parameter and stay frozen{also}"
        )
    if bypassed and ALL_LINEAR in targets:
        warn(
            f"{', '.join(bypassed)} get no adapter, which would never learn: the model does "
            "not compute with the layer as it is"
        )
    if EXPERTS in targets and not stacked:
        raise RunError(
            f"trainer.lora.targets: {type(model).__name__} has no experts that can have "
            f"adapters; leave {EXPERTS} out"
        )
    for target in (target for target in targets if target not in (EXPERTS, ALL_LINEAR)):
        if not any(is_named(name, target) for name in linear):
            raise RunError(
                f"trainer.lora.targets: {target} is not a linear layer of "
                f"{type(model).__name__} that can have an adapter (embedding and "
                "head cannot, nor what holds all experts of a layer); choose from "
                f"{', '.join(last_names(linear))}, or {ALL_LINEAR}{also}"
            )
    chosen = [
        name
        for name in linear
        if ALL_LINEAR in targets or any(is_named(name, target) for target in targets)
    ]
    return chosen, stacked if EXPERTS in targets else []


def last_names(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def warn(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"WARNING: trainer.lora: {message}", file=sys.stderr, flush=True)


def warn_of_untrained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warns of layers whose adapters no optimizer step has changed, because no gradient has reached
    them: the model reads the layer's weight and never calls the layer. Call it after a step."""
    names = [
        name.partition(".lora_B.")[0]
        for name, parameter in trainable(model).items()
        if ".lora_B." in name and not optimizer.state[parameter]["step"]
    ]
    if names:
        warn(
            f"the adapters of {', '.join(last_names(names))} ({len(names)} layers) got no gradient "
            "in the first step. Unless they are experts that saw no token, they never learn: leave "
            "them out of trainer.lora.targets"
        )


def adapt_experts(model: nn.Module) -> None:
    """Makes experts compute with the adapters that peft gave to their stacked matrices.

    peft itself would add the product of the two factors to each matrix, which autograd would
    keep: a second copy of all experts."""
    from peft.tuners.lora.layer import ParamWrapper

    adapters: dict[nn.Module, dict[str, Any]] = defaultdict(dict)
    for layer in layers(model).values():
        if isinstance(layer, ParamWrapper):
            # one wraps the other, and the innermost the experts
            layer.forward = layer.base_layer.__call__
            adapters[layer.get_base_layer()][layer.parameter_name] = layer
    for experts, of_matrix in adapters.items():
        experts.forward = partial(adapted_experts, experts, of_matrix)


def adapted_experts(
    experts: Any, adapters: dict[str, Any], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Returns the sum of the chosen experts' results for each token, [T, D], as transformers'
    `grouped_mm` computes it, each matrix with its adapter. `hidden`: [T, D]; `index`, `weights`:
    [T, k], each token's experts, among those that this rank holds, and their weights.
    """
    chosen, order = index.flatten().sort(stable=True)
    ends = torch.bincount(chosen, minlength=experts.num_experts).cumsum(0, dtype=torch.int32)

    def product(inputs: Tensor, name: str) -> Tensor:
        bias = getattr(experts, f"{name}_bias")[chosen] if experts.has_bias else None
        result = _grouped_linear(inputs, getattr(experts, name), ends, bias, experts.is_transposed)
        if name not in adapters or adapters[name].disable_adapters:
            return result
        a, b = factors(
            adapters[name], getattr(experts, "first_expert", 0), experts.num_experts, inputs.dtype
        )
        return result + adapters[name].scaling[ADAPTER] * _grouped_linear(
            _grouped_linear(inputs, a, ends), b, ends
        )

    inner = product(
        hidden[order // index.shape[1]], "gate_up_proj" if experts.has_gate else "up_proj"
    )
    result = product(
        experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner), "down_proj"
    )
    result = (result * weights.flatten()[order, None])[order.argsort()]
    return result.view(*index.shape, -1).sum(1).to(hidden.dtype)


def factors(adapter: Any, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns A [count, rank, in] and B [count, out, rank] of the experts from `first` on, out
    of peft's [experts * rank, in] and [out, rank * experts], with zeros up to a multiple of 8
    ranks, as grouped_mm's alignment wants it."""
    a, b = adapter.lora_A[ADAPTER].weight, adapter.lora_B[ADAPTER].weight
    a = a.view(adapter.num_experts, -1, a.shape[1])[first : first + count]
    b = b.view(b.shape[0], -1, adapter.num_experts).permute(2, 0, 1)[first : first + count]
    missing = -a.shape[1] % 8
    return functional.pad(a, (0, 0, 0, missing)).to(dtype), functional.pad(b, (0, missing)).to(
        dtype
    ).contiguous()


def is_named(name: str, target: str) -> bool:
    """Whether a target matches a layer's name as in peft: the whole name, or its end after a
    dot."""
    return name == target or name.endswith(f".{target}")


def has_adapters(model: nn.Module) -> bool:
    return ADAPTER in (getattr(model, "peft_config", None) or {})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name; in a model with adapters these are the adapters'
    parameters only."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes without its adapters, if it has any, as its base model
    would."""
    adapted = layers(model).values() if has_adapters(model) else ()
    # peft's enable_adapters would also switch requires_grad, without FSDP noticing.
    for layer in adapted:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False


# Files --------------------------------------------------------------------------------------------


def name_in_file(name: str) -> str:
    """Returns a parameter's name as peft writes it: with the prefix `base_model.model.`, without
    the adapter's name."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def write_config(
    folder: Path, model: PreTrainedModel, base: Path | str, rank: int | None = None
) -> None:
    """Writes adapter_config.json, as peft does. `base`: the base model's folder, or its name on
    the hub. `rank`: if it is not the model's."""
    config = copy.copy(model.peft_config[ADAPTER])  # type: ignore[attr-defined, operator]
    config.r = rank or config.r
    config.base_model_name_or_path, config.inference_mode = str(base), True
    # it is a set, whose order differs between processes
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))


@torch.no_grad()
def read_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Reads published or exported adapters into an unsharded model. Raises RunError if the
    model's adapters are different."""
    tensors, parameters = load_file(folder / WEIGHTS_FILE), trainable(model)
    names = {name_in_file(name): name for name in parameters}
    if names.keys() != tensors.keys() or any(
        tensors[key].shape != parameters[name].shape for key, name in names.items()
    ):
        raise RunError(
            f"{folder}: its adapters do not match {type(model).__name__} with trainer.lora "
            "of the run's config.toml"
        )
    for key, name in names.items():
        parameters[name].copy_(tensors[key])


def merge_adapters(model: PreTrainedModel) -> None:
    """Merges every adapter into its layer's weight, in the weight's dtype, and removes it, which
    leaves a plain model."""
    adapted = layers(model)
    for layer in adapted.values():
        layer.merge()
    for name, layer in adapted.items():
        # the outermost of those that wrap the same experts
        if name.rpartition(".")[0] not in adapted:
            model.set_submodule(name, layer.get_base_layer())
        layer.get_base_layer().__dict__.pop("forward", None)
    del model.peft_config
