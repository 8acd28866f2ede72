"""Policy versions, copied and written: Hugging Face folders that transformers and vLLM can load,
or with trainer.lora peft adapters."""

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.run_dir.checksums import DELTA, DIGESTS
from rl.run_dir.files import Fence, write_directory, write_file
from rl.run_dir.in_memory import InMemory
from rl.run_dir.safetensors import (
    HASH,
    SINGLE,
    Digest,
    bounds,
    covers,
    digest,
    digest_like,
    digest_of_file,
    hash_each,
)
from rl.system import faults
from rl.system.errors import RunError
from rl.trainer.model import lora
from rl.trainer.store.checkpoint import require_space
from rl.trainer.store.image import Image, LastVersion, VersionTensor, header, image_of
from rl.trainer.store.threads import RankThreads

CONFIG = "config.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")


@dataclass(frozen=True)
class PublishedVersion:
    """A policy version in memory, of which each rank holds its slices, and everything needed to
    write its files. Of `model` only whether it has adapters is read, and their settings: its
    parameters change places while training continues. Every rank calls every method."""

    image: Image
    model: PreTrainedModel
    base: Path
    """The base model's folder, whose tokenizer and configs are copied."""
    config: str
    """The content of config.json; empty for adapters."""
    made_by: dict[str, Any]
    """The conditions that the bits of the weights depend on, see determinism.conditions."""

    @cached_property
    def held(self) -> list[list[list]]:
        """For each rank [name, first, end, hash] of each slice that it holds: the bytes
        first..end of the tensor `name` of the files."""
        slices = [(part.tensor, part.first, part.end) for part in self.image.slices]

        def hashed() -> list[list]:
            data = [memoryview(self.image.bytes_of(*bounds).numpy()) for bounds in slices]
            return [
                [tensor.name, first, end, value]
                for (tensor, first, end), value in zip(slices, hash_each(digest, data), strict=True)
            ]

        return self.image.ranks.share(hashed)

    @cached_property
    def digests(self) -> dict[str, Digest]:
        """The hash of each tensor's bytes by its name in the file, or the hashes of its slices.
        Raises RunError if no rank holds a byte."""
        slices: dict[str, list[list]] = {tensor.name: [] for tensor in self.image.tensors}
        for name, *hashed in sorted(itertools.chain(*self.held)):
            slices[name].append(hashed)
        for tensor in self.image.tensors:
            hashes = slices[tensor.name] = slices[tensor.name] or [[0, 0, digest(b"")]]
            if not covers(hashes, tensor.size):
                raise RunError(
                    f"{tensor.name}: its {tensor.size} bytes are held as "
                    f"{[bounds[:2] for bounds in hashes]}; please report this"
                )
        return {
            name: hashes if len(hashes) > 1 else hashes[0][2] for name, hashes in slices.items()
        }

    def digests_like(self, others: Mapping[str, Digest]) -> dict[str, Digest]:
        """The digests of the same slices as in `others`, which another number of ranks may have
        made. Collects tensors cut otherwise on rank 0, one at a time."""
        again = dict(self.digests)
        for tensor in self.image.tensors:
            other = others.get(tensor.name, again[tensor.name])
            if bounds(other, tensor.size) != bounds(again[tensor.name], tensor.size):
                data = memoryview(self.whole(tensor).numpy())
                again[tensor.name] = self.image.ranks.of_main(partial(digest_like, other, data))
        return again

    def whole(self, tensor: VersionTensor) -> Tensor:
        """The bytes of a tensor; on ranks other than 0 its content is undefined."""
        if self.image.ranks.size == 1:
            return self.image.bytes_of(tensor)
        whole = torch.zeros(tensor.size, dtype=torch.uint8)
        for part in self.image.slices:
            if part.tensor is tensor:
                whole[part.first : part.end] = self.image.bytes_of(tensor, part.first, part.end)
        self.image.ranks.sum_to_main(whole)
        return whole

    @cached_property
    def in_memory(self) -> InMemory | None:
        """The version as a file in memory, valid until the image is claimed again; None if a
        rank holds its slices elsewhere, and for adapters, whose base is only named in their
        folder."""
        # now every rank has filled its slices
        shared = all(self.image.ranks.share(lambda: self.image.is_shared))
        if not shared or not self.image.ranks.all_here or lora.has_adapters(self.model):
            return None
        if self.image.ranks.is_main:
            self.image.write_header()
        return self.image.file

    def write_record(self, record: Path, fence: Fence = None) -> None:
        """Writes the digests, before the version is announced, so that it can be compared if it is
        trained again. They are kept when the version is deleted. Neither is durable before
        `make_durable`: a version is used at once, as the log suffices to train it again.
        """
        data = json.dumps(self._content, indent=1).encode()
        self.image.ranks.of_main(partial(write_file, record, data, fence=fence, durable=False))

    @property
    def _content(self) -> dict[str, Any]:
        return {"hash": HASH, "tensors": self.digests, "made_by": self.made_by}

    def write(
        self,
        path: Path,
        *,
        new: bool = False,
        fence: Fence = None,
        last: LastVersion | None = None,
        past_cache: bool = False,
    ) -> None:
        """Writes the version's folder, complete by rename: rank 0 makes it and its small files,
        each rank writes its slices.

        `new`, `fence`: see write_file. Without `new` an existing folder is replaced. Adapters are
        written in peft's format, which names the base model and does not include its files. `last`:
        the version before, then only what differs from it is written. `past_cache`: see
        Image.write_slices.
        """
        image, ranks, content = self.image, self.image.ranks, self._content
        name = lora.WEIGHTS_FILE if lora.has_adapters(self.model) else SINGLE

        def make(folder: Path) -> str:
            if not last:
                require_space(folder, [image.memory])
                with (folder / name).open("xb") as file:
                    file.truncate(file.write(header(image.tensors)) + image.tensors[-1].end)
            return str(folder)

        def write_slices(folder: Path) -> tuple[str, Sequence] | None:
            if not last:
                image.write_slices(folder / name, past_cache)
            frames = last.write(image, folder) if last else None
            faults.point("weights.saved")
            return frames

        def fill(temporary: Path | None) -> None:
            folder = Path(ranks.of_main(lambda: temporary and make(temporary)))
            frames = ranks.share(lambda: write_slices(folder))
            if not ranks.is_main:
                return
            if last:
                (folder / DELTA).write_text(json.dumps(dict(frames)))
            elif name == lora.WEIGHTS_FILE:
                lora.write_config(folder, self.model, self.base)
            else:
                copy_small_files(self.base, folder)
                (folder / CONFIG).write_text(self.config)
            small = [file for file in folder.iterdir() if file.suffix != ".safetensors"]
            hashes = {file.name: digest_of_file(file) for file in small}
            (folder / DIGESTS).write_text(json.dumps(content | {"files": hashes}, indent=1))

        ranks.share(
            lambda: (
                write_directory(path, fill, new=new, fence=fence, durable=False)
                if ranks.is_main
                else fill(None)
            )
        )


def snapshot(
    model: PreTrainedModel,
    base: Path,
    dtype: torch.dtype,
    made_by: dict[str, Any],
    ranks: RankThreads | None = None,
    before: PublishedVersion | None = None,
) -> PublishedVersion:
    """Copies the model's weights, so that they can be written while training continues: each rank
    its own. Every rank calls this.

    A tied head appears once. Of a model with adapters only the adapters are copied. `ranks`: None
    for a single rank. `before`: a version that is no longer needed in this process; its memory is
    reused unless another process reads it.
    """
    image = before.image if before else image_of(model, dtype, ranks or RankThreads())
    image.claim()
    image.fill(model, dtype)
    faults.point("weights.cast")
    config = "" if lora.has_adapters(model) else config_of(base, model, dtype)
    return PublishedVersion(image, model, base, config, made_by)


def copy_small_files(base: Path, folder: Path) -> None:
    """Copies the tokenizer, the configs and all other files of a model that are not weights."""
    for file in base.iterdir():
        if (
            file.is_file()
            and not file.name.startswith(".")
            and not file.name.endswith((*WEIGHT_SUFFIXES, ".index.json", DIGESTS))
        ):
            shutil.copyfile(file, folder / file.name)


DRAFTING = {"num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"}
"""Numbers of layers that only draft tokens for others to check. Nothing trains them, so no version
has them: those of the base would draft for another model."""


def drafting_layers(base: Path) -> str:
    """Returns the settings of a model's config that count layers which draft tokens, as `NAME =
    NUMBER`; empty if it has none."""
    config = json.loads((base / CONFIG).read_text())
    fields = config | config.get("text_config", {})
    counts = {key: fields[key] for key in sorted(DRAFTING & fields.keys())}
    return ", ".join(f"{key} = {count}" for key, count in counts.items() if count)


def config_of(base: Path, model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Returns the base model's config with the dtype of the weights, as JSON. Of a model that sees
    images but is trained as text only, it is the config of the text model: the files have nothing
    else."""
    config = json.loads((base / CONFIG).read_text())
    name = type(model).__name__.removeprefix("FSDP")  # of a sharded model's class
    if config.get("model_type") != model.config.model_type:
        config = model.config.to_diff_dict()
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        # Files with another head beside a config that ties it are read as two matrices by
        # transformers and vLLM, as one by others.
        for part in (config, config.get("text_config", {})):
            part["tie_word_embeddings"] = False
    for part in (config, config.get("text_config", {})):
        part |= dict.fromkeys(DRAFTING & part.keys(), 0)
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [name]
    return json.dumps(config, indent=2) + "\n"
