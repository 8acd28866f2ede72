"""Exports a run's weights as files that transformers and peft can load, in a single process
without ranks or GPUs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rl.config.trainer import LoraConfig
from rl.models.folder import weights_digest
from rl.run_dir.checksums import check_version, readable, verify_checkpoint
from rl.run_dir.files import CorruptFileError, write_directory
from rl.trainer.model import lora
from rl.trainer.model.policy import DTYPES
from rl.trainer.parallel.loading import load_rows
from rl.trainer.store import checkpoint
from rl.trainer.store.checkpoint import require_space, write_tensors
from rl.trainer.store.image import dtype_of
from rl.trainer.store.versions import CONFIG, config_of, copy_small_files


@dataclass(frozen=True)
class Origin:
    """The files to read weights from: a checkpoint, or a version if there is no intact
    checkpoint. At least one of them is given."""

    base: Path
    """The folder of the base model."""
    lora: LoraConfig | None
    checkpoint: Path | None = None
    """Folder with the float32 master weights."""
    version: Path | None = None
    """Folder of the published version, in the dtype of the run's model."""
    trust_remote_code: bool = False
    name: str = ""
    """The base model's name, by which adapters are found beside it on other machines; by default
    its folder."""


def export(origin: Origin, target: Path, merge: bool, dtype: str) -> None:
    """Writes the weights to `target`, complete by rename: a whole model, or for a run with adapters
    only these unless `merge` is set.

    Raises CorruptFileError if checkpoint or version are damaged, RunError if they belong to another
    model or the adapters do not match.
    """
    disable_progress_bar()
    model = load(origin, DTYPES[dtype])
    if origin.lora and merge:
        lora.merge_adapters(model)
    write_directory(
        target, lambda folder: write(folder, model, origin.base, DTYPES[dtype], origin.name)
    )


def load(origin: Origin, dtype: torch.dtype) -> PreTrainedModel:
    """Loads the unsharded model with the verified weights of a checkpoint or a version; in
    float32 unless a version is loaded as it is."""
    sound = sound_checkpoint(origin)
    if origin.version and not sound:
        check_version(origin.version)
    whole = origin.version if not sound and not origin.lora else None
    with readable(whole or origin.base) as folder:
        trusted, read_as = origin.trust_remote_code, dtype if whole else torch.float32
        model = load_rows(folder, None, dtype=read_as, trust_remote_code=trusted)
    if origin.lora:
        lora.add_adapters(model, origin.lora)
    if sound:
        checkpoint.load_weights(*sound, model, weights_digest(origin.base) if origin.lora else "")
    elif origin.lora and origin.version:
        lora.read_adapters(origin.version, model)
    return model


def sound_checkpoint(origin: Origin) -> tuple[Path, dict[str, Any]] | None:
    """Returns the verified checkpoint with its manifest. Skips a damaged one, with a warning, if
    there is a version."""
    if not origin.checkpoint:
        return None
    try:
        return origin.checkpoint, verify_checkpoint(origin.checkpoint)
    except CorruptFileError as error:
        if not origin.version:
            raise
        print(
            f"WARNING: the checkpoint is damaged ({error}); the version {origin.version} is "
            "used instead",
            file=sys.stderr,
            flush=True,
        )
        return None


def write(
    folder: Path, model: PreTrainedModel, base: Path, dtype: torch.dtype, name: str = ""
) -> None:
    """Fills `folder` with the weights in `dtype` and the base model's tokenizer. Of a model with
    adapters writes only the adapters, which give `name` as their base."""
    if lora.has_adapters(model):
        tensors = {
            lora.name_in_file(name): parameter.detach().to(dtype)
            for name, parameter in lora.trainable(model).items()
        }
        require_space(folder, tensors.values())
        lora.write_config(folder, model, name or base)
        write_tensors(folder / lora.WEIGHTS_FILE, tensors)
        copy_small_files(base, folder)
        for name in ("config.json", "README.md"):  # these are the base model's
            (folder / name).unlink(missing_ok=True)
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype_of(parameter, dtype))
        require_space(folder, model.parameters())
        # it is copied as it is: transformers refuses to save some, such as Llama 2's
        if (base / "generation_config.json").is_file():
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder)
        copy_small_files(base, folder)
        (folder / CONFIG).write_text(config_of(base, model, dtype))
