"""Trainer state on disk: float32 weights, optimizer, RNG, step. Written by torch.distributed.checkpoint, complete by rename.

`checkpoints/000012/` holds DCP's files and `manifest.json` with the size and checksum of each. Those are verified before anything is
read, because DCP's own metadata is a pickle.
"""

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.files import CorruptFileError, commit_directory, remove_directory
from rl.run_dir import numbered
from rl.trainer.config import CheckpointConfig
from rl.trainer.distributed import World
from rl.trainer.space import require_space

MANIFEST = "manifest.json"
READ_BYTES = 1 << 22


class CheckpointMismatchError(Exception):
    """A sound checkpoint that belongs to another model or optimizer."""


def tensors_of(model: PreTrainedModel, optimizer: Optimizer, world: World) -> dict[str, Tensor]:
    """Everything that a step depends on and changes, by name: of a model with adapters not its base. The tensors are the live ones: saving
    reads them, loading writes them."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        state |= {f"optimizer.{key}.{names[parameter]}": value for key, value in values.items()}
    state[f"rng.cpu.{world.rank}"] = torch.get_rng_state()
    if world.device.type == "cuda":
        state[f"rng.cuda.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return state


def fingerprint(model: PreTrainedModel) -> str:
    """Tells models apart by the names and shapes of their parameters."""
    text = json.dumps([(name, list(parameter.shape)) for name, parameter in model.named_parameters()])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def save(path: Path, step: int, model: PreTrainedModel, optimizer: Optimizer, world: World) -> None:
    """Writes the checkpoint of `step`. Every rank calls this and returns when it is complete under its final name."""
    temporary = path.with_name(f".{path.name}.tmp")
    state = tensors_of(model, optimizer, world)
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        require_space(temporary, state.values())
    world.barrier()
    torch.serialization.set_crc32_options(False)  # a third of the time of a save; the manifest's checksums are stronger
    dcp.save(state, checkpoint_id=temporary, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    sums = {file.name: checksum(file) for file in temporary.glob(f"__{world.rank}_*")}
    (temporary / f".sums.{world.rank}").write_text(json.dumps(sums))
    world.barrier()
    if world.is_main:
        write_manifest(temporary, step, model, world)
        commit_directory(temporary, path)
    world.barrier()


def write_manifest(folder: Path, step: int, model: PreTrainedModel, world: World) -> None:
    """Gathers the checksums that each rank left for its own files."""
    files = {".metadata": checksum(folder / ".metadata")}
    for rank in range(world.size):
        sums = folder / f".sums.{rank}"
        files |= json.loads(sums.read_text())
        sums.unlink()
    manifest = {"step": step, "world_size": world.size, "model": fingerprint(model), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def checksum(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()  # processors have instructions for it: more than twice as fast as BLAKE2b here
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CorruptFileError when it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return {key: manifest[key] for key in ("step", "world_size", "model", "files")}
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise CorruptFileError(f"{path / MANIFEST}: missing or damaged") from None


def verify(path: Path) -> dict[str, Any]:
    """The manifest, after every file has been found to be what was written. Raises CorruptFileError naming the first that is not."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file() or checksum(file) != expected:
            raise CorruptFileError(f"{file}: {'damaged' if file.is_file() else 'missing'}")
    return manifest


def newest_sound(directory: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is intact, with a loud word about each damaged one; None when there is none at all.

    Rank 0 verifies, the others follow. Raises CorruptFileError when there are checkpoints and none is intact.
    """
    found, faults = 0, []
    checkpoints = numbered(directory)
    for step in reversed(checkpoints if world.is_main else ()):
        try:
            verify(checkpoints[step])
            found = step
            break
        except CorruptFileError as error:
            faults.append(str(error))
            print(f"WARNING: checkpoint {step} is damaged and is passed over ({error})", file=sys.stderr, flush=True)
    found = world.broadcast_int(-1 if faults and not found else found)
    if found < 0:
        raise CorruptFileError(
            f"no intact checkpoint in {directory}: {'; '.join(faults)}. Move them away to start from the base model and the logged batches"
        )
    return (directory / f"{found:06d}", read_manifest(directory / f"{found:06d}")) if found else None


def load(path: Path, manifest: dict[str, Any], model: PreTrainedModel, optimizer: Optimizer, world: World) -> int:
    """Reads a verified checkpoint into model, optimizer and RNG; returns its step. The number of ranks may differ from the writer's."""
    check_model(path, manifest, model)
    state = tensors_of(model, optimizer, world)
    if manifest["world_size"] != world.size:  # RNG streams belong to ranks; those of another number of ranks mean nothing here
        state = {name: value for name, value in state.items() if not name.startswith("rng.")}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner())
    if f"rng.cpu.{world.rank}" in state:
        torch.set_rng_state(state[f"rng.cpu.{world.rank}"])
    if f"rng.cuda.{world.rank}" in state:
        torch.cuda.set_rng_state(state[f"rng.cuda.{world.rank}"], world.device)
    return manifest["step"]


def load_weights(path: Path, manifest: dict[str, Any], model: PreTrainedModel) -> None:
    """Reads the weights alone of a verified checkpoint, on one process without a process group."""
    check_model(path, manifest, model)
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(), no_dist=True)


def check_model(path: Path, manifest: dict[str, Any], model: PreTrainedModel) -> None:
    """Raises CheckpointMismatchError unless the model has the parameters of the one that wrote the checkpoint."""
    if manifest["model"] != fingerprint(model):
        raise CheckpointMismatchError(
            f"{path} was written by another model than model.name: its parameters have other names or shapes; "
            "use the run's own model, or another name for a new run"
        )


def delete_old(directory: Path, config: CheckpointConfig) -> None:
    """Keeps the newest `keep_last` checkpoints and multiples of `keep_every`."""
    checkpoints = numbered(directory)
    kept = set(list(checkpoints)[-config.keep_last :])
    for step, path in checkpoints.items():
        if step not in kept and not (config.keep_every and step % config.keep_every == 0):
            remove_directory(path)
