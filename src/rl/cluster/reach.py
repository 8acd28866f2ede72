"""How the machines of a run find and reach each other: this one's index among them, the name or
address at which others reach it, and which of them it reaches.

A machine whose network is cut may still see the run's directory, on another network or by a cache.
So it looks alive while the ranks of all others wait for it.
"""

import asyncio
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Mapping

import psutil

from rl.config.cluster import ClusterConfig
from rl.run_dir.lease import LEASE_S
from rl.run_dir.nodes import Nodes, NodeStatus
from rl.run_dir.status import NODE_ADDRESS, Staleness
from rl.system.errors import ConfigError
from rl.system.linux import address_towards, listen_everywhere

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
KNOCK_S = 3.0
"""Seconds between attempts to connect, each of which has as long."""
READ_S = 9.0
"""Seconds between looks at the files of the other machines: all read those of all, so their cost
is the square of their number."""
CUT_S = 45.0
"""A machine counts as cut off when nothing has reached it for this long: TCP outlives a cable
that is pulled for half a minute."""


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


class Reach:
    """Lets other machines connect to this one, at `port`, and tries to connect to them, from a
    thread that lives as long as the process.

    A machine that was never reached is not cut off: a firewall does that, which the ranks report
    themselves.
    """

    def __init__(self, nodes: Nodes, index: int):
        self.nodes, self.index, self.heartbeats = nodes, index, Staleness()
        self.door = listen_everywhere()
        self.door.setblocking(False)
        self.port: int = self.door.getsockname()[1]
        self.reached = {
            cut: -math.inf for status in nodes.statuses().values() for cut in status.cut_off
        }
        """Index -> time at which a machine with it was last reached, by time.monotonic. Its
        successor, or its own next start, is in the world once it is reached, too. So is one that
        was cut off, as this machine or others said, when this process started."""
        self.statuses, self.read_at = dict[int, NodeStatus](), -math.inf
        """The newest statuses of the other machines, and the time (time.monotonic) at which they
        were read."""
        self.others: list[int] = []
        """The machines whose heartbeat changes."""
        threading.Thread(target=self._knock_forever, name="reach", daemon=True).start()

    def cut_off(self) -> list[int]:
        """Returns the machines that were once reached and now are not."""
        now = time.monotonic()
        # the thread may add one
        late = [index for index, at in list(self.reached.items()) if now - at >= CUT_S]
        return [index for index in late if index in self.others or self.reached[index] == -math.inf]

    def is_alone(self) -> bool:
        """Returns whether this machine is the one that is cut off: it reaches none of several
        others."""
        return len(self.others) > 1 and set(self.cut_off()) >= set(self.others)

    def look(self) -> None:
        """Tries to connect to all other machines, once."""
        if time.monotonic() - self.read_at >= READ_S:
            self.statuses, self.read_at = self.nodes.statuses(), time.monotonic()
        living = {
            index: status
            for index, status in self.statuses.items()
            if index != self.index
            and status.door
            and self.heartbeats.look(str(index), status.heartbeat) < LEASE_S
        }
        for index in asyncio.run(knock(living)):
            self.reached[index] = time.monotonic()
        self.others = sorted(living)

    def _knock_forever(self) -> None:
        while True:
            began = time.monotonic()
            # the run's directory does not answer: others judge by that
            with contextlib.suppress(OSError):
                self.look()
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.door.accept()[0].close()
            time.sleep(max(0.1, began + KNOCK_S - time.monotonic()))


async def knock(machines: dict[int, NodeStatus]) -> list[int]:
    """Tries to connect to all machines at once. Returns those that are reached within KNOCK_S."""
    reached = list[int]()

    async def connect(index: int, status: NodeStatus) -> None:
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(KNOCK_S):
                _, connection = await asyncio.open_connection(status.address, status.door)
            connection.close()
            reached.append(index)

    await asyncio.gather(*(connect(index, status) for index, status in machines.items()))
    return reached
