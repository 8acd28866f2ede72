"""The index of a machine, and the address that it gives the others, from what its name, its routes
and its interfaces say."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.cluster import identity
from rl.cluster.identity import index_of
from rl.cluster.lead import with_open_hosts
from rl.config.cluster import ClusterConfig
from rl.run_dir.status import NODE_ADDRESS
from rl.system.errors import ConfigError
from tests.cluster.configs import run_config


def no_route():
    raise OSError


def entry(family: int, text: str) -> SimpleNamespace:
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
        identity.socket,
        "getaddrinfo",
        lambda *_, **__: [(0, 0, 0, "", (text, 0)) for text in named],
    )
    monkeypatch.setattr(
        identity, "address_towards", lambda _: no_route() if not route else route[0]
    )
    found = {"eth0": [entry(families[":" in text], text) for text in interfaces]}
    monkeypatch.setattr(identity.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(
        identity.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)}
    )
    assert identity.own_address() == own
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
