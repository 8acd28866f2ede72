"""Which machines reach each other, with listening sockets in place of machines.

The index of a machine, and the address that it gives the others, from what its name, its routes
and its interfaces say.
"""

import socket
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from rl.cluster import reach as module
from rl.cluster.lead import with_open_hosts
from rl.cluster.reach import Reach, index_of
from rl.config.cluster import ClusterConfig
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import RunDir
from rl.run_dir.status import NODE_ADDRESS
from rl.system.errors import ConfigError
from tests.cluster.configs import run_config, status_of
from tests.waiting import until


class Other:
    """A machine that beats, and whose door is closed by `cut`."""

    def __init__(self, nodes, index, is_open=True):
        self.nodes, self.door = nodes, socket.create_server(("127.0.0.1", 0))
        door = self.door.getsockname()[1]
        self.status = status_of(index, address="127.0.0.1", door=door)
        if not is_open:
            self.cut()

    def beat(self):
        self.status = msgspec.structs.replace(self.status, heartbeat=self.status.heartbeat + 1)
        self.nodes.write(self.nodes.status_path(self.status.index), self.status)

    def cut(self):
        self.door.close()


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    for name, seconds in {"KNOCK_S": 0.05, "READ_S": 0.15, "CUT_S": 0.3, "LEASE_S": 0.5}.items():
        monkeypatch.setattr(module, name, seconds)
    return Nodes(RunDir(tmp_path, tmp_path / "weights"))


def cut_off(reach, others):
    """What is cut off while those machines beat."""
    for other in others:
        other.beat()
    return reach.cut_off()


def test_a_machine_that_was_reached_and_is_no_more_is_cut_off_until_it_is_back(nodes):
    others = [Other(nodes, 1), Other(nodes, 2), Other(nodes, 3, is_open=False)]
    reach = Reach(nodes, 0)
    until(lambda: cut_off(reach, others) == [] and set(reach.reached) == {1, 2})
    others[1].cut()
    until(lambda: cut_off(reach, others) == [2])  # and not 3, which was never reached
    assert not reach.is_alone()
    others[1] = Other(nodes, 2, is_open=False)  # started again, but still cut off
    for _ in range(10):
        assert cut_off(reach, others) == [2]
        time.sleep(0.05)
    others[1] = Other(nodes, 2)
    until(lambda: cut_off(reach, others) == [])


def test_one_that_starts_again_knows_what_was_cut_off(nodes):
    others = [Other(nodes, 1, is_open=False), Other(nodes, 2)]
    others[1].status = msgspec.structs.replace(others[1].status, cut_off=[1])
    others[1].beat()
    reach = Reach(nodes, 0)
    for _ in range(10):
        assert cut_off(reach, others) == [1], "before it has tried itself, too"
        time.sleep(0.05)
    assert not reach.is_alone()
    others[0] = Other(nodes, 1)
    until(lambda: cut_off(reach, others) == [])


def test_one_that_reaches_no_other_is_alone_unless_there_is_only_one_or_they_are_dead(nodes):
    others = [Other(nodes, 1), Other(nodes, 2)]
    reach = Reach(nodes, 0)
    until(lambda: cut_off(reach, others) == [] and set(reach.reached) == {1, 2})
    for other in others:
        other.cut()
    until(lambda: cut_off(reach, others) == [1, 2])
    assert reach.is_alone()
    # 2 beats no more: it is dead, not out of reach
    until(lambda: cut_off(reach, others[:1]) == [1])
    assert not reach.is_alone()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_others_reach_its_door(nodes, host):
    """Regression: a machine without IPv4 was never reached, and so never cut off."""
    reach = Reach(nodes, 0)
    for _ in range(300):
        socket.create_connection((host, reach.port), 5).close()


def no_route():
    raise OSError


def entry(family, text):
    return SimpleNamespace(family=family, address=text)


@pytest.mark.parametrize(
    ("named", "route", "interfaces", "own"),
    [
        (["127.0.1.1"], ["10.0.0.5"], ["127.0.0.1", "10.0.0.5"], "10.0.0.5"),
        (["fd00::5", "10.0.0.5"], [], ["::1"], "10.0.0.5"),
        ([], [], ["127.0.0.1", "::1", "fe80::5%eth0", "fd00::5"], "fd00::5"),
        (["::1"], [], ["127.0.0.1", "::1", "fe80::5%eth0"], "127.0.0.1"),
    ],
)
def test_a_machine_without_ipv4_has_an_address_too(monkeypatch, named, route, interfaces, own):
    """Regression: a machine with IPv6 alone called itself 127.0.0.1, and what must be reached
    there listened on IPv4."""
    monkeypatch.delenv(NODE_ADDRESS, raising=False)
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    monkeypatch.setattr(
        module.socket,
        "getaddrinfo",
        lambda *_, **__: [(0, 0, 0, "", (text, 0)) for text in named],
    )
    monkeypatch.setattr(module, "address_towards", lambda _: no_route() if not route else route[0])
    found = {"eth0": [entry(families[":" in text], text) for text in interfaces]}
    monkeypatch.setattr(module.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(module.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)})
    assert module.own_address() == own
    config = with_open_hosts(run_config(Path("o"), {}))
    assert config.inference.host == config.orchestrator.host == ("::" if ":" in own else "0.0.0.0")


def test_two_machines_over_ipv6_listen_there(monkeypatch):
    monkeypatch.setenv(NODE_ADDRESS, "::1")
    assert with_open_hosts(run_config(Path("o"), {})).inference.host == "::"


@pytest.mark.parametrize(
    ("variables", "index"),
    [
        ({"SLURM_NODEID": "2"}, 2),
        ({"JOB_COMPLETION_INDEX": "1", "RL_INDEX_OFFSET": "2"}, 3),
        ({"SKYPILOT_NODE_RANK": "3", "SLURM_NODEID": "0"}, 3),
        ({"DSTACK_NODE_RANK": "0"}, 0),
        ({"LWS_WORKER_INDEX": "1"}, 1),
    ],
)
def test_engines_tell_it(variables, index):
    assert index_of(ClusterConfig(nodes=4), variables) == index


def test_the_flag_comes_first():
    assert index_of(ClusterConfig(nodes=4, index=1), {"SLURM_NODEID": "2"}) == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "give --cluster.index"),
        ({"SLURM_NODEID": "4"}, "cluster.nodes = 4: raise it"),
        ({"SLURM_NODEID": "x"}, "must be numbers"),
    ],
)
def test_a_wrong_one_is_refused(variables, words):
    with pytest.raises(ConfigError, match=words):
        index_of(ClusterConfig(nodes=4), variables)
