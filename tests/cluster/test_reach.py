"""Which machines reach each other, with listening sockets in place of machines."""

import socket
import time

import msgspec
import pytest

from rl.cluster import reach as module
from rl.cluster.reach import Reach
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import RunDir
from tests.cluster.configs import status_of
from tests.waiting import until


class Other:
    """A machine that beats, and whose door is closed by `cut`."""

    def __init__(self, nodes: Nodes, index: int, is_open: bool = True):
        self.nodes, self.door = nodes, socket.create_server(("127.0.0.1", 0))
        door = self.door.getsockname()[1]
        self.status = status_of(index, address="127.0.0.1", door=door)
        if not is_open:
            self.cut()

    def beat(self) -> None:
        self.status = msgspec.structs.replace(self.status, heartbeat=self.status.heartbeat + 1)
        self.nodes.write(self.nodes.status_path(self.status.index), self.status)

    def cut(self) -> None:
        self.door.close()


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Nodes:
    for name, seconds in {"KNOCK_S": 0.05, "READ_S": 0.15, "CUT_S": 0.3, "LEASE_S": 0.5}.items():
        monkeypatch.setattr(module, name, seconds)
    return Nodes(RunDir(tmp_path, tmp_path / "weights"))


def cut_off(reach: Reach, others: list[Other]) -> list[int]:
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
