"""Policy versions, copied and written: Hugging Face folders that transformers and vLLM can load, or with trainer.lora peft adapters."""

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl.run_dir.checksums import DIGESTS
from rl.run_dir.digests import HASH, digest, digest_of_file, hash_each
from rl.run_dir.files import Fence, write_directory, write_file
from rl.run_dir.in_memory import InMemory
from rl.system import faults
from rl.trainer.model import lora
from rl.trainer.optim import local
from rl.trainer.parallel.world import World
from rl.trainer.store.space import require_space, write_tensors
from rl.trainer.store.version_buffer import VersionBuffer

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class PublishedVersion:
    """A policy version in memory: the unsharded weights and everything needed to write its files. Only `model`'s architecture is read."""

    buffer: VersionBuffer
    """The memory that holds the tensors, by the names of the model's parameters; other processes may be able to read it."""
    model: PreTrainedModel
    base: Path
    """The base model's folder, whose tokenizer and configs are copied."""
    dtype: torch.dtype
    made_by: dict[str, Any]
    """The conditions that the bits of the weights depend on, see determinism.conditions."""

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The tensors by their names in the safetensors file."""
        if lora.has_adapters(self.model):
            return {lora.name_in_file(name): tensor for name, tensor in self.buffer.tensors.items()}
        return revert_weight_conversion(self.model, self.buffer.tensors)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The hash of each tensor's bytes by its name in the file."""
        views = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in self.named.values()]
        return dict(zip(self.named, hash_each(digest, views), strict=True))

    @cached_property
    def in_memory(self) -> InMemory | None:
        """The version as a file in memory, valid while this object exists; None if tensors must be converted for a file, and for adapters,
        whose base is only named in their folder."""
        return None if lora.has_adapters(self.model) else self.buffer.write_header(self.named)

    def write_record(self, record: Path, fence: Fence = None) -> None:
        """Writes the digests, before the version is announced, so that it can be compared if it is trained again. They are kept when the
        version is deleted. Neither is durable before `make_durable`: a version is used at once, as the log suffices to train it again.
        """
        content = {"hash": HASH, "tensors": self.digests, "made_by": self.made_by}
        write_file(record, json.dumps(content, indent=1).encode(), fence=fence, durable=False)

    def write(self, path: Path, *, new: bool = False, fence: Fence = None) -> None:
        """Writes the version's folder, complete by rename.

        `new`, `fence`: see write_file. Without `new` an existing folder is replaced. Adapters are written in peft's format, which names
        the base model and does not include its files.
        """

        def fill(folder: Path) -> None:
            require_space(folder, self.named.values())
            if lora.has_adapters(self.model):
                lora.write_adapters(folder, self.named, self.model, self.base)
            else:
                write_tensors(folder / "model.safetensors", self.named)
                faults.point("weights.saved")
                copy_small_files(self.base, folder)
                write_config(self.base, folder, self.model, self.dtype)
            small = {file.name: digest_of_file(file) for file in folder.iterdir() if file.suffix != ".safetensors"}
            content = {"hash": HASH, "tensors": self.digests, "made_by": self.made_by, "files": small}
            (folder / DIGESTS).write_text(json.dumps(content, indent=1))

        write_directory(path, fill, new=new, fence=fence, durable=False)


@torch.no_grad()
def snapshot(
    model: PreTrainedModel, base: Path, dtype: torch.dtype, made_by: dict[str, Any], world: World, before: PublishedVersion | None = None
) -> PublishedVersion | None:
    """Copies the model's weights, so that they can be written while training continues. None on all ranks but 0. Every rank calls this.

    Tensors are cast before they are sent, one at a time; rank 0 stores them unsharded in a file in memory, which shares nothing with the
    model. A tied head appears once. Of a model with adapters only the adapters are copied. `before`: a version that is no longer needed in
    this process; its memory is reused unless another process reads it.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in persistent)]
    if lora.has_adapters(model):
        named = [*lora.trainable(model).items()]
    dtypes = {name: dtype if value.is_floating_point() else value.dtype for name, value in named}
    like, buffer = {name: (value.shape, dtypes[name]) for name, value in named}, None
    if world.is_main:
        buffer = before.buffer if before and before.buffer.claim(like) else VersionBuffer(like)
    for name, value in named:
        value = value.detach()
        if value.is_cuda or world.size > 1:  # cast here: a copy between devices casts after the transfer, with twice the bytes
            value = value.to(dtypes[name])
        if isinstance(value, DTensor) and world.size > 1:
            value = value.full_tensor()
        if buffer:
            buffer.tensors[name].copy_(local(value))
    faults.point("weights.cast")
    return PublishedVersion(buffer, model, base, dtype, made_by) if buffer else None


def copy_small_files(base: Path, folder: Path) -> None:
    """Copies the tokenizer, the configs and all other files of a model that are not weights."""
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
