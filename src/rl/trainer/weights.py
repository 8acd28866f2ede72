"""Policy versions on disk: Hugging Face folders that transformers and vLLM load as they are, or with trainer.lora peft's adapters."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl.files import remove_directory, write_directory
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


def write_version(path: Path, tensors: dict[str, Tensor], model: PreTrainedModel, base: Path, dtype: torch.dtype) -> None:
    """Writes gathered weights and the other files of the base model to `path`, complete by rename. Of `model` only the kind counts.

    Adapters are written as peft does, without the files of their base, which they name.
    """

    def fill(folder: Path) -> None:
        require_space(folder, tensors.values())
        if lora.has_adapters(model):
            return lora.write_adapters(folder, tensors, model, base)
        save_file(revert_weight_conversion(model, tensors), folder / "model.safetensors", metadata={"format": "pt"})
        copy_small_files(base, folder)
        write_config(base, folder, model, dtype)

    write_directory(path, fill)


def copy_small_files(base: Path, folder: Path) -> None:
    """Tokenizer, configs and all else that is no weights."""
    for file in base.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json")):
            shutil.copyfile(file, folder / file.name)


def write_config(base: Path, folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The base model's config with the right dtype."""
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def delete_old_versions(directory: Path, config: WeightsConfig, needed: Acknowledged, checkpoint_step: int) -> None:
    """Keeps what `kept_versions` says."""
    versions = numbered(directory)
    kept = kept_versions(list(versions), config, needed, checkpoint_step)
    for version, path in versions.items():
        if version not in kept:
            remove_directory(path)


def kept_versions(versions: list[int], config: WeightsConfig, needed: Acknowledged, checkpoint_step: int) -> set[int]:
    """The newest `keep_last`, what something waits for, an evaluation's best, multiples of `keep_every`, and the newest checkpoint's: there
    a resume starts."""
    newest = set(sorted(versions)[-config.keep_last :])
    return {
        version
        for version in versions
        if version in newest
        or version >= needed.oldest_needed
        or version in needed.keep
        or version == checkpoint_step
        or (config.keep_every and version % config.keep_every == 0)
    }
