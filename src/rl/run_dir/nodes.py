"""`status/nodes/`: the machines of a run on a cluster. What each one is and does, which of them
train together, and that the run is over.

    3.json                   NodeStatus of machine 3, written by its `rl node`
    3.lock, 3.000001.lease   its role, see rl.run_dir.lease
    3.toml                   the configuration with which machine 3 has started
    world.json               TrainerWorld: the machines whose ranks train together
    over.json                RunOver, until `rl` starts the run again
    jobs.json                what was submitted to the engine

Every file is replaced by rename. Nobody compares clocks of two machines: a heartbeat only counts
when it changes.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rl.run_dir.files import TakenError, write_file
from rl.run_dir.lease import LEASE_S
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Staleness, read_json

START = "RL_START"
"""Environment variable that tells machines of one submission from those of another, where `rl`
may not see the end of an earlier one."""
T = TypeVar("T")
AgentState = Literal["idle", "running", "ended"]
Stop = Literal["", "save", "kill"]


class NodeStatus(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What one machine is and does."""

    index: int
    host: str
    address: str
    """Name or address at which other machines reach it."""
    port: int
    """A free port, for the rendezvous of the ranks if this machine has the first one."""
    roles: list[str]
    """`trainer`, `inference`, and `leader` for the one that runs console, supervisor and
    orchestrator."""
    ranks: int
    """Trainer ranks that it runs."""
    gpus: int
    software: str
    """Versions of rl and Python."""
    config: str
    """Digest of its configuration."""
    lease: int
    """Number of its lease."""
    pid: int
    place: str
    """Scope of the pid, see rl.system.linux.pid_scope."""
    started: float
    heartbeat: float
    generation: int = 0
    """The TrainerWorld that its trainer agent belongs to, 0 before the first."""
    agent: AgentState = "idle"
    exit_code: int | None = None
    """Of an agent that has ended."""
    log: str = ""
    """Log of that agent."""
    door: int = 0
    """The port at which others try whether they reach it, see rl.cluster.reach."""
    cut_off: list[int] = []
    """Machines that this one has reached before and does not reach now."""
    leaving: bool = False
    """Whether its engine takes the machine away: it got SIGTERM."""
    fault: str = ""
    """Why this machine cannot take part."""
    start: str = ""
    """See RunOver."""


class TrainerWorld(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The machines whose ranks train together, in the order of their ranks. A change of any kind
    is a new generation."""

    generation: int
    nodes: list[int]
    leases: list[int]
    """Number of the lease of each: a machine that replaces another one does not belong to the
    world of that one."""
    ranks: list[int]
    """Number of ranks of each."""
    address: str = ""
    port: int = 0
    """Rendezvous of the ranks, on the first machine."""
    stop: Stop = ""
    """`save`: every agent is to end within cluster.grace_s, after a checkpoint. `kill`: at once."""

    def has(self, index: int, lease: int) -> bool:
        """Returns whether it is this machine that belongs to it, and not its successor or its
        own next start."""
        return (index, lease) in zip(self.nodes, self.leases, strict=True)


class RunOver(msgspec.Struct, kw_only=True, frozen=True):
    """The end of a run on all its machines."""

    exit_code: int
    text: str
    time: float
    start: str = ""
    """Value of START on the machines that it concerns."""


class Jobs(msgspec.Struct, frozen=True):
    """What was submitted for a run."""

    engine: str
    jobs: list[str]

    def __str__(self) -> str:
        """The jobs, and the command that shows them."""
        look = (
            f"squeue --jobs={','.join(self.jobs)}"
            if self.engine == "slurm"
            else f"kubectl get {' '.join(self.jobs)}"
        )
        return f"{', '.join(self.jobs)} (`{look}`)"


class Nodes:
    """The files in `status/nodes/`."""

    def __init__(self, run_dir: RunDir):
        self.folder = run_dir.status_dir / "nodes"
        self.known: dict[Path, Any] = {}
        """What each file held when it was last read."""
        self.world_path, self.over_path = self.folder / "world.json", self.folder / "over.json"
        self.jobs_path = self.folder / "jobs.json"

    def status_path(self, index: int) -> Path:
        return self.folder / f"{index}.json"

    def config_path(self, index: int) -> Path:
        """The configuration with which a machine has started."""
        return self.folder / f"{index}.toml"

    def lock(self, index: int) -> Path:
        return self.folder / f"{index}.lock"

    def statuses(self, indices: Iterable[int] | None = None) -> dict[int, NodeStatus]:
        """Returns the newest status of each machine that has joined, by index: of all, or of
        those with these indices."""
        if indices is None:
            names = [path.stem for path in self.folder.glob("*.json")]
            indices = sorted(int(name) for name in names if name.isdigit())
        read = {index: self._read(self.status_path(index), NodeStatus) for index in indices}
        return {index: status for index, status in read.items() if status}

    def gpus_up(self, signs: Staleness) -> dict[int, int]:
        """Returns the number of GPUs of each machine that is seen to give signs of life, by index.
        `signs`: those seen before."""
        return {
            index: status.gpus
            for index, status in self.statuses().items()
            if signs.look(str(index), status.heartbeat) < LEASE_S and signs.moved(str(index))
        }

    def world(self) -> TrainerWorld | None:
        return self._read(self.world_path, TrainerWorld)

    def over(self) -> RunOver | None:
        return self._read(self.over_path, RunOver)

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """Returns the content of a file, as it was if it cannot be read for a moment: that must
        change nothing. None without it."""
        content = read_json(path, kind)
        if content is None and not is_gone(path):
            content = self.known.get(path)
        self.known[path] = content
        return content

    def end(self, over: RunOver) -> None:
        """Declares the run over, durably: machines that start later end at once. The first end
        of a submission counts. Raises OSError."""
        data, before = msgspec.json.encode(over), self.over()
        if before and before.start != over.start:
            write_file(self.over_path, data)
        else:
            with contextlib.suppress(TakenError):
                write_file(self.over_path, data, new=True)

    def jobs(self) -> Jobs | None:
        return read_json(self.jobs_path, Jobs)

    def stop_world(self, world: TrainerWorld, stop: Stop) -> None:
        """Tells the agents of a world to end."""
        self.write(self.world_path, msgspec.structs.replace(world, stop=stop))

    def write(self, path: Path, content: msgspec.Struct) -> None:
        """Replaces a file, without fsync: it is worthless after a power cut."""
        write_file(path, msgspec.json.encode(content), durable=False)


def is_gone(path: Path) -> bool:
    """Returns whether a file does not exist; False if its disk does not answer."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
