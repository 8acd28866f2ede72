"""Low-rank adapters: y = W x + (alpha / rank) B A x, where W is frozen and B starts at 0 (Hu et al., https://arxiv.org/abs/2106.09685).

The layers, their names and the files are peft's. The base model is kept in the dtype that it computes in, the adapters are float32
masters; both are sharded by FSDP2 like any model, so norm, clipping, optimizer and checkpoints need no special case.
peft is imported only where it is used, so runs without adapters do not need it.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl.config.trainer import LoraConfig
from rl.system.errors import RunError
from rl.trainer.store.space import write_tensors

ADAPTER = "default"
"""peft's name for a single adapter; it is part of parameter names, but not of names in files."""
WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes the model and gives its target layers trainable float32 adapters. Call it before the model is sharded.

    A is drawn from torch's generator, so ranks with the same seed get the same adapters. Raises RunError for invalid targets.
    """
    import peft

    targets = target_layers(model, config.targets)
    settings = peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),  # GPT-2's layers, whose weights are transposed
    )
    peft.inject_adapter_in_model(settings, model, ADAPTER)
    for parameter in trainable(model).values():
        parameter.data = parameter.data.float()  # peft gives them the base's dtype


def target_layers(model: PreTrainedModel, targets: list[str] | str) -> list[str]:
    """Returns the names of the layers that get an adapter: every linear layer but the head, or those whose names end with a target.

    A router that also chooses the experts (Llama 4, PhiMoE) gets none: peft cannot add to its result. Raises RunError for a target
    without a layer, and names the targets that exist.
    """
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and "Router" not in type(module).__name__
    ]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    fused = sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim == 3 and not name.endswith(".weight")})
    if targets == "all-linear":
        if fused and (not dist.is_initialized() or dist.get_rank() == 0):
            message = f"trainer.lora: {', '.join(fused)} hold all experts of a layer in one parameter and stay frozen; adapters on "
            print(f"WARNING: {message}{', '.join(kinds)}", file=sys.stderr, flush=True)
        return linear
    for target in targets:
        if target in fused:
            raise RunError(
                f"trainer.lora.targets: {target} holds all experts of a layer in one parameter, which adapters do not support; "
                f"choose from {', '.join(kinds)}, or train the whole model without trainer.lora"
            )
        if not any(is_named(name, target) for name in linear):
            raise RunError(
                f"trainer.lora.targets: {target} is not a linear layer of {type(model).__name__} that can have an adapter (embedding and "
                f"head cannot); choose from {', '.join(kinds)}, or all-linear"
            )
    return [name for name in linear if any(is_named(name, target) for target in targets)]


def is_named(name: str, target: str) -> bool:
    """Whether a target matches a layer's name as in peft: the whole name, or its end after a dot."""
    return name == target or name.endswith(f".{target}")


def has_adapters(model: nn.Module) -> bool:
    return ADAPTER in (getattr(model, "peft_config", None) or {})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name; in a model with adapters these are the adapters' parameters only."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which a model computes without its adapters, if it has any, as its base model would."""
    adapted = layers(model).values() if has_adapters(model) else ()
    # peft's enable_adapters would also switch requires_grad, without FSDP noticing.
    for layer in adapted:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False


# Files ------------------------------------------------------------------------------------------------------------------


def name_in_file(name: str) -> str:
    """Returns a parameter's name as peft writes it: with the prefix `base_model.model.`, without the adapter's name."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel, base: Path) -> None:
    """Writes unsharded tensors, keyed by their names in the file, as peft does: adapter_model.safetensors and adapter_config.json."""
    config = copy.copy(model.peft_config[ADAPTER])  # type: ignore[attr-defined, operator]
    config.base_model_name_or_path, config.inference_mode = str(base.absolute()), True
    config.target_modules = sorted(config.target_modules)  # it is a set, whose order differs between processes
    config.save_pretrained(str(folder))
    write_tensors(folder / WEIGHTS_FILE, tensors)


@torch.no_grad()
def read_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Reads the adapters that `write_adapters` wrote into an unsharded model. Raises RunError if the model's adapters are different."""
    tensors, parameters = load_file(folder / WEIGHTS_FILE), trainable(model)
    names = {name_in_file(name): name for name in parameters}
    if names.keys() != tensors.keys() or any(tensors[key].shape != parameters[name].shape for key, name in names.items()):
        raise RunError(f"{folder}: its adapters do not match {type(model).__name__} with trainer.lora of the run's config.toml")
    for key, name in names.items():
        parameters[name].copy_(tensors[key])


def merge_adapters(model: PreTrainedModel) -> None:
    """Merges every adapter into its layer's weight, in the weight's dtype, and removes it, which leaves a plain model."""
    for name, layer in layers(model).items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
