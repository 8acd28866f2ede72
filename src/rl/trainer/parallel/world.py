"""The ranks: how those of several nodes find each other, their process group, the device of each,
and the few values that they exchange.

`python -m rl.trainer.parallel.world` prints one line: the number of GPUs that torch sees, a space,
and the CUDA version that it is built for.
"""

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.run_dir.access_token import is_loopback
from rl.system.errors import RunError
from rl.system.linux import address_towards

START_TIMEOUT_S = 900.0
"""Seconds that ranks wait for each other at the start: a node may have to download a large model
first."""
CONNECT_TIMEOUT_S = 20.0
TELL_S = 45.0
"""Seconds after which a rank says for whom it waits, again and again."""


@dataclass(frozen=True)
class Rendezvous:
    """The store in which ranks announce themselves."""

    store: dist.Store
    rank: int
    size: int
    deadline: float
    """By time.monotonic."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    def exchange(self, what: str, value: str) -> list[str]:
        """Returns every rank's value, by rank. Every TELL_S names the ranks that gave none. Raises
        RunError at the deadline."""
        self.store.set(f"{what}/{self.rank}", value)
        keys, began = [f"{what}/{rank}" for rank in range(self.size)], time.monotonic()
        while True:
            left_s = max(1.0, self.deadline - time.monotonic())
            try:
                self.store.wait(keys, timedelta(seconds=min(left_s, TELL_S)))
                return [self.store.get(key).decode() for key in keys]
            except dist.DistStoreError:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            fault = (
                f"{self.name} waited {time.monotonic() - began:.0f} s for the other "
                f"{self.size - 1}; ranks {missing} did not appear. Is torchrun running on every "
                "node, with the same --nnodes, --rdzv-id and --rdzv-endpoint? See its log"
            )
            if time.monotonic() >= self.deadline:
                raise RunError(fault)
            print(f"trainer: {fault}", flush=True)

    def check_neighbour(self, address: str) -> None:
        """Connects to the next rank as gloo and nccl will. Raises RunError within seconds if it
        fails, where they would hang."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            addresses = self.exchange("port", json.dumps(listener.getsockname()[:2]))
            error, neighbour = "", (self.rank + 1) % self.size
            host, port = json.loads(addresses[neighbour])
            try:
                socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
            except OSError as refused:
                error = (
                    f"{self.name} cannot connect to rank {neighbour} at {host}:{port} ({refused}); "
                    "nodes connect on any port: open all ports between them, or set "
                    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an open network"
                )
            # keeps everybody listening until all have tried
            errors = self.exchange("error", error)
        if any(errors):
            raise RunError(next(filter(None, [error, *errors])))


def join_store(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Returns the store of all ranks, after each has announced itself in it. Also sets the
    interface over which gloo reaches the others.

    Waits for: all other ranks, up to `timeout_s` from now. Raises RunError naming the ranks that do
    not appear or cannot be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # else torchrun's agent does
    hosts_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline, timeout = time.monotonic() + timeout_s, timedelta(seconds=timeout_s)
    options = {"timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    fault = (
        f"rank {rank} on {socket.gethostname()} cannot reach the ranks' rendezvous {host}:{port} "
        f"within {{:.0f}} s{{}}; give torchrun --rdzv-endpoint and --local-addr addresses that "
        "every node can reach"
    )
    # torch says nothing before the end
    text = f"trainer: {fault.format(TELL_S, '')}"
    teller = threading.Timer(TELL_S, print, [text], {"flush": True})
    teller.start()
    try:
        store = dist.TCPStore(host, port, is_master=hosts_it, **options)
    except dist.DistError as error:
        why = f" ({str(error).splitlines()[0]})"
        raise RunError(fault.format(timeout_s, why)) from None
    finally:
        teller.cancel()
    here = Rendezvous(store, rank, size, deadline)
    addresses = here.exchange("address", address_towards(host))
    if not all(map(is_loopback, addresses)):
        os.environ["GLOO_SOCKET_IFNAME"], address = network(rank, addresses)
        here.check_neighbour(address)
    return dist.PrefixStore("group", store)


def network(rank: int, addresses: list[str]) -> tuple[str, str]:
    """Returns name and address of the interface over which other nodes reach this one:
    GLOO_SOCKET_IFNAME if it is set.

    `addresses`: each rank's own address on its route to the rendezvous. gloo would use the address
    that this machine's name resolves to, often a loopback address. The rendezvous's own node
    reaches it over loopback too, so it uses the route to another node.
    """
    setting = os.environ.get("GLOO_SOCKET_IFNAME", "")
    address = addresses[rank]
    if is_loopback(address) and not setting:
        address = address_towards(next(other for other in addresses if not is_loopback(other)))
    for name, entry in interfaces():
        if name == setting.split(",")[0] or (not setting and entry == address):
            return setting or name, entry
    names = ", ".join(psutil.net_if_addrs())
    raise RunError(
        f"GLOO_SOCKET_IFNAME = {setting or address}: {socket.gethostname()} has {names}; give one "
        "with an address"
    )


def interfaces() -> Iterator[tuple[str, str]]:
    """Yields the name and an address of each of this machine's interfaces."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address.split("%")[0]


SEEN_WITHIN_S = 60.0
"""Seconds within which a new file becomes visible on other nodes; NFS caches the absence of a
name for up to a minute."""


@dataclass(frozen=True)
class World:
    """This process among the ranks of the trainer."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """The mesh over which the model is sharded: one dimension, or (replicate, shard)."""
    context_size: int = 1
    """Number of ranks that share each sequence. Groups are consecutive: ranks 0..context_size-1
    are the first."""
    context_group: dist.ProcessGroup | None = None
    """The process group of the ranks that share sequences with this one; None with context_size
    1."""
    experts: DeviceMesh | None = None
    """The mesh over which experts are sharded, (shard, expert) or (replicate, shard, expert);
    None if they are like any other weights."""
    groups: tuple[dist.ProcessGroup, ...] = ()
    """All process groups of training: the default one, those of the mesh, and the context group."""
    waits: dist.ProcessGroup | None = None
    """The gloo group of the main threads' waits. A collective of training has a short deadline
    (`trainer.rank_timeout_s`), by which a rank that hangs is noticed. A rank that waits for
    something else, such as the orchestrator or a disk, comes much later and is not lost. So ranks
    wait for each other here before each collective that such a wait may precede. None for a single
    rank."""

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

    def new_group(self, timeout_s: float) -> dist.ProcessGroup | None:
        """Returns a gloo group of all ranks for a background thread, None for a single rank.
        Every rank calls this."""
        if self.size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def set_timeout(self, seconds: float) -> None:
        """Sets the deadline of all collectives of training."""
        for group in self.groups:
            c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Waits until every rank is here, whatever the others have to wait for: see `waits`."""
        self.broadcast_int(0, group)

    def broadcast_int(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """Returns rank 0's value on every rank, and waits as `barrier` does. A background thread
        needs its own `group`, or its messages mix with the training's."""
        if self.size == 1:
            return value
        number = torch.tensor(int(value) if self.is_main else 0)
        dist.all_reduce(number, group=group or self.waits)  # a broadcast would not wait for all
        return int(number)

    def broadcast_bytes(self, data: bytes, group: dist.ProcessGroup | None = None) -> bytes:
        """Returns rank 0's bytes on every rank. Sends their length, for which it waits as
        `barrier` does, then the bytes as uint8, so that nothing is pickled."""
        length = self.broadcast_int(len(data), group)
        if self.size == 1 or not length:  # torch.frombuffer rejects empty buffers
            return data if self.size == 1 else b""
        sent = bytearray(data) if self.is_main else bytearray(length)
        tensor = torch.frombuffer(sent, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=group)
        return bytes(sent)

    def gather_bytes(self, data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
        """Returns each rank's bytes, by rank, on every rank. Sends them as uint8, padded to the
        longest."""
        if self.size == 1:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths, group=group)
        longest = int(lengths.max())
        if not longest:  # torch.frombuffer rejects empty buffers
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        table = torch.empty(self.size, longest, dtype=torch.uint8)
        dist.all_gather(list(table), padded, group=group)
        return [
            row[:length].numpy().tobytes()
            for row, length in zip(table, lengths.tolist(), strict=True)
        ]

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces `values` over the ranks by `operation`, in place, and returns them on every
        rank."""
        if self.size > 1:
            dist.all_reduce(values, op=operation)
        return values


def start_world(
    use_gpus: bool,
    timeout_s: float,
    dp_replicate: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    start_timeout_s: float = START_TIMEOUT_S,
) -> World:
    """Joins the process group that torchrun's environment describes; without torchrun, a group of
    one.

    `timeout_s` bounds the waits of `World.waits`; `start_timeout_s` the wait for all ranks to
    appear, and each collective until `set_timeout`. On GPUs, CPU tensors (batch bytes, checkpoint
    plans) are sent over gloo and CUDA tensors over nccl.

    Raises RunError if a rank does not appear or cannot be reached, or if the settings do not divide
    the number of ranks.
    """
    backend, device = "gloo", torch.device("cpu")
    if use_gpus:
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= count:
            raise RunError(
                f"local rank {local} has no GPU: {socket.gethostname()} has {count}; give "
                f"torchrun --nproc-per-node {count}"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    launched = "RANK" in os.environ
    rank, size = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE")) if launched else (0, 1)
    check_division(size, dp_replicate, context_parallel, expert_parallel)
    store = join_store(rank, size, start_timeout_s) if launched else dist.HashStore()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=start_timeout_s)
    )

    def mesh_of(**sizes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    replicas = {"replicate": dp_replicate} if dp_replicate > 1 else {}
    mesh = init_device_mesh(device.type, (size,))
    if replicas:
        mesh = mesh_of(**replicas, shard=size // dp_replicate)
    context = experts = None
    if context_parallel > 1:
        rows = mesh_of(data=size // context_parallel, context=context_parallel)
        context = rows.get_group("context")
    if expert_parallel > 1:
        shards = size // dp_replicate // expert_parallel
        experts = mesh_of(**replicas, shard=shards, expert=expert_parallel)
    groups = tuple(c10d._world.pg_map)
    world = World(rank, size, device, mesh, context_parallel, context, experts, groups)
    # Those of meshes have torch's own deadlines, 10 or 30 minutes.
    world.set_timeout(start_timeout_s)
    return replace(world, waits=world.new_group(timeout_s))


def check_division(
    size: int, dp_replicate: int, context_parallel: int, expert_parallel: int = 1
) -> None:
    """Raises RunError unless the settings divide the number of ranks, or `expert_parallel` the
    ranks of one copy."""
    for key, value, what, ranks in (
        ("dp_replicate", dp_replicate, "model copies", size),
        ("context_parallel", context_parallel, "ranks per row", size),
        ("expert_parallel", expert_parallel, "parts of the experts", size // dp_replicate),
    ):
        if ranks % value:
            divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            of = " of a model copy" if ranks < size else ""
            raise RunError(
                f"trainer.{key} = {value} ({what}) does not divide {ranks} ranks{of}; set "
                f"one of {divisors}, or start other ranks"
            )


def check_nodes(world: World, directory: Path, config: bytes) -> None:
    """Checks that all ranks have rank 0's configuration and see its run directory. Raises
    RunError on every rank if some do not."""
    if world.size == 1:
        return
    digest = hashlib.sha256(config).digest()
    others = ranks_without(world, world.broadcast_bytes(digest) == digest)
    if others:
        raise RunError(
            f"ranks {others} have a different configuration from rank 0; start every node "
            "with the same file and flags"
        )
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
        raise RunError(
            f"ranks {blind} do not see rank 0's run directory {directory.absolute()}: "
            "output_dir must be on a file system that all nodes share"
        )


def ranks_without(world: World, holds: bool) -> list[int]:
    """Returns the ranks on which `holds` is False. Every rank calls this."""
    return [
        rank for rank, lacks in enumerate(world.gather_bytes(b"" if holds else b"lacks")) if lacks
    ]


if __name__ == "__main__":
    print(torch.cuda.device_count(), torch.version.cuda or "no CUDA in this build of torch")
