"""Low-rank adapters: y = W x + (alpha / rank) B A x, where W is frozen and B starts at 0 (Hu et al., https://arxiv.org/abs/2106.09685).

The layers, their names and the files are peft's. The base model is held in the dtype that is computed in, the adapters are float32
masters; both are sharded by FSDP2 like any model, so that norm, clipping, optimizer and checkpoints need no case of their own.
peft is imported only where it is used: a run without adapters does without it.
"""

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rl.config.trainer import LoraConfig
from rl.system.errors import RunError

ADAPTER = "default"
"""peft's name for an adapter that is the only one; it stands in the names of parameters, not in files."""
WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freezes the model and gives its target layers trainable float32 adapters. Comes before the model is sharded.

    A is drawn from torch's generator: ranks with the same seed get the same adapters. Raises RunError for targets that are none.
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
    """Names of the layers that get an adapter: every linear layer but the head, or those whose names end with a target.

    Raises RunError naming each target without a layer, and what there is.
    """
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
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
                f"trainer.lora.targets: {target} holds all experts of a layer in one parameter, which adapters are not made for; "
                f"there are {', '.join(kinds)}. Train those, or the whole model without trainer.lora"
            )
        if not any(is_named(name, target) for name in linear):
            raise RunError(
                f"trainer.lora.targets: {target} is no linear layer of {type(model).__name__} that can have an adapter (embedding and head "
                f"cannot); there are {', '.join(kinds)}, or all-linear"
            )
    return [name for name in linear if any(is_named(name, target) for target in targets)]


def is_named(name: str, target: str) -> bool:
    """Whether a target means a layer, as peft reads it: the layer's whole name, or its end from a dot on."""
    return name == target or name.endswith(f".{target}")


def has_adapters(model: nn.Module) -> bool:
    return ADAPTER in (getattr(model, "peft_config", None) or {})


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name: of a model with adapters these alone."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which a model computes without the adapters that it may have: as its base does."""
    adapted = layers(model).values() if has_adapters(model) else ()
    # Not peft's enable_adapters: it also switches requires_grad, behind FSDP's back.
    for layer in adapted:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False


# Files ------------------------------------------------------------------------------------------------------------------


def name_in_file(name: str) -> str:
    """A parameter's name as peft writes it: `base_model.model.` before it, the adapter's name left out."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel, base: Path) -> None:
    """Writes whole tensors, by their names in the file, as peft does: adapter_model.safetensors and adapter_config.json."""
    config = copy.copy(model.peft_config[ADAPTER])  # type: ignore[attr-defined, operator]
    config.base_model_name_or_path, config.inference_mode = str(base.absolute()), True
    config.target_modules = sorted(config.target_modules)  # a set: its order would differ from process to process
    config.save_pretrained(str(folder))
    save_file(dict(tensors), folder / WEIGHTS_FILE, metadata={"format": "pt"})


@torch.no_grad()
def read_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Reads what `write_adapters` wrote into a model that is not sharded. Raises RunError when its adapters are others."""
    tensors, parameters = load_file(folder / WEIGHTS_FILE), trainable(model)
    names = {name_in_file(name): name for name in parameters}
    if names.keys() != tensors.keys() or any(tensors[key].shape != parameters[name].shape for key, name in names.items()):
        raise RunError(f"{folder}: its adapters do not fit {type(model).__name__} with the trainer.lora of the run's config.toml")
    for key, name in names.items():
        parameters[name].copy_(tensors[key])


def merge_adapters(model: PreTrainedModel) -> None:
    """Adds every adapter to its layer's weight, in the dtype of that, and takes it away: what remains is a plain model."""
    for name, layer in layers(model).items():
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())
    del model.peft_config
