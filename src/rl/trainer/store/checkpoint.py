"""Trainer state on disk: float32 weights, optimizer, RNG, step. Written by torch.distributed.checkpoint, complete by rename.

`checkpoints/000012/` holds DCP's files and `manifest.json` with the size and checksum of each. Those are verified before anything is
read, because DCP's own metadata is a pickle.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.run_dir.checksums import MANIFEST, checksum, newest_sound_checkpoint, read_manifest
from rl.run_dir.direct import DirectFile
from rl.run_dir.files import CorruptFileError, commit_directory, temporary_name
from rl.run_dir.hashes import blake2b
from rl.system import faults
from rl.system.errors import RunError
from rl.trainer.optim import local
from rl.trainer.parallel.world import World
from rl.trainer.store.space import require_space


def tensors_of(model: PreTrainedModel, optimizer: Optimizer, world: World) -> dict[str, Tensor]:
    """Everything that a step depends on and changes, by name; of a model with adapters not its base.

    The tensors are the live ones: saving reads them, loading writes them.
    """
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
    return blake2b(text.encode()).hex()


def snapshot(model: PreTrainedModel, optimizer: Optimizer, world: World) -> dict[str, Tensor]:
    """A copy of the state in the CPU's memory, to be written while the model trains on: 4 bytes a weight and twice that for Adam."""
    return {name: value.to("cpu", copy=True) for name, value in tensors_of(model, optimizer, world).items()}


def write(
    path: Path,
    step: int,
    state: dict[str, Tensor],
    model: str,
    world: World,
    group: dist.ProcessGroup | None = None,
    fence: Callable[[], None] | None = None,
) -> None:
    """Writes a state, of the model with the fingerprint `model`, as the checkpoint of `step`. Every rank calls this with its part, and
    returns when the checkpoint is complete under its final name.

    `group`: the ranks' own for the purpose, when this runs in a thread beside the training. `fence`: see write_file. Raises OSError for a
    full disk, TakenError when there is a checkpoint of that step.
    """
    temporary = path.with_name(world.broadcast_bytes(temporary_name(path).name.encode(), group).decode())
    if world.is_main:
        temporary.mkdir(parents=True)
        require_space(temporary, state.values())
    world.barrier(group)
    torch.serialization.set_crc32_options(False)  # a third of the time of a save; the manifest's checksums are stronger
    # `commit_directory` syncs. All tensors are in the CPU's memory: nothing is copied ahead, which would be on the stream of a thread's
    # current GPU, so that every rank's thread would make a CUDA context of half a GiB on GPU 0, and wait for what trains there.
    writer = FileSystemWriter(temporary, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files = SummedFiles()
    try:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True), process_group=group)
    except CheckpointException as error:  # no Exception: a thread pool would lose it
        raise cause_of(error, temporary, state) from error
    faults.point("checkpoint.saved")
    (temporary / f".sums.{world.rank}").write_text(json.dumps(files.sums))
    world.barrier(group)
    if world.is_main:
        write_manifest(temporary, step, model, world)
        faults.point("checkpoint.manifest")
        commit_directory(temporary, path, new=True, fence=fence)
    world.barrier(group)


class SummedFiles(FileSystem):
    """Has DCP write past the page cache, and knows what it wrote in the files of this rank."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Any]] = {}
        """Checksums by the files' names."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb" or not Path(path).name.startswith("__"):
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DirectFile(Path(path), hashed=True) as file:
            yield file
        self.sums[Path(path).name] = file.checksum()


def cause_of(error: CheckpointException, folder: Path, state: dict[str, Tensor]) -> Exception:
    """The error that kept a checkpoint from being written: torch reports a full disk in ways that nobody recognises."""
    for failure, _ in error.failures.values():
        if isinstance(failure, OSError):
            return failure
    try:
        require_space(folder, state.values())
    except OSError as full:
        return full
    return RuntimeError(f"{folder}: the checkpoint could not be written: {error}")


def write_manifest(folder: Path, step: int, model: str, world: World) -> None:
    """Gathers the checksums that each rank left for its own files."""
    files = {".metadata": checksum(folder / ".metadata")}
    for rank in range(world.size):
        sums = folder / f".sums.{rank}"
        files |= json.loads(sums.read_text())
        sums.unlink()
    manifest = {"step": step, "world_size": world.size, "model": model, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


Found = tuple[int, dict[int, str]]
"""What `newest_sound_checkpoint` returns."""


def newest_sound(directory: Path, world: World, found: Found | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is intact, with a warning about each damaged one; None when there is none at all.

    Rank 0 verifies, unless that was done before with the result `found`; the others follow. Raises CorruptFileError when there are
    checkpoints and none is intact.
    """
    step, damaged = (found or newest_sound_checkpoint(directory)) if world.is_main else (0, {})
    for number, fault in damaged.items():
        print(f"WARNING: checkpoint {number} is damaged and is passed over ({fault})", file=sys.stderr, flush=True)
    step = world.broadcast_int(-1 if damaged and not step else step)
    if step < 0:
        raise CorruptFileError(
            f"no intact checkpoint in {directory}: {'; '.join(damaged.values())}. "
            "Move them away to start from the base model and the logged batches"
        )
    return (directory / f"{step:06d}", read_manifest(directory / f"{step:06d}")) if step else None


def load(path: Path, manifest: dict[str, Any], model: PreTrainedModel, optimizer: Optimizer, world: World) -> int:
    """Reads a verified checkpoint into model, optimizer and RNG; returns its step. The number of ranks may differ from the writer's."""
    check_model(path, manifest, model)
    state = tensors_of(model, optimizer, world)
    if manifest["world_size"] != world.size:  # RNG streams belong to ranks; those of another number of ranks mean nothing here
        state = {name: value for name, value in state.items() if not name.startswith("rng.")}
    dcp.load(state, checkpoint_id=path)
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
        dcp.load(state, checkpoint_id=path, no_dist=True)


def check_model(path: Path, manifest: dict[str, Any], model: PreTrainedModel) -> None:
    """Raises RunError unless the model has the parameters of the one that wrote the checkpoint."""
    if manifest["model"] != fingerprint(model):
        raise RunError(
            f"{path} was written by another model than model.name: its parameters have other names or shapes; "
            "use the run's own model, or another name for a new run"
        )


def differing(path: Path, model: PreTrainedModel, optimizer: Optimizer, world: World) -> list[str]:
    """Names of the tensors of this rank's state that are others than those of a verified checkpoint. Every rank calls this."""
    ours = snapshot(model, optimizer, world)
    theirs = {name: torch.zeros_like(value) for name, value in ours.items()}
    dcp.load(theirs, checkpoint_id=path)
    return [name for name, value in ours.items() if not torch.equal(local(value), local(theirs[name]))]
