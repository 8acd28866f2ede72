"""Ports for processes that are told which one to take."""

import contextlib
import random
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives out, or another test might get one of them before
    it is used here."""
    first_given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(10_000, first_given_out), 10 * count):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports[:count]
