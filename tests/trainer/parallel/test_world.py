"""What ranks that cannot work together say."""

import socket
import threading
import time

import psutil
import pytest
import torch.distributed as dist

from rl.system.linux import address_towards
from rl.trainer.parallel import world
from rl.trainer.parallel.world import Rendezvous, check_division, network, start_world
from tests.ports import free_ports
from tests.raised import run_error


@pytest.mark.parametrize(("settings", "divisors"), [((3, 1), "1, 2, 4"), ((1, 8), "1, 2, 4")])
def test_settings_that_do_not_divide_the_ranks(settings, divisors):
    check_division(4, 2, 4)
    with run_error(rf"does not divide 4 ranks; set one of {divisors}, or start"):
        check_division(4, *settings)


@pytest.fixture
def environment(monkeypatch):
    """That of rank 0 of 2, with a free port, and no interface chosen."""
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_a_rank_that_never_comes_is_named_soon_and_at_the_deadline(
    environment, monkeypatch, capsys
):
    """Regression: nothing was said for 15 minutes."""
    monkeypatch.setattr(world, "TELL_S", 1.0)
    since = time.monotonic()
    with run_error(
        r"rank 0 on .* waited 2 s for the other 1; ranks \[1\] did not appear. Is torchrun "
        r"running on every"
    ):
        start_world(use_gpus=False, timeout_s=600, start_timeout_s=2)
    assert time.monotonic() - since < 60
    assert "waited 1 s for the other 1; ranks [1] did not appear" in capsys.readouterr().out


def test_a_meeting_point_that_nobody_reaches(environment, monkeypatch, capsys):
    monkeypatch.setattr(world, "TELL_S", 1.0)
    monkeypatch.setenv("RANK", "1")
    with run_error(
        r"rank 1 on .* cannot reach the ranks' rendezvous 127.0.0.1:\d+ within 2 s "
        r".*--rdzv-endpoint"
    ):
        start_world(use_gpus=False, timeout_s=600, start_timeout_s=2)
    assert "cannot reach the ranks' rendezvous" in capsys.readouterr().out


def outer_address() -> tuple[str, str]:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has no address but loopback")


def test_the_interface_is_the_one_towards_the_others(monkeypatch):
    """Also on the node of the rendezvous, which sees itself over loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name, address = outer_address()
    assert address_towards(address) == address
    assert (
        network(0, [address, "192.0.2.77"]) == network(0, ["127.0.1.1", address]) == (name, address)
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with run_error(rf"GLOO_SOCKET_IFNAME = nosuch0: .* has .*{name}"):
        network(0, [address, address])


def test_a_closed_network_is_said_within_seconds(monkeypatch):
    """The next rank says an address at which nobody listens."""
    store = dist.HashStore()
    monkeypatch.setattr(world, "CONNECT_TIMEOUT_S", 1.0)
    deadline = time.monotonic() + 20

    def neighbour() -> None:
        (port,) = free_ports(1)
        other = Rendezvous(store, 1, 2, deadline)
        other.exchange("port", f'["127.0.0.1", {port}]')
        other.exchange("error", "")

    thread = threading.Thread(target=neighbour)
    thread.start()
    with run_error(
        r"rank 0 on .* cannot connect to rank 1 at 127.0.0.1:\d+ .*refused.*open all ports "
        r"between them"
    ):
        Rendezvous(store, 0, 2, deadline).check_neighbour("127.0.0.1")
    thread.join()
