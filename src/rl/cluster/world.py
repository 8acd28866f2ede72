"""The trainer of a run on a cluster, as one process of its leader: forms a world of the machines
that train, and ends as it ends.

    waits for the machines -> writes the TrainerWorld -> each machine starts its agent
        -> all end well (0), one fails (its exit code), one is lost or killed (KILLED)
        -> a machine leaves or returns: stops the agents after a checkpoint, forms the next world

So what a death means, when to start again and when to give up is decided by the supervisor, as on
one machine.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from rl.cluster.reach import CUT_S
from rl.config.command_line import load_config_or_exit
from rl.config.help import PROCESS_USAGE
from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.launch.role_state import rank_code
from rl.run_dir.lease import LEASE_S, declare_lost, lease_path
from rl.run_dir.logs import killed_rank, last_lines
from rl.run_dir.nodes import Nodes, NodeStatus, Stop, TrainerWorld
from rl.run_dir.status import HEARTBEAT_S, Phase, Staleness, Status, archive_status, is_over
from rl.system.children import Stopped
from rl.system.errors import DAMAGED, KILLED, RESTART, RunError, system_error
from rl.system.linux import die_with_parent, pid_scope
from rl.system.prefork import leave
from rl.trainer.departure import LEFT

PROCESS = "trainer-launcher"
POLL_S = 0.5
SETTLE_S = 10.0
"""A machine that returns to a running world is taken in when it has been there for this long."""
SHORT_WAIT_S = 30.0
"""How long to wait for all machines when enough for cluster.min_trainer_nodes are there."""
LATE_S = 2 * HEARTBEAT_S
"""A rank that fails while a machine has given no sign of life for this long has probably failed
because that one is lost."""
END_S = 30.0
"""Seconds that an agent may take to end after it was told to, beyond cluster.grace_s."""
EQUAL = {
    "software": ("software", "install the same versions on both"),
    "config": ("configuration", "start both with the same file and flags"),
    "gpus": (
        "number of GPUs",
        "use machines of one kind, or set trainer.gpus to a number that each has",
    ),
    "ranks": ("number of ranks", "set trainer.ranks"),
}
"""Fields of NodeStatus in which machines that train must be equal: name, and remedy."""
LINES = 200
"""Lines of a failed agent's log that are repeated in the trainer's."""


class Launcher:
    """Runs one world after the other until the training has ended."""

    def __init__(self, config: RLConfig):
        assert config.cluster is not None
        self.config, self.cluster, self.nodes = config, config.cluster, Nodes(config.run_dir)
        self.trainers = plan(config).trainers
        self.least = self.cluster.min_trainer_nodes or self.trainers
        self.heartbeats = Staleness()
        self.here: dict[int, tuple[float, str]] = {}
        """The living machines outside the world: since when each could have been taken in
        (time.monotonic), and why it cannot."""
        self.cut_off: list[int] = []
        """Machines that this one does not reach, whether or not they live."""
        self.status = Status(config.run_dir.status(PROCESS), PROCESS)
        self.world = self.nodes.world() or TrainerWorld(generation=0, nodes=[], leases=[], ranks=[])
        """The newest world; at first that of a predecessor, which may not have ended."""

    def run(self) -> int:
        """Returns the exit code of the training. Raises RunError, and Stopped after the agents
        have been told to save and have ended."""
        try:
            return self.train()
        except Stopped:
            newest = self.nodes.world()
            # what was told to end at once does not save
            self.end(self.world, newest.stop or "save" if newest else "save")
            raise

    def train(self) -> int:
        """Does what `run` does, except for the end of the agents when it raises Stopped."""
        began, stop = time.monotonic(), "kill"
        while True:
            self.end(self.world, stop)
            self.world, stop = self.form(began), "save"
            self.config.run_dir.exit_code("trainer").unlink(missing_ok=True)  # of the world before
            self.write(self.world)
            machines = ", ".join(map(str, self.world.nodes))
            say(
                f"generation {self.world.generation}: machines {machines} with "
                f"{self.world.ranks[0]} ranks each"
            )
            code = self.watch(self.world)
            if code is not None:
                return self.finish(code)
            began = time.monotonic()

    def finish(self, code: int) -> int:
        """Ends the agents of a world that has failed or is done, and returns its exit code. Raises
        RunError.

        Waits until all have ended if a rank has found damage, because the leader repairs it next.
        Otherwise the next launcher waits.
        """
        if DAMAGED not in (code, rank_code(self.config.run_dir)):
            self.tell(self.world, "kill")
            return code
        try:
            self.end(self.world, "kill")
        except RunError:
            # the next attempt finds it again
            self.config.run_dir.exit_code("trainer").unlink(missing_ok=True)
            raise
        return DAMAGED

    # Machines -------------------------------------------------------------------------------------

    def joined(self) -> dict[int, NodeStatus]:
        """Reads the statuses of the machines that train. Call it once a look: it is a file of
        the shared disk for each machine."""
        return self.nodes.statuses(range(self.trainers))

    def living(self, statuses: dict[int, NodeStatus]) -> dict[int, NodeStatus]:
        """Returns those of the machines that train whose heartbeat changes, and that this
        machine reaches."""
        here = [status for status in statuses.values() if status.place == pid_scope()]
        self.cut_off = [index for status in here for index in status.cut_off]
        return {
            index: status
            for index, status in statuses.items()
            if self.silent_s(index, status) < LEASE_S
            and self.heartbeats.moved(str(index))
            and index not in self.cut_off
        }

    def is_lost(self, status: NodeStatus) -> bool:
        """Returns whether a machine was declared lost: if it lives on, it is about to end
        itself, and can write nothing."""
        return is_over(lease_path(self.nodes.lock(status.index), status.lease))

    def silent_s(self, index: int, status: NodeStatus) -> float:
        """Returns the seconds for which this process has seen no new heartbeat of a machine."""
        return self.heartbeats.look(str(index), (status.started, status.heartbeat))

    def form(self, began: float) -> TrainerWorld:
        """Waits for: the machines that train, up to cluster.join_timeout_s after `began`.
        Returns the next world. Raises RunError."""
        while True:
            statuses = self.joined()
            here = {
                index: status
                for index, status in self.living(statuses).items()
                if not status.leaving and not self.is_lost(status)
            }
            waited_s = time.monotonic() - began
            if len(here) == self.trainers or (len(here) >= self.least and waited_s >= SHORT_WAIT_S):
                break
            missing = [
                named(index, statuses.get(index))
                for index in range(self.trainers)
                if index not in here
            ]
            if waited_s >= self.cluster.join_timeout_s:
                raise RunError(
                    f"machines {', '.join(missing)} did not come within cluster.join_timeout_s = "
                    f"{waited_s:.0f} s: do they run `rl node`, and see the same run directory? "
                    "Start them, then resume"
                )
            self.status.enter(Phase.WAITING_FOR_RANKS, detail=f"machines {', '.join(missing)}")
            time.sleep(POLL_S)
        if fault := mismatch(here):
            raise RunError(fault)
        self.status.enter(Phase.WAITING_FOR_RANKS)
        members = [here[index] for index in sorted(here)]
        newest = max([self.world.generation, *(status.generation for status in members)])
        return TrainerWorld(
            generation=newest + 1,
            nodes=sorted(here),
            leases=[status.lease for status in members],
            ranks=[status.ranks for status in members],
            address=members[0].address,
            port=members[0].port,
        )

    # A world --------------------------------------------------------------------------------------

    def watch(self, world: TrainerWorld) -> int | None:
        """Returns the exit code with which the training ended; None if it is to go on with other
        machines."""
        while True:
            time.sleep(POLL_S)
            self.status.advance()
            statuses = self.joined()
            living = self.living(statuses)
            members = {index: statuses[index] for index in world.nodes if index in statuses}
            ended = {
                index: status
                for index, status in members.items()
                if status.generation == world.generation and status.agent == "ended"
            }
            running = dict(zip(world.nodes, world.leases, strict=True))
            for index in ended:
                del running[index]
            gone = {
                index: lease
                for index, lease in running.items()
                if index not in living or living[index].lease != lease
            }
            leaving = [index for index, status in members.items() if status.leaving]
            failed = [
                status
                for status in ended.values()
                if status.exit_code and not (leaving and status.exit_code == LEFT)
            ]
            if failed:
                late = [i for i in running if i in gone or self.silent_s(i, living[i]) >= LATE_S]
                return failure(failed, bool(late))
            if not running and not any(status.exit_code for status in ended.values()):
                return 0
            for index, lease in gone.items():
                self.lose(index, lease, members.get(index))
            if gone:
                return KILLED
            if leaving:
                say(f"machine {', '.join(map(str, leaving))} leaves")
                return None
            if returned := self.returned(world, living):
                say(f"machine {', '.join(map(str, returned))} joins")
                return None

    def lose(self, index: int, lease: int, status: NodeStatus | None) -> None:
        """Says that a machine is lost. All roles that were held there are free from now on; if
        it lives on, it ends itself."""
        why = f"it has given no sign of life for {LEASE_S:.0f} s"
        if status is None or status.lease != lease:
            why = "its `rl node` has ended"
        elif index in self.cut_off:
            why = f"the network has not reached it for {CUT_S:.0f} s"
        say(f"lost machine {index}{f' ({status.host})' if status else ''}: {why}")
        declare_lost(lease_path(self.nodes.lock(index), lease))

    def returned(self, world: TrainerWorld, living: dict[int, NodeStatus]) -> list[int]:
        """Returns machines that are not in the world, would fit into it, and have been there for
        SETTLE_S."""
        now, before, self.here = time.monotonic(), self.here, {}
        for index, status in living.items():
            if index in world.nodes or status.leaving or self.is_lost(status):
                continue
            since, told = before.get(index, (now, ""))
            fault = mismatch({i: living[i] for i in {*world.nodes, index} if i in living})
            self.here[index] = now if fault else since, fault
            if fault not in ("", told):
                say(f"machine {index} is not taken in: {fault}")
        return [index for index, (since, _) in self.here.items() if now - since >= SETTLE_S]

    def end(self, world: TrainerWorld, stop: Stop) -> None:
        """Has the agents of a world end, and waits for them. Machines that are lost do not count:
        when they return, they see a newer world.

        Raises RunError.
        """
        if not world.nodes:
            return
        self.tell(world, stop)
        deadline = time.monotonic() + world_end_s(self.config, stop)
        while running := self.still_running(world):
            if time.monotonic() >= deadline:
                raise RunError(
                    f"the trainer's agents on machines {', '.join(map(str, running))} do not "
                    "end: end `rl node` there",
                    RESTART,
                )
            time.sleep(POLL_S)
        folder = self.config.run_dir.status_dir
        for path in [folder / "trainer.json", *folder.glob("trainer-[0-9]*.json")]:
            # of ranks that were killed: the next world may have fewer
            archive_status(path, self.config.run_dir.spans)

    def tell(self, world: TrainerWorld, stop: Stop) -> None:
        """Tells the agents of a world to end."""
        self.write(msgspec.structs.replace(world, stop=stop))

    def write(self, world: TrainerWorld) -> None:
        """Publishes a world. Raises RunError if there is a newer one: another machine leads by
        now, because this one was stopped."""
        newest = self.nodes.world()
        if (
            newest
            and newest.generation >= world.generation
            and msgspec.structs.replace(newest, stop=world.stop) != world
        ):
            raise RunError(
                f"another machine has formed world {newest.generation}; this one, of world "
                f"{world.generation}, ends"
            )
        self.nodes.write(self.nodes.world_path, world)

    def still_running(self, world: TrainerWorld) -> list[int]:
        """Returns the machines whose agents run, or may still start because the machine has not
        seen that the world is over."""
        running = []
        for index, status in self.joined().items():
            silent_s = self.silent_s(index, status)
            if index not in world.nodes or status.agent != "running" or self.is_lost(status):
                continue
            if silent_s >= LEASE_S:
                self.lose(index, status.lease, status)
            else:
                running.append(index)
        return running


def world_end_s(config: RLConfig, stop: Stop) -> float:
    """Returns the longest time after which all agents have ended that were told to, or are lost."""
    grace_s = config.cluster.grace_s if config.cluster and stop == "save" else 0.0
    return LEASE_S + END_S + grace_s


def named(index: int, status: NodeStatus | None) -> str:
    """Returns a machine's index, and what is known to be wrong there."""
    return f"{index} ({status.host}: {status.fault})" if status and status.fault else str(index)


def mismatch(machines: dict[int, NodeStatus]) -> str:
    """Returns how machines differ that must be equal; empty if they are."""
    first = machines[min(machines)]
    for index, status in machines.items():
        for field, (name, remedy) in EQUAL.items():
            pair = getattr(first, field), getattr(status, field)
            if pair[0] != pair[1]:
                return (
                    f"machines {first.index} ({first.host}) and {index} ({status.host}) differ "
                    f"in their {name}, {pair[0]} and {pair[1]}: {remedy}"
                )
    return ""


def failure(failed: list[NodeStatus], is_late: bool) -> int:
    """Returns the exit code of a world whose agents have failed, and repeats the end of the log of
    one. `is_late`: whether another machine gives no sign of life."""
    # the ranks of the others fail because of that
    status = min(failed, key=lambda status: not was_killed(status))
    # so that the trainer's own log says why it died
    for line in last_lines(Path(status.log), LINES):
        print(line)
    say(
        f"the trainer on machine {status.index} ({status.host}) ended with exit code "
        f"{status.exit_code}; the whole log: {status.log}"
    )
    code = status.exit_code or RESTART
    if was_killed(status) or (code == RESTART and is_late):
        return KILLED
    return code if code > 0 else RESTART


def was_killed(status: NodeStatus) -> bool:
    return status.exit_code == -signal.SIGKILL or "SIGKILL" in killed_rank(Path(status.log))


def say(text: str) -> None:
    print(f"world: {text}", flush=True)


def main() -> None:
    """Entry point: `python -m rl.cluster.world @ outputs/x/config.toml`."""
    leave(lambda: None)
    die_with_parent()
    config, _ = load_config_or_exit(sys.argv[1:], "trainer", usage=PROCESS_USAGE)

    def stop(signum: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped(signum)

    signal.signal(signal.SIGTERM, stop)
    launcher = Launcher(config)
    try:
        code = launcher.run()
    except Stopped as stopped:
        code = 128 + stopped.signum
    except (RunError, OSError) as error:
        is_system = isinstance(error, OSError)
        text = system_error(error) if is_system else error
        print(f"trainer: {text}", file=sys.stderr, flush=True)
        code = RESTART if is_system else error.exit_code
    launcher.status.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
