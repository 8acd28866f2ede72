"""With which exit codes a machine ends: they tell its engine whether to start it again."""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rl.cluster import node as module
from rl.cluster.node import START_AGAIN, Node, main, own_share
from rl.config.command_line import load_config_or_exit, write_config
from rl.launch.children import FORWARDED_S, Children
from rl.run_dir.files import write_file
from rl.run_dir.lease import lease_path
from rl.run_dir.nodes import Nodes, RunOver
from rl.run_dir.status import RoleStatus, write_status
from rl.system.errors import GIVE_UP, RESTART, ConfigError, RunError
from rl.system.machine import Machine
from tests.cluster.configs import run_config
from tests.launch.test_run import DRIVER, ENVIRONMENTS, FOREVER, SCRIPTS
from tests.waiting import until


def make_config(tmp_path, **cluster):
    usual = {"nodes": 2, "trainer_nodes": 1, "join_timeout_s": 0.2}
    return run_config(tmp_path, usual | cluster)


def test_one_that_waits_for_a_leader_in_vain_is_to_be_started_again(
    tmp_path, children, capsys, monkeypatch
):
    """Regression: it said nothing before."""
    monkeypatch.setattr(module, "TELL_S", 0.1)
    write_config(tmp_path / "run.toml", make_config(tmp_path, join_timeout_s=3.0))
    assert (
        main(["@", str(tmp_path / "run.toml"), "--cluster.index", "1"], children)
        == START_AGAIN
        == 75
    )
    printed = capsys.readouterr()
    assert printed.out.count("nobody leads the run") == 1
    assert "nobody has led the run" in printed.err


@pytest.mark.parametrize("engine", ["none", "kubernetes", "slurm"])
@pytest.mark.parametrize(("ended", "code"), [(130, 0), (0, 0), (1, 3)])
def test_one_that_starts_after_the_end_of_the_run_ends_at_once(
    tmp_path, children, capfd, engine, ended, code
):
    """As a replacement does that comes right after `rl stop`: the end counts until `rl` starts
    the run again."""
    config = make_config(tmp_path)
    config.cluster.engine = engine
    nodes = Nodes(config.run_dir)
    nodes.end(RunOver(exit_code=ended, text="as it was", time=1.0))
    write_config(tmp_path / "run.toml", config)
    assert main(["@", str(tmp_path / "run.toml"), "--cluster.index", "0"], children) == code
    assert "as it was" in capfd.readouterr().out
    assert not [*config.run_dir.logs.glob("rl-*")]
    assert not nodes.statuses()


def test_the_end_of_an_earlier_submission_does_not_concern_the_pods_of_another(
    tmp_path, children, monkeypatch
):
    config = make_config(tmp_path)
    nodes = Nodes(config.run_dir)
    nodes.end(RunOver(exit_code=130, text="stopped", time=1.0, start="first"))
    monkeypatch.setenv("RL_START", "second")
    node = Node(config, 0, children)
    node.leader.command = [sys.executable, "-c", "import time; time.sleep(60)"]
    until(lambda: node.poll() or node.leader.child)
    nodes.end(RunOver(exit_code=130, text="stopped again", time=2.0, start="second"))
    assert node.poll().text == "stopped again"
    node.finish(0)


def test_one_that_cannot_take_part_is_named_and_ends_the_run_only_with_all_of_its_kind(
    tmp_path, children, monkeypatch
):
    monkeypatch.setattr(module, "shared_memory_fault", lambda: "/dev/shm does not exist")
    config = make_config(tmp_path, nodes=3, trainer_nodes=2)
    nodes = Nodes(config.run_dir)
    for index, code in ((0, RESTART), (2, GIVE_UP)):  # the second one is the only server
        with pytest.raises(RunError, match="/dev/shm does not exist") as raised:
            Node(config, index, children)
        assert raised.value.exit_code == code
        assert nodes.statuses()[index].fault == "/dev/shm does not exist"
        assert (nodes.over() is not None) == (code == GIVE_UP)
    assert "machine 2 (" in nodes.over().text
    nodes.over_path.unlink()
    monkeypatch.undo()
    node = Node(config, 0, children)  # its replacement
    node.publish()
    assert nodes.statuses()[0].fault == ""
    node.finish(0)


def test_its_heart_beats_on_when_the_clock_jumps(tmp_path, children, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    node = Node(make_config(tmp_path), 1, children)
    node.publish()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    until(lambda: node.publish() or node.nodes.statuses()[1].heartbeat == now - 3600)
    monkeypatch.undo()
    node.finish(0)


def test_a_disk_that_does_not_answer_for_a_moment_ends_nothing(
    tmp_path, children, monkeypatch, capfd
):
    node, polls = (
        Node(make_config(tmp_path), 1, children),
        iter([OSError(28, "No space left on device", "x"), None, "over"]),
    )

    def poll():
        found = next(polls)
        if isinstance(found, OSError):
            raise found
        return found and RunOver(exit_code=0, text="", time=1.0)

    node.poll = poll
    assert node.run() == 0 and "No space left" in capfd.readouterr().out


def test_one_whose_index_another_has_ends_but_not_the_run(tmp_path, children):
    node = Node(make_config(tmp_path), 1, children)
    node.publish()
    write_file(lease_path(node.lease.lock, node.lease.number + 1), b"{}", new=True)
    node.beat_at = 0.0
    with pytest.raises(RunError, match="machine 1 counts as lost") as raised:
        node.publish()
    assert raised.value.exit_code == RESTART
    node.finish(0)
    assert node.nodes.statuses()[1].lease == node.lease.number, "the file is its successor's by now"


def test_a_server_that_cannot_go_on_ends_the_run_unless_another_serves(tmp_path, children):
    config = make_config(tmp_path)
    write_config(config.run_dir.config, config)
    node = Node(config, 1, children)
    other = config.run_dir.status("inference-node2")
    wrong = dataclasses.replace(
        node.server_role(), command=[sys.executable, "-c", "import sys; sys.exit('no such device')"]
    )
    node.server_role = lambda: wrong
    write_status(other, RoleStatus(process="inference-node2", pid=1, address="http://b:1"))
    with pytest.raises(RunError, match=r"never came up[\s\S]*no such device") as raised:
        until(lambda: node.serve_or_end())
    assert node.nodes.over() is None and raised.value.exit_code == RESTART, (
        "3 would end the job of a Kubernetes cluster"
    )
    other.unlink()
    node.server.begin([wrong])
    with pytest.raises(RunError, match="no such device"):
        until(lambda: node.serve_or_end())
    assert node.nodes.over().exit_code == 3 and "no such device" in node.nodes.over().text
    node.finish(0)


def test_a_server_waits_until_the_directory_is_prepared_for_this_start(tmp_path, children):
    config = make_config(tmp_path)
    write_config(config.run_dir.config, config.model_copy(update={"seed": 5}))
    node = Node(config, 1, children)
    node.serve()
    assert node.server is None
    write_config(config.run_dir.config, config)
    node.serve()
    assert node.server is not None
    node.finish(0)


@pytest.mark.parametrize(
    ("cluster", "trainer", "inference"),
    [
        ({"nodes": 4}, [0, 1, 2, 3], [0, 1, 2, 3]),
        ({"nodes": 4, "trainer_nodes": 2}, [0], [1, 2, 3]),
    ],
)
def test_gpus_of_a_machine(cluster, trainer, inference):
    """Counts that only divide the machines leave each all of its GPUs."""
    gpus = {"trainer": {"gpus": 1}, "inference": {"gpus": 3}}
    config = run_config(Path("o"), cluster, **gpus)
    box = Machine(gpus=["0", "1", "2", "3"], cores=[0])
    assert own_share(config, ["trainer"], box).trainer.gpus == trainer
    assert own_share(config, ["inference"], box).inference.gpus == inference
    with pytest.raises(ConfigError, match="the installed vLLM is the one for CPUs"):
        own_share(
            config,
            ["inference"],
            Machine(gpus=["0", "1", "2", "3"], cores=[0], gpu_inference=False),
        )


def test_counts_that_divide_the_machines_stay_so_for_a_server(tmp_path, children, monkeypatch):
    """Regression: flags gave it its own GPUs in their place, by which one machine trains, and
    min_trainer_nodes was refused."""
    monkeypatch.setattr(module, "machine", lambda: Machine(gpus=["0", "1"], cores=[0]))
    cluster = {"nodes": 4, "min_trainer_nodes": 2, "index": 2}
    config = run_config(tmp_path, cluster, trainer={"gpus": 2}, inference={"gpus": 2})
    write_config(config.run_dir.config, config)
    node = Node(config, 2, children)
    words = node.server_role().command
    started, _ = load_config_or_exit(words[words.index("@") :], "inference")
    assert started.trainer.gpus == started.inference.gpus == 2
    assert started.inference.vllm == {"data_parallel_size": 2}
    node.finish(0)


SAVES = """
def save(*_):
    time.sleep(2.0)  # longer than anything else may take for its end
    (root / "saved").write_text(os.environ["RL_GRACE_S"])
    os._exit(143)
signal.signal(signal.SIGTERM, save)
(root / "trains").touch()
time.sleep(60)
"""


@pytest.mark.usefixtures("classic_home")
def test_a_single_machine_that_is_taken_away_has_all_of_its_grace(tmp_path, children, monkeypatch):
    """Regression: its trainer was killed 20 s after SIGTERM. As in a step of Slurm, leader and
    `rl node` are told, one a bit later."""
    monkeypatch.setattr(Children.stop, "__defaults__", (0.5,))
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    single = {"engine": "slurm", "nodes": 1, "grace_s": 8}
    environments = {"environment": [{"id": "say-digit"}]}
    config = run_config(tmp_path, single, orchestrator=environments)
    node = Node(config, 0, children)
    scripts = SCRIPTS | {"orchestrator": FOREVER, "trainer": SAVES}
    shorter = "from rl.launch.children import Children\nChildren.stop.__defaults__ = (0.5,)\n"
    assert node.leader
    node.leader.command[1:4] = ["-c", shorter + DRIVER.replace("{scripts!r}", repr(scripts))]
    until(lambda: node.poll() or (config.run_dir.root / "trains").exists(), 60)
    assert node.leader.child
    os.kill(node.leader.child.pid, signal.SIGTERM)
    time.sleep(2 * FORWARDED_S)
    node.leave()
    assert node.finish(START_AGAIN) == START_AGAIN
    assert (config.run_dir.root / "saved").read_text() == "8"
