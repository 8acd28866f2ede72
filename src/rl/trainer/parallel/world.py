"""The ranks: their process group, the device of each, and the few values that they exchange."""

import hashlib
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.system.errors import RunError
from rl.trainer.parallel.rendezvous import START_TIMEOUT_S, join_store

SEEN_WITHIN_S = 60.0
"""Seconds within which a new file becomes visible on other nodes; NFS caches the absence of a name for up to a minute."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of the trainer."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """The mesh over which the model is sharded: one dimension, or (replicate, shard)."""
    context_size: int = 1
    """Number of ranks that share each sequence. Groups are consecutive: ranks 0..context_size-1 are the first."""
    context_group: dist.ProcessGroup | None = None
    """The process group of the ranks that share sequences with this one; None with context_size 1."""

    @property
    def context_rank(self) -> int:
        """Index of this rank among those that share its sequences."""
        return self.rank % self.context_size

    @property
    def data_rank(self) -> int:
        """Index of this rank's group among the groups that have samples of their own."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that have samples of their own."""
        return self.size // self.context_size

    @property
    def num_replicas(self) -> int:
        """Number of complete copies of the model over all ranks."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        if self.size > 1:
            dist.barrier(group)

    def broadcast_int(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """Returns rank 0's value on every rank. A background thread needs its own `group`, or its messages mix with the training's."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=group)
        return int(tensor)

    def broadcast_bytes(self, data: bytes, group: dist.ProcessGroup | None = None) -> bytes:
        """Returns rank 0's bytes on every rank. Sends their length, then the bytes as uint8, so nothing is pickled."""
        if self.size == 1:
            return data
        length = self.broadcast_int(len(data), group)
        if not length:  # torch.frombuffer rejects empty buffers
            return b""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=group)
        return tensor.numpy().tobytes()

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces `values` over the ranks by `operation`, in place, and returns them on every rank."""
        if self.size > 1:
            dist.all_reduce(values, op=operation)
        return values


def start_world(
    use_gpus: bool, timeout_s: float, dp_replicate: int = 1, context_parallel: int = 1, start_timeout_s: float = START_TIMEOUT_S
) -> World:
    """Joins the process group that torchrun's environment describes; without torchrun, a group of one.

    `timeout_s` bounds every later wait of one rank for another, `start_timeout_s` the wait for all ranks to appear. On GPUs, CPU tensors
    (batch bytes, decisions, checkpoint plans) are sent over gloo and CUDA tensors over nccl.

    Raises RunError if a rank does not appear or cannot be reached, or if the settings do not divide the number of ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    backend, device = "gloo", torch.device("cpu")
    if use_gpus:
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= count:
            raise RunError(f"local rank {local} has no GPU: {socket.gethostname()} has {count}; give torchrun --nproc-per-node {count}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    launched = "RANK" in os.environ
    rank, size = (int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))) if launched else (0, 1)
    check_division(size, dp_replicate, context_parallel)
    store = join_store(rank, size, start_timeout_s) if launched else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if dp_replicate > 1:
        mesh = init_device_mesh(device.type, (dp_replicate, size // dp_replicate), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    if context_parallel == 1:
        return World(rank, size, device, mesh)
    groups = init_device_mesh(device.type, (size // context_parallel, context_parallel), mesh_dim_names=("data", "context"))
    return World(rank, size, device, mesh, context_parallel, groups.get_group("context"))


def check_division(size: int, dp_replicate: int, context_parallel: int) -> None:
    """Raises RunError unless both settings divide the number of ranks."""
    for key, value, parts in (("dp_replicate", dp_replicate, "model copies"), ("context_parallel", context_parallel, "ranks per row")):
        if size % value:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise RunError(f"trainer.{key} = {value} ({parts}) does not divide {size} ranks; set one of {divisors}, or start other ranks")


def check_nodes(world: World, directory: Path, config: bytes) -> None:
    """Checks that all ranks have rank 0's configuration and see its run directory. Raises RunError on every rank if some do not."""
    if world.size == 1:
        return
    digest = hashlib.sha256(config).digest()
    others = ranks_without(world, world.broadcast_bytes(digest) == digest)
    if others:
        raise RunError(f"ranks {others} have a different configuration from rank 0; start every node with the same file and flags")
    token = world.broadcast_bytes(secrets.token_hex(8).encode()).decode()
    file = directory / f".ranks-{token}"
    if world.is_main:
        directory.mkdir(parents=True, exist_ok=True)
        file.touch()
    world.barrier()
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not (seen := file.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = ranks_without(world, seen)
    if world.is_main:
        file.unlink()
    if blind:
        place = directory.absolute()
        raise RunError(f"ranks {blind} do not see rank 0's run directory {place}: output_dir must be on a file system that all nodes share")


def ranks_without(world: World, holds: bool) -> list[int]:
    """Returns the ranks on which `holds` is False. Every rank calls this."""
    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = not holds
    return world.reduce(flags, dist.ReduceOp.SUM).nonzero().flatten().tolist()
