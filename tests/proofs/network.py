"""A run on three machines (tests/machines.py) whose network is bad, and then the promise checked.

    uv run -m tests.proofs.network [SCENE ...] [--out DIR]    # as root

Machines 0 and 1 train, 0 leads, 2 serves; `rl node` on each is started again as an engine would.
Prints a line for each scene: what was done, what happened, and what is broken. Exit code 1 if
anything is.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl.config.command_line import write_config
from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.models.tiny import make_tiny_model
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import numbered
from rl.run_dir.spans import read_events
from rl.system.children import Child
from tests.machines import Machines, node_command
from tests.proofs import promises

LOOK_S = 0.5
UP_S, END_S = 300.0, 120.0
UNDISTURBED, SETTLE = 3, 4
"""Steps before a fault, and after it."""
CUT_S, FROZEN_S, HOUR_S = 30.0, 90.0, 3600
DELAY_S, LOSS = 0.1, 0.01
"""Of a frame, in each direction."""
CONFIG: dict[str, Any] = {
    "max_steps": 999999,
    "model": {"dtype": "float32", "max_model_len": 128},
    "trainer": {
        "micro_batch_tokens": 128,
        "gpus": 0,
        "optim": {"lr": 1e-7},
        "checkpoint": {"interval": 5},
    },
    "orchestrator": {
        "environment": [{"id": "first-half"}],
        "batch_size": 16,
        "sampling": {"max_tokens": 16},
    },
    "inference": {"gpus": 0},
    "cluster": {"nodes": 3, "trainer_nodes": 2, "min_trainer_nodes": 1},
}


class BrokenError(Exception):
    """The run does not do what it promises."""


class SlowMachines(Machines):
    """Machines whose frames a process carries, late, and not all of them."""

    def __init__(self, count: int, delay_s: float, loss: float):
        super().__init__(count)
        self.delay_s, self.loss = delay_s, loss
        self.switch: subprocess.Popen[str] | None = None

    def connect_all(self) -> None:
        for index in range(self.count):
            self.boot(index)

    def boot(self, index: int) -> None:
        self._boot(f"machine-{index}")
        if len(self.booted) < self.count:
            return
        pids = [str(self.first(other)) for other in range(self.count)]
        command = [
            sys.executable,
            "-m",
            "tests.proofs.slow_switch",
            str(self.delay_s),
            str(self.loss),
            *pids,
        ]
        self.switch = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if not self.switch.stdout or self.switch.stdout.readline() != "up\n":
            raise OSError("no interfaces: is there /dev/net/tun?")
        for other in range(self.count):
            self.bring_up(other)

    def close(self) -> None:
        if self.switch:
            self.switch.kill()
            self.switch.wait()
        super().close()


@dataclass
class Engine:
    """Starts `rl node` on each machine, and again when it ends early."""

    machines: Machines
    folder: Path
    config: RLConfig
    variables: dict[int, dict[str, str]] = field(default_factory=dict)
    """Further environment variables of a machine."""
    children: Children = field(default_factory=Children)
    indices: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 1, 2: 2})
    """Machine -> its index in the run: machine 3 may replace another one."""
    nodes: dict[int, Child] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Machines on which nothing is started again."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(machine, exit code) of each end of an `rl node`."""
    seen: set[int] = field(default_factory=set)
    """Groups that were ever finished."""
    sizes: set[int] = field(default_factory=set)
    """Numbers of machines that ever trained together."""
    began: float = field(default_factory=time.monotonic)

    @property
    def step(self) -> int:
        return max(numbered(self.config.run_dir.weights_dir), default=0)

    def environment(self, index: int) -> dict[str, str]:
        common = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(Path(__file__).parents[1] / "environments"),
        }
        return os.environ | common | self.variables.get(index, {})

    def look(self) -> None:
        """Starts what is due. Raises BrokenError when a machine says that it must not be started
        again."""
        time.sleep(LOOK_S)
        for index, role in self.indices.items():
            node = self.nodes.get(index)
            if node and node.exit_code is not None:
                self.ends.append((index, node.exit_code))
                self.say(f"machine {index}: rl node {node.ending()}")
                self.children.kill_tree(node)
                del self.nodes[index]
                if node.exit_code in (0, 2, 3) and index not in self.given_up:
                    raise BrokenError(f"machine {index}: rl node {node.ending()}; see {node.log}")
            if index not in self.nodes and index not in self.given_up:
                command = self.machines.inside(index, node_command(self.folder / "run.toml", role))
                self.nodes[index] = self.children.start(
                    f"node-{index}", command, self.environment(index), self.folder
                )
        if self.config.run_dir.pending.exists():
            self.seen |= promises.pending_groups(self.config.run_dir.pending)
        self.sizes |= {len(self.world())} - {0}

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()

    def until(self, what: str, reached: Callable[[], bool], limit_s: float = UP_S) -> float:
        """Returns the seconds until then."""
        began = time.monotonic()
        while not reached():
            self.look()
            if time.monotonic() - began > limit_s:
                raise BrokenError(f"waited {limit_s:.0f} s for {what}")
        return time.monotonic() - began

    def steps(self, count: int) -> float:
        """Lets the run make steps. Returns the seconds that they take."""
        goal = self.step + count
        return self.until(f"step {goal}", lambda: self.step >= goal)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  step {self.step:3}  {text}", flush=True)

    def world(self) -> list[int]:
        found = Nodes(self.config.run_dir).world()
        return found.nodes if found and not found.stop else []

    def end(self) -> None:
        """Ends the run as `rl stop` does, and checks that every machine that is there ends well
        and empty, also one that comes later."""
        stop = [sys.executable, "-m", "rl.main", "stop", str(self.config.run_dir.root)]
        done = subprocess.run(stop, capture_output=True, text=True, env=self.environment(0))
        if done.returncode:
            raise BrokenError(f"rl stop: {done.stderr.strip()}")
        deadline = time.monotonic() + END_S
        while (
            running := [index for index, node in self.nodes.items() if node.exit_code is None]
        ) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        codes = {index: node.exit_code for index, node in self.nodes.items()}
        if running or any(codes.values()):
            raise BrokenError(
                f"after the end of the run, rl node on each machine ended with {codes}"
            )
        late = self.machines.inside(
            index := min(codes), node_command(self.folder / "run.toml", self.indices[index])
        )
        came = self.children.start("late", late, self.environment(index), self.folder)
        if came.wait(END_S) != 0:
            raise BrokenError(
                f"machine {index}, started after the end: rl node {came.ending()}; see {came.log}"
            )
        for index in codes:
            if left := promises.told(self.machines.processes(index)):
                raise BrokenError(f"machine {index}: left is {left}")


def slow(engine: Engine) -> str:
    """One in a hundred frames is lost, the others are late."""
    return (
        f"{UNDISTURBED} steps in {engine.steps(UNDISTURBED):.0f} s; {len(engine.ends)} machines "
        "started again"
    )


def cut_for_a_while(index: int, engine: Engine) -> str:
    before = len(engine.ends)
    engine.machines.cut(index)
    engine.say(f"cut machine {index}")
    engine.wait(CUT_S)
    engine.machines.mend(index)
    engine.say("mended")
    seconds = engine.steps(SETTLE)
    engine.until("a world of both machines", lambda: engine.world() == [0, 1])
    return (
        f"{SETTLE} steps {seconds:.0f} s after it was mended; {len(engine.ends) - before} "
        "machines started again"
    )


def cut_for_ever(index: int, engine: Engine) -> str:
    engine.machines.cut(index)
    engine.given_up.add(index)
    engine.say(f"cut machine {index} for ever")
    seconds = engine.steps(SETTLE)
    return f"{SETTLE} steps after {seconds:.0f} s, with machines {engine.world()}"


def frozen(index: int, engine: Engine) -> str:
    engine.machines.send(index, signal.SIGSTOP)
    engine.say(f"froze machine {index}")
    began = engine.step
    engine.wait(FROZEN_S)
    meanwhile = engine.step - began
    engine.machines.send(index, signal.SIGCONT)
    os.kill(engine.nodes[index].pid, signal.SIGCONT)  # nsenter stops and goes on with its child
    engine.say("it goes on")
    seconds = engine.until("a world of both machines", lambda: engine.world() == [0, 1])
    engine.steps(SETTLE)
    return (
        f"{meanwhile} steps meanwhile; both machines train again {seconds:.0f} s after it went on"
    )


def replaced(engine: Engine) -> str:
    """A machine freezes, another one gets its index, and it goes on."""
    engine.given_up.add(1)
    engine.machines.send(1, signal.SIGSTOP)
    engine.say("froze machine 1; machine 3 gets its index")
    engine.indices[3] = 1

    def hosts() -> list[str]:
        statuses = Nodes(engine.config.run_dir).statuses()
        return [
            statuses[index].host for index in engine.world() if statuses[index].agent == "running"
        ]

    seconds = engine.until("a world with machine 3", lambda: hosts() == ["machine-0", "machine-3"])
    engine.steps(SETTLE)
    engine.machines.send(1, signal.SIGCONT)
    os.kill(engine.nodes[1].pid, signal.SIGCONT)
    engine.say("machine 1 goes on")
    ended = engine.until("its end", lambda: 1 not in engine.nodes)
    if left := promises.told(engine.machines.processes(1)):
        raise BrokenError(f"machine 1: left is {left}")
    engine.steps(SETTLE)
    if hosts() != ["machine-0", "machine-3"]:
        raise BrokenError(f"now {hosts()} train")
    code = engine.ends[-1][1]
    return (
        f"its replacement trained after {seconds:.0f} s; the old one ended {ended:.0f} s after "
        f"it went on, with exit code {code}"
    )


def clocks(engine: Engine) -> str:
    """Machine 1's clock is an hour ahead, machine 2's an hour behind."""
    beats = {
        index: status.heartbeat - time.time()
        for index, status in Nodes(engine.config.run_dir).statuses().items()
    }
    if not (beats[1] > HOUR_S - UP_S and beats[2] < UP_S - HOUR_S):
        raise BrokenError(f"the clocks are not off: heartbeats are {beats}")
    return (
        f"{SETTLE} steps in {engine.steps(SETTLE):.0f} s; {len(engine.ends)} machines started again"
    )


SCENES: dict[str, Callable[[Engine], str]] = {
    "slow": slow,
    "clocks": clocks,
    "cut-trainer": partial(cut_for_a_while, 1),
    "cut-server": partial(cut_for_a_while, 2),
    "cut-leader": partial(cut_for_a_while, 0),
    "gone-trainer": partial(cut_for_ever, 1),
    "gone-leader": partial(cut_for_ever, 0),
    "frozen-trainer": partial(frozen, 1),
    "frozen-leader": partial(frozen, 0),
    "frozen-replaced": replaced,
}


def variables(scene: str, folder: Path) -> dict[int, dict[str, str]]:
    """Returns each machine's variables: its clock, and, where a frozen process would hold them,
    no locks."""
    library = folder / "other_machine.so"
    source = Path(__file__).with_name("other_machine.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    preload = {"LD_PRELOAD": str(library)}
    if scene == "clocks":
        return {1: preload | {"RL_CLOCK_S": str(HOUR_S)}, 2: preload | {"RL_CLOCK_S": str(-HOUR_S)}}
    return (
        dict.fromkeys(range(4), preload | {"RL_NO_LOCKS": "1"})
        if scene.startswith("frozen")
        else {}
    )


def check(engine: Engine) -> list[str]:
    """The promise, when all has ended."""
    run_dir, config = engine.config.run_dir, engine.config
    broken, lost = promises.exactly_once(run_dir, engine.seen)
    broken += [f"{lost} rollouts lost"] if lost else []
    broken += [
        f"{event.process} gave up: {event.reason}"
        for event in read_events(run_dir.events)
        if event.event == "give_up"
    ]
    broken += (
        promises.every_step_trained(run_dir)
        + promises.numbers_once(run_dir)
        + promises.lag(run_dir, config)[0]
    )
    if len(engine.sizes) > 1:  # bits depend on the number of ranks
        return broken
    return broken + promises.replay_equal(run_dir, engine.environment(0), 600)[0]


def play(scene: str, folder: Path) -> tuple[str, list[str]]:
    """Returns what happened in a scene, and what is broken."""
    folder.mkdir()
    model = make_tiny_model(folder / "model")
    config = RLConfig.model_validate(
        CONFIG
        | {
            "name": "run",
            "output_dir": str(folder),
            "model": CONFIG["model"] | {"name": str(model)},
        }
    )
    write_config(folder / "run.toml", config)
    happened, broken = "", []
    with SlowMachines(3, DELAY_S, LOSS) if scene == "slow" else Machines(4) as machines:
        engine = Engine(machines, folder, config, variables(scene, folder))
        try:
            first = engine.steps(UNDISTURBED)
            engine.say(f"{UNDISTURBED} undisturbed steps after {first:.0f} s")
            happened = SCENES[scene](engine)
            engine.say(happened)
            engine.end()
        except BrokenError as error:
            broken.append(str(error))
            engine.say(f"BROKEN: {error}")
        finally:
            engine.children.stop()
    return happened, broken + check(engine)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenes", nargs="*", default=list(SCENES), help=", ".join(SCENES))
    parser.add_argument("--out", type=Path, help="folder for the runs and logs; default: a new one")
    options = parser.parse_args()
    folder = (options.out or Path(tempfile.mkdtemp(prefix="rl-network-"))).absolute()
    folder.mkdir(exist_ok=True)
    lines = ["| scene | what happened | broken |", "|---|---|---|"]
    for scene in options.scenes:
        shutil.rmtree(folder / scene, ignore_errors=True)
        happened, broken = play(scene, folder / scene)
        lines.append(f"| {scene} | {happened} | {'; '.join(broken) or 'nothing'} |")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    return 1 if any(not line.endswith("nothing |") for line in lines[2:]) else 0


if __name__ == "__main__":
    sys.exit(main())
