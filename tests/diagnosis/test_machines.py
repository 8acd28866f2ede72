"""What `rl doctor` and `rl watch` say of the machines of a cluster, and of a run that waits for
them."""

import os
import time

import pytest

from rl.diagnosis.state import RunMachine, machine_changes
from rl.diagnosis.waits import diagnose
from rl.run_dir.nodes import Jobs, Nodes, RunOver
from rl.run_dir.status import Phase, Staleness
from rl.system.linux import pid_scope
from tests.cluster.configs import status_of, world_of
from tests.diagnosis.test_waits import FILLING, SERVING, Run, does, gone

__all__ = ["gone"]
PARTS = ((1, "trains"), (2, "serves"), (3, "serves"))
AWAY = "another-machine"
"""Scope of the pids of processes that this host does not see."""


class Cluster(Run):
    """A run on four machines, two of which train, that is written by hand."""

    def __init__(self, root):
        super().__init__(root, cluster={"engine": "slurm", "nodes": 4, "trainer_nodes": 2})
        self.nodes = Nodes(self.dir)

    def machine(self, index, *roles, silent=0.0, **more):
        about = {"gpus": 8, "ranks": 8 if "trainer" in roles else 0, "generation": 3}
        about |= {"started": self.now - 120.0, "heartbeat": self.now - silent}
        about |= {"roles": [*roles], "place": f"{AWAY}-{index}"} | more
        self.nodes.write(self.nodes.status_path(index), status_of(index, **about))

    def on(self, index, name, what, **more):
        """A process on a machine."""
        self.status(name, what, host=f"host{index}", **more)
        path = self.dir.status(name)
        path.write_text(
            path.read_text().replace(f'"place":"host{index}"', f'"place":"{AWAY}-{index}"')
        )

    def lines(self):
        return [line for _, line in self.diagnosis().machines]

    def diagnosis(self):
        return diagnose(self.dir, self.config, Staleness())  # which does not wait for other clocks


@pytest.fixture
def run(tmp_path, monkeypatch):
    run = Cluster(tmp_path)
    monkeypatch.setattr(time, "time", lambda: run.now)
    return run


def test_each_machine_has_a_line(run):
    run.machine(0, "trainer", "leader")
    run.machine(1, "trainer", silent=90.0)
    run.machine(2, "inference", silent=1.0, leaving=True)
    run.nodes.write(run.nodes.world_path, world_of(3, [0, 1], ranks=[8, 8]))
    run.on(0, "orchestrator", FILLING)
    for rank in range(8):
        run.on(0, f"trainer-{rank}" if rank else "trainer", does(Phase.WAITING_FOR_BATCH, 13))
    run.on(2, "inference-node2", SERVING, address="http://host2:1")
    lines = run.lines()
    assert (
        lines[0]
        == "machine 0: host0 trains and leads, 8 GPUs, 8 ranks in generation 3, for 2 min, "
        "orchestrator, ranks 0 to 7"
    )
    assert lines[1].startswith(
        "machine 1: host1 trains, 8 GPUs, 8 ranks in generation 3, lost: no sign of life for 90 s"
    )
    assert lines[2] == "machine 2: host2 serves, 8 GPUs, for 119 s, leaving, inference-node2"
    assert lines[3] == "machine 3: is not there; it serves"


def test_a_machine_that_is_this_one_is_seen_to_live_and_to_have_ended(run, gone):
    for index, pid in ((0, os.getpid()), (1, gone)):
        run.machine(index, "trainer", pid=pid, place=pid_scope())
    here, ended = run.lines()[:2]
    assert here.endswith("for 2 min") and ended.endswith("lost: its `rl node` is gone")


def test_who_waits_for_what_on_a_cluster(run):
    """As on one machine, whichever machine asks: the one that leads, its `rl` and all processes
    are elsewhere."""
    for index in range(2):
        run.machine(index, "trainer", *(["leader"] if index == 0 else []))
    run.on(0, "trainer", does(Phase.WAITING_FOR_BATCH, 1))
    run.on(0, "trainer-1", does(Phase.WAITING_FOR_BATCH, 1))
    run.on(0, "orchestrator", does(Phase.WAITING_FOR_INFERENCE))
    said = run.bottleneck()
    assert (
        said
        == "no machine that serves is there: 2 (has not joined), 3 (has not joined); start `rl "
        "node` there"
    )
    run.nodes.write(run.nodes.jobs_path, Jobs("slurm", ["12", "13"]))
    assert run.bottleneck().endswith("are its jobs queued? 12, 13 (`squeue --jobs=12,13`)")
    run.machine(2, "inference")
    run.machine(3, "inference", silent=90.0)
    run.on(2, "inference-node2", does(Phase.LOADING_MODEL))
    run.log("inference-node2-1", "loading")
    said = run.bottleneck()
    assert "inference is not ready yet: loading the model for 1 s" in said
    assert said.endswith("see " + str(run.dir.logs / "inference-node2-1.log"))
    for index, requests in ((2, 10), (3, 30)):
        run.on(index, f"inference-node{index}", SERVING, address="http://h:1", requests=requests)
    run.on(
        0,
        "orchestrator",
        FILLING,
        since=70,
        idle=5,
        batch=13,
        batch_done=40,
        batch_size=64,
        playing=50,
    )
    assert "40 of 50 rollouts in flight wait for tokens" in run.bottleneck(), (
        "of all servers together"
    )


def test_a_run_that_waits_in_the_queue_and_one_whose_machines_are_gone(run):
    run.nodes.write(run.nodes.jobs_path, Jobs("slurm", ["12", "13"]))
    found = run.diagnosis()
    assert (found.state, found.bottleneck) == (
        "stopped",
        "no machine has joined the run yet; its jobs are 12, 13 (`squeue --jobs=12,13`)",
    )
    run.machine(0, "trainer", "leader", silent=90.0)
    run.status("trainer", does(Phase.TRAINING, 3), heartbeat=90.0, pid=2**22 + 1)
    found = run.diagnosis()
    assert found.state == "died"
    assert (
        "its jobs, 12, 13 (`squeue --jobs=12,13`), continue it if they are still in the queue"
        in found.bottleneck
    )
    run.nodes.write(run.nodes.over_path, RunOver(exit_code=1, text="", time=run.now))
    assert "continue it with `rl @ " in run.bottleneck()
    assert run.lines()[1:] == [f"machine {i}: is not there; it {does}" for i, does in PARTS]
    run.nodes.status_path(0).unlink()
    assert run.lines() == [], "all have ended"


def test_what_becomes_of_machines_is_told_once(run):
    status = status_of(1, host="b", roles=["inference"])
    absent = RunMachine(1, ["inference"])
    here, lost = (
        RunMachine(1, ["inference"], status),
        RunMachine(1, ["inference"], status, silent_s=31.0),
    )
    told: dict[int, str] = {}
    said = [machine_changes(told, [one]) for one in (absent, here, here, lost, lost, here, absent)]
    assert said == [
        [],
        ["  machine 1 (b) serves"],
        [],
        ["  machine 1 (b) is lost: no sign of life for 31 s"],
        [],
        ["  machine 1 (b) serves"],
        ["  machine 1 has left"],
    ]
