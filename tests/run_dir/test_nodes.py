"""The files of a run's machines."""

import pytest

from rl.run_dir.nodes import Nodes, NodeStatus, RunOver
from rl.run_dir.paths import RunDir


@pytest.fixture
def nodes(tmp_path):
    return Nodes(RunDir(tmp_path, tmp_path / "weights"))


def test_the_first_end_of_a_submission_counts(nodes):
    first, second = (RunOver(exit_code=code, text="", time=1.0) for code in (130, 1))
    nodes.end(first)
    nodes.end(second)
    assert nodes.over() == first
    of_another = RunOver(exit_code=1, text="", time=2.0, start="another")
    nodes.end(of_another)
    assert nodes.over() == of_another


def test_a_status_that_cannot_be_read_for_a_moment_is_the_one_before_until_it_is_gone(
    nodes, monkeypatch
):
    about = {"host": "h", "address": "a", "roles": [], "software": "", "config": "", "place": ""}
    status = NodeStatus(
        index=3, port=1, ranks=1, gpus=0, pid=1, lease=1, started=1.0, heartbeat=1.0, **about
    )
    nodes.write(nodes.status_path(3), status)
    assert nodes.statuses() == nodes.statuses([3]) == {3: status}

    def stale(_path, **_how):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.stat", stale)
        assert nodes.statuses([3]) == {3: status}
    nodes.status_path(3).unlink()
    assert nodes.statuses([3]) == {}
