"""Who this machine is in a run: its index among the machines, and the name or address at which
others reach it."""

import contextlib
import os
import socket
from collections.abc import Mapping

import psutil

from rl.config.cluster import ClusterConfig
from rl.run_dir.status import NODE_ADDRESS
from rl.system.errors import ConfigError
from rl.system.linux import address_towards

INDICES = (
    "RL_NODE_INDEX",
    "JOB_COMPLETION_INDEX",
    "LWS_WORKER_INDEX",
    "SKYPILOT_NODE_RANK",
    "DSTACK_NODE_RANK",
    "SLURM_NODEID",
)
"""Environment variables that hold a machine's index, the most specific first."""
OFFSET = "RL_INDEX_OFFSET"
"""Environment variable whose value is added to such an index: an engine counts the machines that
serve from 0, too."""


def index_of(cluster: ClusterConfig, variables: Mapping[str, str] = os.environ) -> int:
    """Returns this machine's index. Raises ConfigError if nothing tells it, or if it is out of
    range."""
    if cluster.index is not None:
        return cluster.index
    name = next(filter(variables.get, INDICES), None)
    if name is None:
        raise ConfigError(
            "cluster.index\n    no engine has told this machine's index "
            f"({', '.join(INDICES)}): give --cluster.index"
        )
    text, offset = variables[name], variables.get(OFFSET, "0")
    if not (text.isdigit() and offset.isdigit()):
        raise ConfigError(
            f"{name} = {text!r}, {OFFSET} = {offset!r}\n    must be numbers: unset it, or "
            "give --cluster.index"
        )
    index = int(text) + int(offset)
    if index >= cluster.nodes:
        raise ConfigError(
            f"{name} = {text}\n    this machine's index is {index}, but cluster.nodes = "
            f"{cluster.nodes}: raise it"
        )
    return index


def own_address() -> str:
    """Returns RL_NODE_ADDRESS if it is set; else an address of this machine, by its name or on
    its way out, if there is one of IPv4, and never a loopback one if there is another: on Debian
    a machine's name is 127.0.1.1."""
    if address := os.environ.get(NODE_ADDRESS):
        return address
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses += [str(entry[4][0]) for entry in entries]
    with contextlib.suppress(OSError):
        addresses.append(address_towards("192.0.2.1"))  # for documentation, RFC 5737
    interfaces = psutil.net_if_addrs()
    for name, state in psutil.net_if_stats().items():
        entries = interfaces.get(name, []) if state.isup else []
        families = socket.AF_INET, socket.AF_INET6
        addresses += [entry.address for entry in entries if entry.family in families]
    outside = [each for each in addresses if not each.startswith(("127.", "::1", "fe80:"))]
    return min(outside, key=lambda each: ":" in each, default="127.0.0.1")
