"""The launcher of worlds, with machines that are threads which only write their status."""

import signal
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from rl.cluster import world as module
from rl.cluster.world import Launcher, failure
from rl.run_dir.lease import lease_path
from rl.run_dir.nodes import Nodes
from rl.run_dir.status import RoleStatus, Staleness, write_status
from rl.system.children import Stopped
from rl.system.errors import DAMAGED, GIVE_UP, KILLED, RESTART, RunError
from rl.system.linux import pid_scope
from tests.cluster.configs import run_config, status_of, world_of
from tests.run_dir.test_logs import REPORT
from tests.waiting import until


class Machine:
    """A machine that beats, and whose agent does as the world says until `status` is changed by
    the test."""

    all: ClassVar[list["Machine"]] = []

    def __init__(self, nodes, index):
        self.nodes, self.dead, self.changing, self.beats = nodes, False, threading.Lock(), 0
        self.all.append(self)
        self.status = status_of(index)
        lease_path(nodes.lock(index), 1).write_bytes(b"held")
        self.exit_code: int | None = None
        """Code with which the running agent is to end by itself."""
        self.slow = 0
        """Beats that the agent takes for its end when it is told to."""
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def set(self, **fields):
        with self.changing:
            self.status = msgspec.structs.replace(self.status, **fields)

    def _beat(self):
        while not self.dead:
            world = self.nodes.world()
            if world and self.status.index in world.nodes:
                if not world.stop and world.generation > self.status.generation:
                    self.set(generation=world.generation, agent="running", exit_code=None)
                elif world.stop and self.slow:
                    self.slow -= 1
                elif self.status.agent == "running" and (world.stop or self.exit_code is not None):
                    self.set(
                        agent="ended", exit_code=143 if self.exit_code is None else self.exit_code
                    )
                    self.exit_code = None
            self.set(heartbeat=time.monotonic())
            self.nodes.write(self.nodes.status_path(self.status.index), self.status)
            self.beats += 1
            time.sleep(0.01)

    def die(self):
        self.dead = True
        self.thread.join()

    def start_again(self):
        """Does as a machine that was declared lost, or whose `rl node` was killed."""
        lease = self.status.lease
        lease_path(self.nodes.lock(self.status.index), lease).write_bytes(b"")
        lease_path(self.nodes.lock(self.status.index), lease + 1).write_bytes(b"held")
        self.set(lease=lease + 1, agent="idle", generation=0, started=time.time())


class Clock:
    """Goes on by what a launcher sleeps if all machines that live have beaten meanwhile: none
    seems lost because its thread was not let."""

    def __init__(self):
        self.now, self.seen = 0.0, dict[Machine, int]()
        Machine.all = []

    def sleep(self, seconds):
        time.sleep(seconds)
        beats = {machine: machine.beats for machine in Machine.all if not machine.dead}
        if all(count > self.seen.get(machine, 0) for machine, count in beats.items()):
            self.now, self.seen = self.now + seconds, beats


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name, seconds in {
        "POLL_S": 0.01,
        "LEASE_S": 0.5,
        "LATE_S": 0.2,
        "SHORT_WAIT_S": 0.3,
        "SETTLE_S": 0.2,
    }.items():
        monkeypatch.setattr(module, name, seconds)
    clock = Clock()
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    )
    monkeypatch.setattr(Staleness.__init__, "__defaults__", (lambda: clock.now,))
    cluster = {"nodes": 4, "trainer_nodes": 3, "min_trainer_nodes": 2, "join_timeout_s": 2.0}
    return run_config(tmp_path, cluster)


@contextmanager
def cluster_of(config, count):
    nodes = Nodes(config.run_dir)
    nodes.folder.mkdir(parents=True)
    machines = [Machine(nodes, index) for index in range(count)]
    yield machines
    for machine in machines:
        machine.die()


class Running:
    """A launcher in a thread."""

    def __init__(self, config):
        self.nodes, self.code, self.error = Nodes(config.run_dir), -1, None
        self.launcher = Launcher(config)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.code = self.launcher.run()
        except RunError as error:
            self.error = error
        self.left = [
            index for index, status in self.nodes.statuses().items() if status.agent == "running"
        ]
        self.launcher.status.close()

    def world(self, generation):
        """Waits for a world with all its agents running."""

        def ready():
            world, statuses = self.nodes.world(), self.nodes.statuses()
            there = world and world.generation == generation and not world.stop
            return (
                world
                if there and all(statuses[index].generation == generation for index in world.nodes)
                else None
            )

        return until(ready)

    def result(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.code


@contextmanager
def training(config, count=3):
    """Machines in their first world."""
    with cluster_of(config, count) as machines:
        running = Running(config)
        running.world(1)
        yield machines, running


def test_all_machines_train_and_end_well(config):
    with cluster_of(config, 3) as machines:
        running = Running(config)
        first = world_of(1, [0, 1, 2], address="10.0.0.0", port=1000)
        assert running.world(1) == first
        for machine in machines:
            machine.exit_code = 0
        assert running.result() == 0


def test_a_lost_machine_is_a_death_and_the_next_world_goes_on_without_it(config):
    with training(config) as (machines, running):
        machines[2].die()
        assert running.result() == KILLED
        running = Running(config)
        assert running.world(2).nodes == [0, 1]
        machines[2] = Machine(running.nodes, 2)
        assert running.world(3).nodes == [0, 1, 2]  # it returns, and is taken in


def test_a_machine_that_the_leaders_does_not_reach_is_lost_although_it_lives(config):
    with training(config) as (machines, running):
        machines[1].set(place=pid_scope(), cut_off=[2])
        assert running.result() == KILLED
        running = Running(config)
        assert running.world(2).nodes == [0, 1]
        machines[1].set(cut_off=[])
        machines[2].start_again()
        assert running.world(3).nodes == [0, 1, 2]


def test_one_that_starts_again_is_lost_to_the_world_of_its_former_self(config):
    """Whether or not its ranks' end is noticed: those of the others may wait for them, for a
    quarter of an hour at the start."""
    with training(config) as (machines, running):
        machines[2].start_again()
        assert running.result() == KILLED
        assert lease_path(running.nodes.lock(2), 2).read_bytes() == b"held", "that of its new self"
        running = Running(config)
        assert (running.world(2).nodes, running.world(2).leases) == ([0, 1, 2], [1, 1, 2])


def test_one_that_comes_and_goes_is_not_taken_in(config, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 0.5)
    with cluster_of(config, 3) as machines:
        machines[0].set(place=pid_scope(), cut_off=[2])
        running = Running(config)
        running.world(1)
        came = module.time.monotonic()
        while module.time.monotonic() < came + 2 * module.SETTLE_S:
            machines[0].set(cut_off=[])
            until(lambda: 2 in running.launcher.here)
            machines[0].set(cut_off=[2])
            until(lambda: 2 not in running.launcher.here)
        assert running.nodes.world().generation == 1


def test_a_launcher_that_was_stopped_does_not_end_its_successors_world(config):
    with training(config) as (machines, running):
        successors = world_of(2, [0, 1, 2])
        running.nodes.write(running.nodes.world_path, successors)
        until(lambda: all(machine.status.generation == 2 for machine in machines))
        machines[2].die()  # which the first one would take for a death in its world
        running.result()
        assert "another machine has formed world 2" in str(running.error)
        assert running.nodes.world() == successors


def test_a_machine_that_leaves_is_left_out_after_a_checkpoint(config):
    with training(config) as (machines, running):
        of_a_killed_rank = config.run_dir.status("trainer-5")
        write_status(of_a_killed_rank, RoleStatus(process="trainer-5", pid=1))
        machines[0].set(leaving=True)
        world = running.world(2)
        assert not of_a_killed_rank.exists(), (
            "nobody takes the launcher for dead because of its heartbeat"
        )
        assert (world.nodes, world.address) == ([1, 2], "10.0.0.1")


def test_agents_of_a_killed_launcher_end_before_the_next_world(config):
    with cluster_of(config, 3) as machines:
        nodes = Nodes(config.run_dir)
        nodes.write(nodes.world_path, world_of(7, [0, 1, 2]))
        until(lambda: all(machine.status.agent == "running" for machine in machines))
        running = Running(config)
        assert running.world(8).nodes == [0, 1, 2]


@pytest.mark.parametrize("told_by", ["agent", "rank"])
def test_damage_is_told_when_no_rank_runs_any_more(config, told_by):
    """Regression: the leader moved files away while ranks of other machines trained and wrote.
    torchrun's agent always ends with 1."""
    with training(config) as (machines, running):
        machines[0].slow = 20
        if told_by == "rank":
            config.run_dir.exit_code("trainer").write_text(str(DAMAGED))
        machines[1].exit_code = DAMAGED if told_by == "agent" else RESTART
        assert running.result() == DAMAGED and not running.left


def test_a_launcher_that_is_stopped_while_agents_end_waits_for_them(config, monkeypatch):
    with cluster_of(config, 3) as machines:
        nodes, launcher = Nodes(config.run_dir), Launcher(config)
        nodes.write(nodes.world_path, world_of(7, [0, 1, 2]))
        until(lambda: all(machine.status.agent == "running" for machine in machines))
        launcher.world, machines[0].slow, told, tell = nodes.world(), 20, [], launcher.tell

        def stopped(world, stop):
            told.append(stop)
            tell(world, stop)
            if len(told) == 1:
                raise Stopped(signal.SIGTERM)

        monkeypatch.setattr(launcher, "tell", stopped)
        with pytest.raises(Stopped):
            launcher.run()
        assert told == ["kill", "kill"]
        assert all(status.agent == "ended" for status in nodes.statuses().values())
        launcher.status.close()


def test_what_is_wrong_with_a_machine_that_is_missing_is_said(config):
    with cluster_of(config, 2) as machines:
        machines[1].die()
        faulty = msgspec.structs.replace(machines[1].status, fault="/dev/shm does not exist")
        Nodes(config.run_dir).write(Nodes(config.run_dir).status_path(1), faulty)
        running = Running(config)
        running.result()
        assert "machines 1 (host1: /dev/shm does not exist), 2 did not come" in str(running.error)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("software", "rl 2", "software"),
        ("config", "xyz", "configuration"),
        ("gpus", 0, "number of GPUs"),
        ("ranks", 1, "number of ranks"),
    ],
)
def test_machines_that_differ_are_refused(config, field, value, words):
    with cluster_of(config, 3) as machines:
        machines[1].set(**{field: value})
        running = Running(config)
        running.result()
        assert words in str(running.error)
        assert "host0" in str(running.error)
        assert "host1" in str(running.error)


def test_one_that_differs_is_not_taken_into_a_world_that_trains(config):
    with training(config, 2) as (machines, running):
        machines.append(late := Machine(running.nodes, 2))
        late.set(software="rl 2")
        time.sleep(1.0)
        assert running.nodes.world().generation == 1 and running.error is None
        late.set(software="rl 1")
        assert running.world(2).nodes == [0, 1, 2]


def test_a_machine_whose_ranks_the_engine_has_told_to_end_is_no_death(config):
    """Slurm sends SIGTERM to all processes of a step: ranks may have saved and ended before the
    launcher sees that their machine leaves."""
    with training(config) as (machines, running):
        machines[1].set(leaving=True, agent="ended", exit_code=143)
        assert running.world(2).nodes == [0, 2]


def test_ranks_that_were_killed_are_told_from_ranks_that_failed(config, tmp_path):
    """Regression: both were exit code 1, and two of them before the first step ended the run."""
    with training(config) as (machines, running):
        machines[1].exit_code = -signal.SIGKILL
        assert running.result() == KILLED
    replace, log = msgspec.structs.replace, tmp_path / "agent.log"
    log.write_text(REPORT)
    one, other = (
        replace(machine.status, agent="ended", exit_code=RESTART) for machine in machines[:2]
    )
    assert failure([one, other], is_late=False) == RESTART
    assert failure([one, replace(other, exit_code=-signal.SIGKILL)], is_late=False) == KILLED, (
        "one fails because of the other"
    )
    assert failure([one, replace(other, log=str(log))], is_late=False) == KILLED, (
        "torchrun's agent ends with 1 whatever its ranks do"
    )
    assert failure([replace(one, exit_code=GIVE_UP)], is_late=True) == GIVE_UP
    assert failure([replace(one, exit_code=-signal.SIGSEGV)], is_late=True) == RESTART


def test_a_rank_that_fails_because_a_machine_is_lost_is_no_failure_of_its_own(config, monkeypatch):
    monkeypatch.setattr(module, "LEASE_S", 60.0)
    with training(config) as (machines, running):
        machines[2].die()
        late = module.time.monotonic() + 2 * module.LATE_S
        until(lambda: module.time.monotonic() > late)
        machines[0].exit_code = RESTART
        assert running.result() == KILLED
