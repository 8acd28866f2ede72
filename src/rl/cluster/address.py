"""The name or address at which other machines reach this one."""

import contextlib
import os
import socket

import psutil

from rl.run_dir.status import NODE_ADDRESS
from rl.system.linux import address_towards


def own_address() -> str:
    """Returns RL_NODE_ADDRESS if it is set; else an address of this machine, by its name or on
    its way out, if there is one of IPv4, and never a loopback one if there is another: on Debian
    a machine's name is 127.0.1.1."""
    if given := os.environ.get(NODE_ADDRESS):
        return given
    candidates = sorted(
        [*addresses_of_name(), *outgoing(), *interface_addresses()],
        key=lambda address: ":" in address,
    )
    return next(
        (address for address in candidates if not address.startswith(("127.", "::1", "fe80:"))),
        "127.0.0.1",
    )


def addresses_of_name() -> list[str]:
    try:
        return [
            str(entry[4][0])
            for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        return []


def outgoing() -> list[str]:
    """Returns the address on the default route; empty without one."""
    with contextlib.suppress(OSError):
        return [address_towards("192.0.2.1")]  # an address for documentation, RFC 5737
    return []


def interface_addresses() -> list[str]:
    """Returns the addresses of the interfaces that are up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
