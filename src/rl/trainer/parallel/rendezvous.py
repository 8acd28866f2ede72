"""Lets the ranks of several nodes find each other, and reports those that do not."""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

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
    try:
        store = dist.TCPStore(host, port, is_master=hosts_it, **options)
    except dist.DistError as error:
        raise RunError(
            f"rank {rank} on {socket.gethostname()} cannot reach the ranks' rendezvous "
            f"{host}:{port} within {timeout_s:.0f} s "
            f"({str(error).splitlines()[0]}); give torchrun --rdzv-endpoint and --local-addr "
            "addresses that every node can reach"
        ) from None
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
