"""Policy versions on disk: Hugging Face folders that transformers and vLLM load as they are, or with trainer.lora peft's adapters."""

import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl import faults
from rl.digests import DIGESTS, digest
from rl.files import remove_directory, write_directory, write_file
from rl.messages import Acknowledged
from rl.run_dir import numbered
from rl.trainer import lora
from rl.trainer.config import WeightsConfig
from rl.trainer.distributed import World
from rl.trainer.space import require_space

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


@torch.no_grad()
def gather_weights(model: PreTrainedModel, dtype: torch.dtype, world: World) -> dict[str, Tensor]:
    """A copy of whole tensors by name, cast before they travel, one at a time; rank 0 keeps them, on the CPU. Every rank calls this.

    Nothing of the copy is shared with the model, which may train on while the copy is written. A tied head is named once. Of a model
    with adapters these alone.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in persistent)]
    if lora.has_adapters(model):
        named = [*lora.trainable(model).items()]
    tensors = {}
    for name, value in named:
        value = value.detach()
        value = value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if world.is_main:
            tensors[name] = whole.cpu().contiguous()
    return tensors


@dataclass(frozen=True)
class Version:
    """A policy version in memory: gathered weights, of `model` only the kind, and whose other files are written with them."""

    tensors: dict[str, Tensor]
    """By the names of the model's parameters."""
    model: PreTrainedModel
    base: Path
    dtype: torch.dtype
    made_by: dict[str, Any] = field(default_factory=dict)
    """What the bits of the weights depend on beside the batches, see determinism.conditions."""

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """By the names in the safetensors file."""
        if lora.has_adapters(self.model):
            return {lora.name_in_file(name): tensor for name, tensor in self.tensors.items()}
        return revert_weight_conversion(self.model, self.tensors)

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes by its name in the file. Takes about a second for each GB."""
        return {name: digest(tensor_bytes(tensor)) for name, tensor in self.named.items()}

    def write(self, path: Path, record: Path) -> None:
        """Writes the version's folder, complete by rename. Its digests stand in `record` before it appears, and stay there after it.

        Adapters are written as peft does, without the files of their base, which they name.
        """
        content = {"tensors": self.digests, "made_by": self.made_by}

        def fill(folder: Path) -> None:
            require_space(folder, self.named.values())
            if lora.has_adapters(self.model):
                lora.write_adapters(folder, self.named, self.model, self.base)
            else:
                save_file(self.named, folder / "model.safetensors", metadata={"format": "pt"})
                faults.point("weights.saved")
                copy_small_files(self.base, folder)
                write_config(self.base, folder, self.model, self.dtype)
            small = {file.name: digest(file.read_bytes()) for file in folder.iterdir() if file.suffix != ".safetensors"}
            (folder / DIGESTS).write_text(json.dumps(content | {"files": small}, indent=1))
            write_file(record, json.dumps(content, indent=1).encode())

        write_directory(path, fill)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in memory, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def copy_small_files(base: Path, folder: Path) -> None:
    """Tokenizer, configs and all else that is no weights."""
    for file in base.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json", DIGESTS)):
            shutil.copyfile(file, folder / file.name)


def write_config(base: Path, folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The base model's config with the right dtype."""
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def delete_old_versions(directory: Path, config: WeightsConfig, needed: Acknowledged, checkpoints: Collection[int]) -> None:
    """Keeps what `kept_versions` says."""
    versions = numbered(directory)
    kept = kept_versions(list(versions), config, needed, checkpoints)
    for version, path in versions.items():
        if version not in kept:
            remove_directory(path)


def kept_versions(versions: list[int], config: WeightsConfig, needed: Acknowledged, checkpoints: Collection[int]) -> set[int]:
    """The newest `keep_last`, what something waits for, an evaluation's best, multiples of `keep_every`, and the versions of `checkpoints`:
    there a resume starts."""
    newest = set(sorted(versions)[-config.keep_last :])
    return {
        version
        for version in versions
        if version in newest
        or version >= needed.oldest_needed
        or version in needed.keep
        or version in checkpoints
        or (config.keep_every and version % config.keep_every == 0)
    }
