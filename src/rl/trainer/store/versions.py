"""Policy versions on disk: Hugging Face folders that transformers and vLLM load as they are, or with trainer.lora peft's adapters."""

import json
import shutil
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl.run_dir.checksums import DIGESTS
from rl.run_dir.digests import NEWEST, digest, digest_of_file, hash_each
from rl.run_dir.files import Fence, write_directory, write_file
from rl.run_dir.in_memory import InMemory
from rl.system import faults
from rl.trainer import lora
from rl.trainer.optim import local
from rl.trainer.parallel.world import World
from rl.trainer.store.arena import Arena
from rl.trainer.store.space import require_space
from rl.trainer.store.weights_file import write_weights

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
    arena: Arena | None = None
    """What holds the tensors, where others may read them."""

    @cached_property
    def named(self) -> dict[str, Tensor]:
        """The tensors by their names in the safetensors file."""
        if lora.has_adapters(self.model):
            return {lora.name_in_file(name): tensor for name, tensor in self.tensors.items()}
        return revert_weight_conversion(self.model, self.tensors)

    @cached_property
    def digests(self) -> dict[str, str]:
        """The newest hash of each tensor's bytes by its name in the file. A core takes about a fifth of a second for each GB."""
        return self._hashed(NEWEST)

    def digests_by(self, name: str) -> dict[str, str]:
        """The same by one of digests.HASHES, to be compared with what an older rl wrote."""
        return self.digests if name == NEWEST else self._hashed(name)

    def _hashed(self, name: str) -> dict[str, str]:
        views = [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in self.named.values()]
        return dict(zip(self.named, hash_each(partial(digest, name=name), views), strict=True))

    @cached_property
    def in_memory(self) -> InMemory | None:
        """The version as a file in memory, as long as this object lives; None for adapters, whose folder says what they are of, and where
        tensors have to be converted for a file."""
        return self.arena.seal(self.named) if self.arena and not lora.has_adapters(self.model) else None

    def write_record(self, record: Path, fence: Fence = None) -> None:
        """Writes the digests. Comes before anybody hears of the version: what is trained again can be compared with it, and it stays when
        the version is deleted. Neither is durable before `make_durable`: a version is sampled from at once, for the log can make it again.
        """
        content = {"hash": NEWEST, "tensors": self.digests, "made_by": self.made_by}
        write_file(record, json.dumps(content, indent=1).encode(), fence=fence, durable=False)

    def write(self, path: Path, *, new: bool = False, fence: Fence = None) -> None:
        """Writes the version's folder, complete by rename.

        new, fence: see write_file. Without `new` an older folder is replaced. Adapters are written as peft does, without the files of their
        base, which they name.
        """

        def fill(folder: Path) -> None:
            require_space(folder, self.named.values())
            if lora.has_adapters(self.model):
                lora.write_adapters(folder, self.named, self.model, self.base)
            else:
                write_weights(folder / "model.safetensors", self.named)
                faults.point("weights.saved")
                copy_small_files(self.base, folder)
                write_config(self.base, folder, self.model, self.dtype)
            small = {file.name: digest_of_file(file) for file in folder.iterdir() if file.suffix != ".safetensors"}
            content = {"hash": NEWEST, "tensors": self.digests, "made_by": self.made_by, "files": small}
            (folder / DIGESTS).write_text(json.dumps(content, indent=1))

        write_directory(path, fill, new=new, fence=fence, durable=False)


@torch.no_grad()
def snapshot(
    model: PreTrainedModel, base: Path, dtype: torch.dtype, made_by: dict[str, Any], world: World, before: Version | None = None
) -> Version | None:
    """A copy of the model's weights, to be written while it trains on; None on all ranks but 0. Every rank calls this.

    Tensors are cast before they travel, one at a time; rank 0 keeps them whole, in a file in memory. Nothing of it is shared with
    the model. A tied head is named once. Of a model with adapters only these are copied. `before`: a version that nobody here needs any
    more; its memory is used again unless another process reads it.
    """
    persistent = model.state_dict().keys()
    named = [*model.named_parameters(), *((name, buffer) for name, buffer in model.named_buffers() if name in persistent)]
    if lora.has_adapters(model):
        named = [*lora.trainable(model).items()]
    dtypes = {name: dtype if value.is_floating_point() else value.dtype for name, value in named}
    like, arena = {name: (value.shape, dtypes[name]) for name, value in named}, None
    if world.is_main:
        arena = before.arena if before and before.arena and before.arena.empty(like) else Arena(like)
    for name, value in named:
        value = value.detach()
        if value.is_cuda or world.size > 1:  # a copy between devices casts behind them: twice the bytes, and once more through the memory
            value = value.to(dtypes[name])
        if isinstance(value, DTensor) and world.size > 1:
            value = value.full_tensor()
        if arena:
            arena.tensors[name].copy_(local(value))
    faults.point("weights.cast")
    return Version(arena.tensors, model, base, dtype, made_by, arena) if arena else None


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
