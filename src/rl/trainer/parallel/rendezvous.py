"""Lets the ranks of several nodes find each other, and reports those that do not."""

import json
import os
import socket
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from rl.run_dir.access_token import is_loopback
from rl.system.errors import RunError
from rl.system.linux import address_towards
from rl.trainer.parallel.meetings import absent

START_TIMEOUT_S = 900.0
"""Seconds that ranks wait for each other at the start: a node may have to download a large model
first."""
CONNECT_TIMEOUT_S = 20.0


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
    try:
        store = dist.TCPStore(
            host,
            port,
            is_master=hosts_it,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise RunError(
            f"rank {rank} on {socket.gethostname()} cannot reach the ranks' rendezvous "
            f"{host}:{port} within {timeout_s:.0f} s "
            f"({str(error).splitlines()[0]}); give torchrun --rdzv-endpoint and --local-addr "
            "addresses that every node can reach"
        ) from None
    addresses = exchange(store, "address", rank, size, address_towards(host), deadline)
    if not all(map(is_loopback, addresses)):
        name, address = network(rank, addresses)
        os.environ["GLOO_SOCKET_IFNAME"] = name
        check_neighbour(store, rank, size, address, deadline)
    return dist.PrefixStore("group", store)


def exchange(
    store: dist.Store, what: str, rank: int, size: int, value: str, deadline: float
) -> list[str]:
    """Returns every rank's value, by rank. Raises RunError at the deadline."""
    store.set(f"{what}/{rank}", value)
    keys = [f"{what}/{other}" for other in range(size)]
    began = time.monotonic()
    if missing := absent(store, keys, max(1.0, deadline - began)):
        raise RunError(
            f"rank {rank} on {socket.gethostname()} waited {time.monotonic() - began:.0f} s "
            f"for the other {size - 1}; ranks {missing} did "
            "not appear. Is torchrun running on every node, with the same --nnodes, "
            "--rdzv-id and --rdzv-endpoint? See its log"
        )
    return [store.get(key).decode() for key in keys]


def network(rank: int, addresses: list[str]) -> tuple[str, str]:
    """Returns name and address of the interface over which other nodes reach this one:
    GLOO_SOCKET_IFNAME if it is set.

    `addresses`: each rank's own address on its route to the rendezvous. gloo would use the address
    that this machine's name resolves to, often a loopback address. The rendezvous's own node
    reaches it over loopback too, so it uses the route to another node.
    """
    asked, interfaces = (
        os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0],
        psutil.net_if_addrs(),
    )
    if asked:
        found = [
            entry.address
            for entry in interfaces.get(asked, ())
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        if not found:
            raise RunError(
                f"GLOO_SOCKET_IFNAME = {asked}: {socket.gethostname()} has "
                f"{', '.join(interfaces)}; give one with an address"
            )
        return os.environ["GLOO_SOCKET_IFNAME"], found[0]
    address = addresses[rank]
    if is_loopback(address):
        address = address_towards(next(other for other in addresses if not is_loopback(other)))
    return next(
        (name, address)
        for name, entries in interfaces.items()
        if any(e.address.split("%")[0] == address for e in entries)
    )


def check_neighbour(store: dist.Store, rank: int, size: int, address: str, deadline: float) -> None:
    """Connects to the next rank as gloo and nccl will. Raises RunError within seconds if it
    fails, where they would hang."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        ports = exchange(
            store, "port", rank, size, json.dumps(listener.getsockname()[:2]), deadline
        )
        error, neighbour = "", (rank + 1) % size
        host, port = json.loads(ports[neighbour])
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except OSError as refused:
            error = (
                f"rank {rank} on {socket.gethostname()} cannot connect to rank {neighbour} "
                f"at {host}:{port} ({refused}); nodes connect "
                "on any port: open all ports between them, or set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME to an open network"
            )
        # keeps everybody listening until all have tried
        errors = exchange(store, "error", rank, size, error, deadline)
    if any(errors):
        raise RunError(next(filter(None, [error, *errors])))
