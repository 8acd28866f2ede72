"""The address that a machine gives the others, from what its name, its routes and its interfaces
say."""

import socket
from types import SimpleNamespace

import pytest

from rl.cluster import address
from rl.cluster.lead import with_open_hosts
from rl.config.run import RLConfig
from rl.run_dir.status import NODE_ADDRESS

CLUSTER = {
    "name": "x",
    "orchestrator": {"environment": [{"id": "first-half"}]},
    "cluster": {"nodes": 2},
}


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
        address.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (text, 0)) for text in named]
    )
    monkeypatch.setattr(address, "outgoing", lambda: route)
    found = {"eth0": [entry(families[":" in text], text) for text in interfaces]}
    monkeypatch.setattr(address.psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(
        address.psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True)}
    )
    assert address.own_address() == own
    config = with_open_hosts(RLConfig.model_validate(CLUSTER))
    assert config.inference.host == config.orchestrator.host == ("::" if ":" in own else "0.0.0.0")


def test_two_machines_over_ipv6_listen_there(monkeypatch):
    monkeypatch.setenv(NODE_ADDRESS, "::1")
    assert with_open_hosts(RLConfig.model_validate(CLUSTER)).inference.host == "::"
