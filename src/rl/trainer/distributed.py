"""Ranks: the process group, the device of each rank, and the few things that ranks tell each other."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """This process among the ranks of the trainer."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Over which the model is sharded: one dimension, or (replicate, shard)."""
    context_size: int = 1
    """Ranks that share each sequence. Neighbours: ranks 0..context_size-1 are the first such group."""
    context_group: dist.ProcessGroup | None = None
    """They, with context_size > 1."""

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
        return self.size // self.context_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def broadcast_int(self, value: int) -> int:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(tensor, src=0)
        return int(tensor)

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes on every rank: their length, then themselves as uint8. No pickle."""
        if self.size == 1:
            return data
        length = self.broadcast_int(len(data))
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(tensor, src=0)
        return tensor.numpy().tobytes()

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """`values` summed (or the like) over the ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(values, op=operation)
        return values


def start_world(use_gpus: bool, timeout_s: float) -> World:
    """Joins the process group: the one that torchrun's environment describes, or a group of one without it.

    On GPUs, CPU tensors (batch bytes, decisions, checkpoint plans) travel over gloo and CUDA tensors over nccl.
    """
    timeout = timedelta(seconds=timeout_s)
    backend, device = "gloo", torch.device("cpu")
    if use_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return World(dist.get_rank(), dist.get_world_size(), device, mesh)


def stop_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
