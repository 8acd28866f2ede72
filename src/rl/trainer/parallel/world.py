"""Ranks: the process group, the device of each rank, and the few values that ranks exchange."""

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
"""Seconds within which a new file shows on the other nodes; NFS caches the absence of a name for up to a minute."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of the trainer."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Over which the model is sharded: one dimension, or (replicate, shard)."""
    context_size: int = 1
    """Number of ranks that share each sequence. Neighbours: ranks 0..context_size-1 are the first such group."""
    context_group: dist.ProcessGroup | None = None
    """The process group of these ranks; None with context_size 1."""

    @property
    def context_rank(self) -> int:
        """Place among the ranks that share sequences with this one."""
        return self.rank % self.context_size

    @property
    def data_rank(self) -> int:
        """Place among the groups of ranks that have samples of their own."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Number of groups of ranks that have samples of their own."""
        return self.size // self.context_size

    @property
    def num_replicas(self) -> int:
        """Whole copies of the model over all ranks."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        if self.size > 1:
            dist.barrier(group)

    def broadcast_int(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """Rank 0's value on every rank. A thread beside the training needs a `group` of its own, or its messages meet the training's."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=group)
        return int(tensor)

    def broadcast_bytes(self, data: bytes, group: dist.ProcessGroup | None = None) -> bytes:
        """Rank 0's bytes on every rank: their length, then themselves as uint8. No pickle."""
        if self.size == 1:
            return data
        length = self.broadcast_int(len(data), group)
        if not length:  # torch makes no tensor of no bytes
            return b""
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=group)
        return tensor.numpy().tobytes()

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """`values` summed (or the like) over the ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(values, op=operation)
        return values


def start_world(
    use_gpus: bool, timeout_s: float, dp_replicate: int = 1, context_parallel: int = 1, start_timeout_s: float = START_TIMEOUT_S
) -> World:
    """Joins the process group: the one that torchrun's environment describes, or a group of one without it.

    `timeout_s` bounds every later wait of one rank for another, `start_timeout_s` the wait for all of them to come. On GPUs, CPU tensors
    (batch bytes, decisions, checkpoint plans) travel over gloo and CUDA tensors over nccl.

    Raises RunError when a rank does not come or cannot be reached, or when the settings do not divide the ranks.
    """
    timeout = timedelta(seconds=timeout_s)
    backend, device = "gloo", torch.device("cpu")
    if use_gpus:
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= count:
            raise RunError(f"local rank {local} has no GPU: {socket.gethostname()} shows {count}; give torchrun --nproc-per-node {count}")
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
    """Raises RunError unless the ranks can be divided so."""
    for key, value, parts in (("dp_replicate", dp_replicate, "copies of the model"), ("context_parallel", context_parallel, "ranks a row")):
        if size % value:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise RunError(f"trainer.{key} = {value} ({parts}) does not divide {size} ranks; give one of {divisors}, or start other ranks")


def check_nodes(world: World, directory: Path, config: bytes) -> None:
    """Over several ranks: all have rank 0's configuration and see its run directory. Raises RunError, on every rank, if some do not."""
    if world.size == 1:
        return
    digest = hashlib.sha256(config).digest()
    others = ranks_without(world, world.broadcast_bytes(digest) == digest)
    if others:
        raise RunError(f"ranks {others} have another configuration than rank 0; start every node with the same file and flags")
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
        raise RunError(
            f"ranks {blind} do not see rank 0's run directory {place}: output_dir must lie on a file system that all nodes share"
        )


def ranks_without(world: World, holds: bool) -> list[int]:
    """The ranks on which something does not hold. Every rank calls this."""
    flags = torch.zeros(world.size, dtype=torch.int64)
    flags[world.rank] = not holds
    return world.reduce(flags, dist.ReduceOp.SUM).nonzero().flatten().tolist()
