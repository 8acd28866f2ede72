"""A run on a real Ray cluster of four machines, which are processes here, with stand-ins for `rl
node` (stand_in.py)."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl.cluster.ray import faults, run
from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.run_dir.nodes import Nodes
from rl.system.errors import RunError
from tests.cluster.configs import (
    REAL,
    assert_each_step_once,
    processes_of,
    real_config,
    run_config,
    steps_of,
)
from tests.cluster.slurm_here import kill_below
from tests.waiting import alive, until

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ENVIRONMENT = REAL | {"RAY_USAGE_STATS_ENABLED": "0"}
SECRET = "hf_of-this-user"
USER = {"HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": "5", "RL_NODE_ADDRESS": "host"}
START_S = 200.0
"""Longest that four actors take to start on two cores with other work."""
PROMPT = {
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 0,
}


class RayCluster:
    """A head without room for actors, and machines with two GPUs that do not exist."""

    def __init__(self, machines):
        from ray.cluster_utils import Cluster

        self.before = {*psutil.Process().children(recursive=True)}
        self.cluster = Cluster(
            True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": PROMPT},
        )
        for _ in range(machines):
            self.add()
        self.cluster.wait_for_nodes()
        self.others: list[psutil.Process] = []

    def add(self):
        self.cluster.add_node(num_cpus=2, num_gpus=2)

    def kill_machine_of(self, pid):
        """Cuts the power of the machine on which a process runs."""
        above = {parent.pid for parent in psutil.Process(pid).parents()}
        (node,) = [
            node
            for node in self.cluster.worker_nodes
            if node.all_processes["raylet"][0].process.pid in above
        ]
        kill_below(node.all_processes["raylet"][0].process.pid)
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_head(self):
        """Ends the head, and remembers the processes of all machines: some of them outlive their
        cluster then."""
        self.others = [*{*psutil.Process().children(recursive=True)} - self.before]
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)

    def shutdown(self):
        self.cluster.shutdown()
        for process in self.others:
            # psutil knows a pid that is another process by now
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        found = RayCluster(4)
        yield found
        found.shutdown()


class Run:
    """A driver and its stand-ins."""

    def __init__(self, root, address, **settings):
        usual = {"engine": "ray", "nodes": 4, "grace_s": 5, "ray": {"address": address}}
        environments = {"environment": [{"id": "owner/name"}]}
        self.config = run_config(root, usual | settings, orchestrator=environments)
        self.root = self.config.run_dir.root
        self.root.mkdir(parents=True)
        write_config(self.config.run_dir.config, self.config)
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.ray_driver", str(self.config.run_dir.config)],
            cwd=Path(__file__).parents[2],
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
            | USER,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stand_ins(self, state=""):
        """Index and pid of those in a state: `.left`, `.ended` or `.over`; without one, of those
        that run."""
        paths = [path for path in (self.root / "stand-ins").glob("*") if path.suffix == state]
        found = [path.stem.split("-") for path in paths]
        return sorted((int(index), int(pid)) for index, pid in found)

    def indices(self, state=""):
        return [index for index, _ in self.stand_ins(state)]

    def all_run(self, timeout_s=START_S):
        """The pid of the one stand-in of each index, once all run."""
        until(lambda: self.indices() == [0, 1, 2, 3] or self.driver.poll() is not None, timeout_s)
        assert self.driver.poll() is None, self.driver.communicate()[1]
        return dict(self.stand_ins())

    def end(self, timeout_s=30.0):
        """Exit code and last words of the driver."""
        _, text = self.driver.communicate(timeout=timeout_s)
        return self.driver.returncode, text


@pytest.fixture
def start(tmp_path, cluster):
    runs: list[Run] = []

    def begin(**settings):
        runs.append(Run(tmp_path, cluster.cluster.address, **settings))
        return runs[-1]

    yield begin
    for each in runs:
        with contextlib.suppress(ProcessLookupError):
            each.driver.kill()
        each.driver.wait()
        until(lambda each=each: not any(alive(pid) for _, pid in each.stand_ins()))


def test_a_lost_machine_is_replaced_with_its_index(start, cluster):
    here = start()
    pids = here.all_run()
    variables = {
        (here.root / "stand-ins" / f"{index}-{pid}").read_text() for index, pid in pids.items()
    }
    assert variables == {f"0,1 None {SECRET} None"}, (
        "GPUs and address of its machine, all threads, and the user's variables"
    )
    cluster.kill_machine_of(pids[2])
    until(lambda: not alive(pids[2]), 5.0)
    assert here.driver.poll() is None
    (here.root / "stand-ins" / f"2-{pids[2]}").unlink(missing_ok=True)  # Ray may use SIGKILL
    cluster.add()
    replaced = here.all_run()
    assert {index for index in pids if pids[index] != replaced[index]} == {2}
    (here.root / "exit-1").write_text("75")  # as after SIGTERM by its engine
    again = until(
        lambda: (
            dict(here.stand_ins())
            if here.indices(".ended") == [1] and len(here.stand_ins()) == 4
            else None
        )
    )
    assert {index for index in pids if replaced[index] != again[index]} == {1}
    (here.root / "over").touch()
    assert here.end() == (0, "")
    assert here.indices(".over") == [0, 1, 2, 3]
    assert not any(map(alive, again.values()))
    assert [path.name for path in sorted(here.config.run_dir.logs.iterdir())] == [
        "node-0-1.log",
        "node-1-1.log",
        "node-1-2.log",
        "node-2-1.log",
        "node-2-2.log",
        "node-3-1.log",
    ]
    files = [
        path
        for path in Path(cluster.cluster.head_node.get_session_dir_path()).rglob("*")
        if path.is_file()
    ]
    assert len(files) > 10 and not [
        path for path in files if SECRET.encode() in path.read_bytes()
    ], "Ray has stored a secret"


def test_never_again_ends_all(start):
    here = start()
    pids = here.all_run()
    (here.root / "exit-3").write_text("2")
    code, text = here.end()
    assert code == 2
    assert "machine 3 ended with exit code 2" in text
    assert "stand-in 3 was told to end with 2" in text
    assert here.indices(".left") == [0, 1, 2] and not any(map(alive, pids.values()))


def test_too_many_starts(start):
    here = start(max_requeues=1)
    for _ in range(2):
        here.all_run()
        (here.root / "exit-0").write_text("1")
        until(lambda: not (here.root / "exit-0").exists())
    code, text = here.end()
    assert code == 1
    assert "started 2 times, as cluster.max_requeues allows" in text
    assert f"rl @ {here.root}/config.toml --resume" in text


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_driver(start, signum):
    here = start()
    pids = here.all_run()
    here.driver.send_signal(signum)
    code, text = here.end()
    assert code == (-signum if signum == signal.SIGKILL else 128 + signum), text
    until(lambda: not any(map(alive, pids.values())))
    assert signum == signal.SIGKILL or here.indices(".left") == [0, 1, 2, 3]


def test_machines_that_ray_does_not_have(start):
    code, text = start(nodes=7, join_timeout_s=2).end(60.0)
    assert code == 3
    assert "7 machines with CPU: 1" in text
    assert "it has 5, with 2, 2, 2, 2, 0 GPUs" in text


def test_no_ray(tmp_path, monkeypatch):
    config = RLConfig.model_validate(
        {"cluster": {"engine": "ray", "ray": {"address": "ray://x:1"}}}
    )
    assert [key for key, _, _ in faults(config)] == ["cluster.ray.address"]
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        RunError,
        match=r"needs Ray, which is not installed: install the extra \(`pip install "
        r"'rl-triad\[ray\]'`\)",
    ):
        run(config, config.run_dir, Children())


# The real `rl` ------------------------------------------------------------------------------------


class RealRun:
    """A run of the tiny model: two machines train, one serves."""

    def __init__(self, folder, model):
        config = real_config(folder, model, {"engine": "ray", "ray": {"gpus": 0}}, "run")
        self.file, self.run_dir, self.said = folder / "run.toml", config.run_dir, folder / "said"
        write_config(self.file, config)

    def start(self, *words):
        with self.said.open("ab") as file:
            command = [sys.executable, "-m", "rl.main", *words]
            return subprocess.Popen(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
            )

    def submit(self, cluster, *words):
        return self.start(
            "@", str(self.file), "--cluster.ray.address", cluster.cluster.address, *words
        )

    def wait_for_steps(self, process, more=5):
        wanted = steps_of(self.run_dir) + more
        until(lambda: steps_of(self.run_dir) >= wanted or process.poll() is not None, 400.0)
        assert process.poll() is None, self.said.read_text()[-3000:]


@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("classic_home")
def test_a_run_outlives_machines_and_the_head(tmp_path, model, monkeypatch):
    """A machine that trains loses its power and is replaced; the head's death ends the run; it
    continues on another cluster."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    run, first = RealRun(tmp_path, model), RayCluster(4)
    process = run.submit(first)
    run.wait_for_steps(process)
    status = Nodes(run.run_dir).statuses()[1]
    first.kill_machine_of(status.pid)
    first.add()
    until(
        lambda: (now := Nodes(run.run_dir).statuses().get(1)) and now.lease > status.lease, START_S
    )
    run.wait_for_steps(process)
    first.kill_head()
    assert process.wait(START_S) == 1
    assert "has not answered for 20 s, and the machines end" in run.said.read_text()
    until(lambda: not processes_of(run.run_dir), 60.0)
    first.shutdown()
    second, last = RayCluster(4), steps_of(run.run_dir) + 5
    assert run.submit(second, "--resume", "--max_steps", str(last)).wait(400) == 0, (
        run.said.read_text()[-3000:]
    )
    assert not processes_of(run.run_dir)
    second.shutdown()
    assert_each_step_once(run.run_dir, last)
    assert run.start("replay", str(run.run_dir.root)).wait(200) == 0
    assert "EQUAL" in run.said.read_text()
