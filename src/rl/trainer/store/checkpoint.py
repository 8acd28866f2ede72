"""Trainer state on disk: float32 weights, optimizer, RNG, step. Written by
torch.distributed.checkpoint (DCP), complete by rename.

`checkpoints/000012/` holds DCP's files and `manifest.json` with the size and checksum of each,
which are verified before they are read.

DCP's own `.metadata` is a pickle, and the manifest with its hash lies beside it: whoever made the
checkpoint controls both. So nothing is made of it but what DCP itself writes for tensors. What it
keeps of other objects would be unpickled by torch, and is refused with the rest.
"""

import errno
import json
import os
import pickle
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer
from transformers import PreTrainedModel

from rl.run_dir.checksums import MANIFEST, checksum, read_manifest, verify_checkpoint
from rl.run_dir.files import (
    CorruptFileError,
    blake2b,
    commit_directory,
    fsync_path,
    temporary_name,
    with_path,
)
from rl.run_dir.paths import numbers
from rl.run_dir.safetensors import HASH, HashedStream
from rl.system import faults
from rl.system.errors import RunError
from rl.system.machine import memory_bytes
from rl.trainer.optim import local
from rl.trainer.parallel.world import World
from rl.trainer.store.threads import SingleTaskThread

SLACK_BYTES = 1 << 16
"""Bytes reserved for headers, manifests and other small files."""


def require_space(directory: Path, tensors: Iterable[Tensor]) -> None:
    """Raises OSError (no space left) if the unsharded tensors do not fit on the file system of
    `directory`.

    Call it before a large write: safetensors and torch report a full disk in ways that cannot be
    recognised.
    """
    needed = sum(tensor.nbytes for tensor in tensors) + SLACK_BYTES
    if (free := shutil.disk_usage(directory).free) < needed:
        text = f"no space left: {needed:,} bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, text, str(directory))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file of adapters. The library's own `save_file` would turn an OSError
    into text."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        path.write_bytes(save(whole, metadata={"format": "pt"}))
    except OSError as error:
        raise with_path(error, path) from None


METADATA = ".metadata"
OF_METADATA = (
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""All that the metadata of tensors are made of."""
DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


class TensorsOnly(pickle.Unpickler):
    """Unpickles only the classes in NAMES."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(
                f"{module}.{name} does not occur in checkpoints written by rl"
            )
        # its module has another name in Python 3.13
        return Path if name == "PosixPath" else super().find_class(module, name)


class CheckpointReader(FileSystemReader):
    """The reader of one checkpoint, which was verified. Raises RunError for one that another
    program than rl's trainer has written."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = metadata_of(path)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def metadata_of(path: Path) -> Metadata:
    """What a checkpoint holds and where. Raises as CheckpointReader does."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = TensorsOnly(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"a {type(metadata).__name__}")
        if not all(
            DATA_FILE.fullmatch(info.relative_path) for info in metadata.storage_data.values()
        ):
            raise ValueError("it names files outside of the checkpoint")
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,
    ) as error:
        raise RunError(
            f"{path / METADATA}: not written by rl's trainer ({error}), and nothing of it was run. "
            f"Do not trust this run directory; to go on without this checkpoint move {path} away"
        ) from None
    return metadata


READ_S = 600.0
"""Seconds that reading a checkpoint may take where nothing else is set."""


def tensors_of(model: PreTrainedModel, optimizer: Optimizer, world: World) -> dict[str, Tensor]:
    """Returns all state that a step depends on and changes, by name; of a model with adapters,
    without its frozen base.

    These are the live tensors: saving reads them, loading writes them.
    """
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    state = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        state |= {f"optimizer.{key}.{names[parameter]}": value for key, value in values.items()}
    state[f"rng.cpu.{world.rank}"] = torch.get_rng_state()
    if world.device.type == "cuda":
        state[f"rng.cuda.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return state


def fingerprint(model: PreTrainedModel) -> str:
    """Returns a hash of the names and shapes of a model's parameters."""
    text = json.dumps(
        [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    )
    return blake2b(text.encode()).hex()


def make_stager(world: World) -> StateDictStager:
    """Returns what copies states to CPU memory, into the same memory each time; on GPUs it is
    page-locked, so that the GPU writes it.

    It is the copying part of torch's DefaultStager, which in torch 2.11 cannot copy a second time.
    """
    return StateDictStager(pin_memory=world.device.type == "cuda", share_memory=False)


def snapshot(
    model: PreTrainedModel,
    optimizer: Optimizer,
    world: World,
    stager: StateDictStager | None = None,
) -> dict[str, Tensor]:
    """Copies the state to CPU memory, to be written while training continues: 4 bytes per weight,
    and 8 more for Adam.

    `stager`: one that has made an earlier copy, which is overwritten.
    """
    on_gpu = world.device.type == "cuda"
    state = tensors_of(model, optimizer, world)
    copied = (stager or make_stager(world)).stage(state, non_blocking=on_gpu)
    if on_gpu:
        torch.cuda.synchronize(world.device)
    return copied


def require_host_memory(
    model: PreTrainedModel, dtype: torch.dtype, writes: bool, offloads: bool, world: World
) -> None:
    """Raises RunError if this machine has less memory than its ranks will hold: if the trainer
    `writes`, the copy for checkpoints and the newest version in `dtype`, which both stay; if it
    `offloads`, the moments. A rank would be killed without a message, at the first checkpoint of
    each start."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trained = [local(weight) for weight in model.parameters() if weight.requires_grad]
    count = ranks * sum(weight.numel() for weight in trained)
    sizes = (
        12 * count * writes,  # a weight and its moments, in float32
        count * dtype.itemsize // world.num_replicas * writes,  # one of the replicas publishes
        8 * count * offloads,
    )
    total = memory_bytes()[0]
    if sum(sizes) > total:
        copies, version, offloaded, memory = (f"{size / 2**30:.1f} GiB" for size in (*sizes, total))
        raise RunError(
            f"the copies of {ranks} rank(s) for checkpoints take {copies} of memory, for "
            f"policy versions {version}, and trainer.optim.offload {offloaded}, but this machine "
            f"has {memory}: shard the model over more machines, do not offload, or train adapters "
            "(trainer.lora)"
        )


class HashedFiles(FileSystem):
    """The file system of a checkpoint's writer: hashes each file while it is written."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, Any]] = {}
        """Size and hash of each file by its name."""

    @contextmanager
    def create_stream(  # type: ignore[override]
        self, path: str | os.PathLike, mode: str
    ) -> Iterator[HashedStream]:
        with super().create_stream(path, mode) as stream:
            yield (hashed := HashedStream(stream))
        self.sums[Path(path).name] = {
            "size": Path(path).stat().st_size,
            HASH: hashed.hash.hexdigest(),
        }


def write(
    path: Path,
    step: int,
    state: dict[str, Tensor],
    model: str,
    world: World,
    group: dist.ProcessGroup | None = None,
    fence: Callable[[], None] | None = None,
    base: str = "",
) -> None:
    """Writes a state as the checkpoint of `step`. Every rank calls this with its part; it returns
    when the checkpoint is complete under its final name. `model`: the model's fingerprint; `base`:
    the digest of the base model's weights if the run needs them further on.

    `group`: a process group used only for this, if it runs in a thread. `fence`: see write_file.
    Raises OSError if the disk is full, TakenError if there already is a checkpoint of that step.
    """
    name = world.broadcast_bytes(temporary_name(path).name.encode(), group).decode()
    temporary = path.with_name(name)
    if world.is_main:
        temporary.mkdir(parents=True)
        require_space(temporary, state.values())
    world.barrier(group)
    # CRCs take a third of the time; the manifest's checksums are stronger
    torch.serialization.set_crc32_options(False)
    # No sync_files: what is synced is below, and in `commit_directory`. No copying ahead: the
    # tensors are in CPU memory already, and it would use a stream of the thread's current GPU, so
    # every rank's thread would create a CUDA context (half a GiB) on GPU 0 and wait for the
    # training there.
    writer = FileSystemWriter(temporary, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files = HashedFiles()
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # it is not an Exception, so a thread pool would lose it
        raise cause_of(error, temporary, state) from error
    faults.point("checkpoint.saved")
    # without .metadata.tmp
    sums = {name: file for name, file in files.sums.items() if name.startswith("__")}
    for name in sums:  # rank 0's fsync, below, does not reach the pages of another machine
        fsync_path(temporary / name)
    of_ranks = world.gather_bytes(json.dumps(sums).encode(), group)
    if world.is_main:
        manifest = {"step": step, "world_size": world.size, "model": model, "base": base}
        manifest["files"] = {METADATA: checksum(temporary / METADATA)}
        for data in of_ranks:
            manifest["files"] |= json.loads(data)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        faults.point("checkpoint.manifest")
        commit_directory(temporary, path, new=True, fence=fence)
    world.barrier(group)


def cause_of(error: CheckpointException, folder: Path, state: dict[str, Tensor]) -> Exception:
    """Returns the error that kept a checkpoint from being written; torch's own errors do not
    show that a disk is full."""
    for failure, _ in error.failures.values():
        if isinstance(failure, OSError):
            return failure
    try:
        require_space(folder, state.values())
    except OSError as full:
        return full
    return RuntimeError(f"{folder}: the checkpoint could not be written: {error}")


def newest(directory: Path, world: World) -> Path | None:
    """Returns the newest checkpoint, the same on every rank; None if there is none."""
    # another rank may not see the newest yet
    step = world.broadcast_int(max(numbers(directory), default=0))
    return directory / f"{step:06d}" if step else None


def fault_of(path: Path, world: World, deadline_s: float = READ_S) -> str:
    """Returns on every rank the fault that the first of them has found in its share of a
    checkpoint's files; empty if there is none.

    Waits for: the disk; after `deadline_s` seconds raises RunError.
    """
    fault, reading = "", SingleTaskThread()
    reading.start(verify_checkpoint, path, world.rank, world.size)
    try:
        reading.result(f"{path} to be read: does that disk answer?", deadline_s)
    except CorruptFileError as error:
        fault = str(error)
        if world.size > 1:
            fault += f", as rank {world.rank} on {socket.gethostname()} reads it"
    world.barrier()  # for which no collective waits: one rank's disk may be slower than another's
    return next(filter(None, world.gather_bytes(fault.encode())), b"").decode()


def load(
    path: Path,
    model: PreTrainedModel,
    optimizer: Optimizer,
    world: World,
    group: dist.ProcessGroup | None = None,
    deadline_s: float = READ_S,
    base: str = "",
) -> int:
    """Verifies a checkpoint and reads it into model, optimizer and RNG; returns its step. The
    number of ranks may differ from the writer's.

    `group`: one whose collectives may wait for disks. `base`: as in `write`. Raises
    CorruptFileError on every rank if the checkpoint is damaged: then `rl` repairs the run. Waits
    for: the disk; after `deadline_s` seconds raises RunError.
    """
    if fault := fault_of(path, world, deadline_s):
        raise CorruptFileError(
            f"{fault}; `rl` moves {path} away and starts from what is before it: without "
            "`rl`, do so yourself"
        )
    manifest = read_manifest(path)
    check_model(path, manifest, model, base)
    reader, reading = CheckpointReader(path), SingleTaskThread()
    state = without_missing_rng(tensors_of(model, optimizer, world), reader)
    # RNG streams belong to ranks, and mean nothing to another number of ranks
    if manifest["world_size"] != world.size:
        state = {name: value for name, value in state.items() if not name.startswith("rng.")}
    reading.start(load_state, state, reader, world, group)
    reading.result(f"{path} to be loaded: does that disk answer?", deadline_s)
    world.barrier()
    if f"rng.cpu.{world.rank}" in state:
        torch.set_rng_state(state[f"rng.cpu.{world.rank}"])
    if f"rng.cuda.{world.rank}" in state:
        torch.cuda.set_rng_state(state[f"rng.cuda.{world.rank}"], world.device)
    return manifest["step"]


def without_missing_rng(state: dict[str, Tensor], reader: CheckpointReader) -> dict[str, Tensor]:
    """Returns the state without RNG streams that the checkpoint lacks, of a rank that its writer
    had not, or of a GPU."""
    return {
        name: value
        for name, value in state.items()
        if name in reader.metadata.state_dict_metadata or not name.startswith("rng.")
    }


def load_state(
    state: dict[str, Tensor],
    reader: CheckpointReader,
    world: World,
    group: dist.ProcessGroup | None,
) -> None:
    """Reads a checkpoint into `state`. Raises RuntimeError."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # of this thread
    try:
        dcp.load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:  # it is not an Exception, so a thread pool would lose it
        raise RuntimeError(f"{reader.path}: could not be loaded: {error}") from error


def load_weights(
    path: Path, manifest: dict[str, Any], model: PreTrainedModel, base: str = ""
) -> None:
    """Reads only the weights of a verified checkpoint, in a single process without a process
    group. `base`: as in `write`."""
    check_model(path, manifest, model, base)
    state = {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=CheckpointReader(path), no_dist=True)


def check_model(path: Path, manifest: dict[str, Any], model: PreTrainedModel, base: str) -> None:
    """Raises RunError unless the model has the same parameters as the one that wrote the
    checkpoint, and the same base if it needs one: adapters and the KL term mean nothing to
    another. Checkpoints of an older rl name none, or one of another length."""
    if manifest["model"] != fingerprint(model):
        raise RunError(
            f"{path} was written by another model than model.name: names or shapes of "
            "parameters differ; "
            "use the run's own model, or another name for a new run"
        )
    if len(manifest["base"]) == len(base) and manifest["base"] != base:
        raise RunError(
            f"{path} was written beside other files of model.name's weights, on which the "
            "adapters or the KL term depend; put these back "
            "(of a model of the hub, the earlier revision), give a copy of them as "
            "model.name, or start a new run"
        )


def differing(path: Path, model: PreTrainedModel, optimizer: Optimizer, world: World) -> list[str]:
    """Returns the names of the tensors in this rank's state that differ from a verified
    checkpoint. Every rank calls this."""
    reader = CheckpointReader(path)
    ours = without_missing_rng(snapshot(model, optimizer, world), reader)
    theirs = {name: torch.zeros_like(value) for name, value in ours.items()}
    dcp.load(theirs, storage_reader=reader)
    return [
        name for name, value in ours.items() if not torch.equal(local(value), local(theirs[name]))
    ]
