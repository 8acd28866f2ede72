"""The ranks of one machine, with a program in their place that notes how it was started."""

import json
import os
import sys
import time

import msgspec
import pytest

from rl.cluster import agent as module
from rl.cluster.agent import RankAgent
from rl.launch.devices import Share, Split
from rl.launch.roles import AGENT
from rl.run_dir.status import RoleStatus, write_status
from rl.system.children import PYTHON
from tests.cluster.configs import run_config, world_of
from tests.waiting import alive, until

PROGRAM = f"""#!{sys.executable}
import json, os, signal, sys, time
from rl.system import prefork
prefork.leave(lambda: print("imported", flush=True))
def leave(*_):
    while os.path.exists(os.environ["NOTE"] + ".saving"):
        time.sleep(0.02)
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RL_GRACE_S", "SHARE", "NODE")
with open(os.environ["NOTE"] + ".new", "w") as file:
    json.dump({{"pid": os.getpid(), "arguments": sys.argv[1:]}} | {{name: os.environ.get(name) for name in names}}, file)
os.rename(os.environ["NOTE"] + ".new", os.environ["NOTE"])
while not os.path.exists(os.environ["NOTE"] + ".end"):
    time.sleep(0.02)
sys.exit(int(open(os.environ["NOTE"] + ".end").read()))
"""


@pytest.fixture
def make(tmp_path, children, monkeypatch):
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setattr(module, "PYTHON", (str(program), *PYTHON[1:]))
    monkeypatch.setattr(module, "AGENT", [str(program), *AGENT[1:]])

    def make_agent(ranks):
        cluster = {"nodes": 3, "trainer_nodes": 2, "grace_s": 7}
        share = Share([], sorted(os.sched_getaffinity(0)), {"SHARE": "1"})
        note = tmp_path / "note"
        environment = {"NODE": "1", "NOTE": str(note)}
        return RankAgent(
            run_config(tmp_path, cluster),
            1,
            5,
            Split(share, share, ranks, {}),
            children,
            environment,
        ), note

    return make_agent


def world(generation, nodes=(0, 1), stop=""):
    each = {"leases": [5] * len(nodes), "ranks": [1] * len(nodes)}
    return world_of(generation, list(nodes), **each, address="10.0.0.1", port=77, stop=stop)


def read(note):
    until(note.exists)
    found = json.loads(note.read_text())
    note.unlink()
    return found


def test_one_rank_needs_no_agent_of_torchrun(make):
    agent, note = make(1)
    agent.poll(world(3))
    found = read(note)
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "77",
        "RL_GRACE_S": "7",
        "SHARE": "1",
        "NODE": "1",
    }
    assert found.items() >= expected.items()
    assert found["arguments"][:3] == [
        "-P",
        "-m",
        "rl.trainer.main",
    ]
    assert (agent.state, agent.generation) == ("running", 3)
    note.with_name("note.end").write_text("4")
    until(lambda: agent.poll(world(3)) or agent.state == "ended")
    assert (agent.exit_code, agent.generation) == (4, 3)
    assert agent.log.endswith("trainer-node1-1.log")
    agent.poll(world(3))
    assert agent.state == "ended", "a world is started once"


def test_ranks_start_from_a_copy_of_their_predecessor_but_not_twice_without_progress(make):
    agent, note = make(1)
    cold = []
    for generation, (nodes, progress) in enumerate(
        [((0, 1), 0), ((1, 0), 7), ((0, 1), 0), ((0, 1), 0), ((0, 1), 0)], 1
    ):
        agent.poll(world(generation, nodes))
        found = read(note)
        assert (found["RANK"], found["pid"]) == (str(nodes.index(1)), agent.child.pid)
        cold.append("imported" in agent.child.log.read_text())
        until(agent.children.waiting)
        name = "trainer-1" if nodes.index(1) else "trainer"
        write_status(
            agent.run_dir.status(name),
            RoleStatus(process=name, pid=found["pid"], progress=progress),
        )
        agent.kill()
    assert cold == [True, False, False, False, True]


def test_several_ranks_have_torchruns_agent(make):
    agent, note = make(4)
    agent.poll(world(1))
    words = " ".join(read(note)["arguments"])
    assert words.startswith("-P -m torch.distributed.run --no-python ")
    assert f"/python -P -m rl.trainer.main @ {agent.run_dir.config}" in words
    for part in (
        "--nnodes 2",
        "--node-rank 1",
        "--nproc-per-node 4",
        "--rdzv-backend static",
        "--master-addr 10.0.0.1",
        "--master-port 77",
    ):
        assert part in words
    agent.kill()


def test_a_newer_world_ends_the_ranks_and_starts_new_ones(make):
    agent, note = make(1)
    agent.poll(world(1))
    first = read(note)["pid"]
    agent.poll(world(2))
    assert not alive(first) and agent.state == "ended"
    agent.poll(world(2))
    assert read(note)["pid"] != first and (agent.state, agent.generation) == ("running", 2)
    agent.poll(world(3, nodes=(0, 2)))
    agent.poll(world(3, nodes=(0, 2)))
    assert agent.state == "ended", "this machine is not in it"


def test_ranks_that_are_told_to_save_have_their_time(make):
    agent, note = make(1)
    agent.poll(world(1))
    pid = read(note)["pid"]
    (saving := note.with_name("note.saving")).touch()
    agent.poll(world(1, stop="save"))
    time.sleep(0.2)
    agent.poll(world(1, stop="save"))
    assert alive(pid) and agent.state == "running"
    saving.unlink()
    until(lambda: agent.poll(world(1, stop="save")) or agent.state == "ended")
    assert agent.exit_code == 143


def test_a_world_that_is_over_is_not_started(make):
    agent, _ = make(1)
    agent.poll(world(1, stop="kill"))
    assert agent.state == "idle"


def test_a_machine_does_not_take_the_place_of_its_predecessor(make):
    agent, _ = make(1)
    agent.poll(msgspec.structs.replace(world(1), leases=[5, 4]))
    assert agent.state == "idle"
