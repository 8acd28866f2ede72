"""Policy versions on disk: Hugging Face folders that transformers and vLLM load as they are, or with trainer.lora peft's adapters."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

from rl.run_dir.checksums import DIGESTS
from rl.run_dir.files import write_directory, write_file
from rl.run_dir.hashes import hash_each, sha256, sha256_of_file
from rl.system import faults
from rl.trainer import lora
from rl.trainer.parallel.world import World
from rl.trainer.store.space import require_space

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class Version:
    """A policy version in memory: whole weights, and what their files are written with. Of `model` only the architecture is read."""

    tensors: dict[str, Tensor]
    """Tensors by the names of the model's parameters."""
    model: PreTrainedModel
    base: Path
    """The base model's folder, whose tokenizer and configs are copied."""
    dtype: torch.dtype
    made_by: dict[str, Any] = field(default_factory=dict)
    """The conditions that the bits of the weights depend on, see determinism.conditions."""

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The tensors by their names in the safetensors file."""
        if lora.has_adapters(self.model):
            return {lora.name_in_file(name): tensor for name, tensor in self.tensors.items()}
        return revert_weight_conversion(self.model, self.tensors)

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor's bytes by its name in the file. A core takes about a second for each GB."""
        views = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in self.named.values()]
        return dict(zip(self.named, hash_each(sha256, views), strict=True))

    def write(self, path: Path, record: Path, *, new: bool = False, fence: Callable[[], None] | None = None) -> None:
        """Writes the version's folder, complete by rename. Its digests are in the file `record` before it appears, and after it is gone.

        Neither is durable before `make_durable`: a version is sampled from at once, for the log can make it again.
        new, fence: see write_file. Without `new` an older folder is replaced. Adapters are written as peft does, without the files of their
        base, which they name.
        """

        def fill(folder: Path) -> None:
            require_space(folder, self.named.values())
            digests = hasher.submit(lambda: self.digests)
            if lora.has_adapters(self.model):
                lora.write_adapters(folder, self.named, self.model, self.base)
            else:
                save_file(self.named, folder / "model.safetensors", metadata={"format": "pt"})
                faults.point("weights.saved")
                copy_small_files(self.base, folder)
                write_config(self.base, folder, self.model, self.dtype)
            small = {file.name: sha256_of_file(file) for file in folder.iterdir() if file.suffix != ".safetensors"}
            content = {"tensors": digests.result(), "made_by": self.made_by}
            (folder / DIGESTS).write_text(json.dumps(content | {"files": small}, indent=1))
            write_file(record, json.dumps(content, indent=1).encode(), fence=fence, durable=False)

        with ThreadPoolExecutor(1) as hasher:  # beside the writing
            write_directory(path, fill, new=new, fence=fence, durable=False)


@torch.no_grad()
def snapshot(model: PreTrainedModel, base: Path, dtype: torch.dtype, made_by: dict[str, Any], world: World) -> Version | None:
    """A copy of the model's weights, to be written while it trains on; None on all ranks but 0. Every rank calls this.

    Tensors are cast before they travel, one at a time; rank 0 keeps them whole, on the CPU. Nothing of the copy is shared with the model.
    A tied head is named once. Of a model with adapters only these are copied.
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
    return Version(tensors, model, base, dtype, made_by) if world.is_main else None


def copy_small_files(base: Path, folder: Path) -> None:
    """Copies the tokenizer, configs and all else of a model that is no weights."""
    for file in base.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json", DIGESTS)):
            shutil.copyfile(file, folder / file.name)


def write_config(base: Path, folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Writes the base model's config with the dtype of the weights."""
    config = json.loads((base / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.setdefault("architectures", [type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
