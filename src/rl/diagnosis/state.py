"""Reads a run's state from its files: live processes and what they do, progress, and events.
Nothing is written.

Ages use this host's clock. If the heartbeat of a process on another host looks wrong by that clock,
it is watched for a few seconds.
"""

import contextlib
import re
import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.config.stored import continued_by, rl_dir_of
from rl.run_dir.files import files_in
from rl.run_dir.lease import LEASE_S, LockOwner
from rl.run_dir.logs import newest_log
from rl.run_dir.nodes import Nodes, NodeStatus
from rl.run_dir.paths import RunDir, first_step, numbered, numbers
from rl.run_dir.spans import Event, read_events
from rl.run_dir.status import (
    HEARTBEAT_S,
    RoleStatus,
    RunEnd,
    Staleness,
    describe,
    read_json,
    read_status,
)
from rl.system.linux import pid_scope
from rl.system.terminal import say, span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers

SILENT_S = 5 * HEARTBEAT_S
"""Age in seconds from which a heartbeat is reported as missing. (`rl` acts later:
supervisor.silence_s.)"""
POLL_S = 0.1
NODES = "nodes"
"""Folder of the statuses of machines among those of processes."""
RECENT = 10
"""Number of newest steps over which paces and shares are computed."""
VERBS = {"trainer": "trains", "inference": "serves", "leader": "leads"}
RANK = re.compile(r"trainer(?:-(\d+))?")


@dataclass(frozen=True)
class Process:
    """A status file, and the state of its process in the kernel."""

    name: str
    status: RoleStatus
    now: float
    """Current time by the clock of the process's host."""
    alive: bool | None
    """None if it runs on another machine, so that only its heartbeat shows whether it is alive."""
    stopped: dict[int, str] = field(default_factory=dict)
    """Processes of its tree stopped by SIGSTOP or a debugger: pid -> name."""
    blocked: bool = False
    """Whether it is in an uninterruptible system call: a disk or network file system does not
    respond."""

    @property
    def doing(self) -> str:
        """Its phase as a readable sentence."""
        return describe(self.status)

    @property
    def doing_for(self) -> str:
        """Its phase, and for how long it has been in it."""
        return f"{self.doing} for {span(self.phase_s)}"

    def seconds_since(self, time: float | None) -> float:
        """Returns the seconds from a time in its status until now; 0 for None."""
        return 0.0 if time is None else max(0.0, self.now - time)

    @property
    def phase_s(self) -> float:
        """Seconds in the current phase."""
        return self.seconds_since(self.status.since)

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat."""
        return self.seconds_since(self.status.heartbeat)

    @property
    def dry_s(self) -> float:
        """Seconds since its counter last grew, or since it started."""
        grown = self.status.progressed
        return self.seconds_since(self.status.started if grown is None else grown)

    @property
    def silent(self) -> bool:
        """Whether its heartbeat is missing."""
        return self.silent_s > SILENT_S

    @property
    def may_live(self) -> bool:
        """Whether it may still be running; always true for a process on another machine."""
        return self.alive is not False

    @property
    def is_ready(self) -> bool:
        """Whether it may still be running, and has published an address."""
        return self.may_live and bool(self.status.address)


@dataclass(frozen=True)
class RunMachine:
    """A machine of a run on a cluster."""

    index: int
    roles: list[str]
    """What it is for, `trainer` or `inference`; `leader` as well while it leads the run."""
    status: NodeStatus | None = None
    """None if it has not joined, or has ended."""
    silent_s: float = 0.0
    """Seconds since its last sign of life."""
    ended: bool = False
    """Whether its `rl node` is seen to be gone."""
    generation: int | None = None
    """Generation of the world in which its ranks train; None if they do not."""

    @property
    def state(self) -> Literal["live", "leaving", "lost", "absent"]:
        if self.status is None:
            return "absent"
        if self.ended or self.silent_s > LEASE_S:
            return "lost"
        return "leaving" if self.status.leaving else "live"

    @property
    def is_up(self) -> bool:
        return self.state in ("live", "leaving")

    @property
    def does(self) -> str:
        """What it does, or is for: `trains and leads`."""
        return " and ".join(VERBS[role] for role in self.roles)

    @property
    def facts(self) -> str:
        """Its devices, its part in the training, and why it cannot take part: `8 GPUs, 8 ranks in
        generation 3`; empty if it is not there."""
        if self.status is None:
            return ""
        ranks = ""
        if self.status.ranks:
            ranks = (
                "not in the current generation"
                if self.generation is None
                else f"{self.status.ranks} ranks in generation {self.generation}"
            )
        return ", ".join(filter(None, [f"{self.status.gpus} GPUs", ranks, self.status.fault]))

    @property
    def loss(self) -> str:
        """Why it counts as lost."""
        why = (
            "its `rl node` is gone" if self.ended else f"no sign of life for {span(self.silent_s)}"
        )
        return f"lost: {why}"

    def runs(self, process: RoleStatus) -> bool:
        return bool(self.status and process.place == self.status.place != "")


class RunState:
    """A run at the time `now`. Missing or half-written files count as absent."""

    def __init__(
        self,
        run_dir: RunDir,
        config: RLConfig,
        heartbeats: Staleness | None = None,
        metrics: "Numbers | None" = None,
    ):
        """Reads the state of a run. Raises PermissionError for unreadable files.

        `heartbeats` holds earlier observations; without it, `watch` waits where clocks may differ.
        `metrics` are the run's numbers if the caller follows them; without it, they are read.
        """
        from rl.run_dir.numbers import Numbers

        nodes = Nodes(run_dir)
        self.run_dir, self.config = run_dir, config
        self.rl_dir = rl_dir_of(run_dir, config)
        """The directory of its `rl`, with the status, logs and events of its processes."""
        if heartbeats is None:
            heartbeats = watch(self.rl_dir)
        self.now = time.time()
        self.processes = {
            name: inspect_process(name, status, clock_of(name, status, heartbeats, self.now))
            for name, status in read_statuses(self.rl_dir.status_dir).items()
        }
        self.launcher = read_launcher(self.rl_dir.lock("rl"), self.now)
        """The run's `rl`; None if there was none or it is on another machine."""
        self.machines = read_machines(run_dir, config, heartbeats, self.now)
        """All machines of a run on a cluster, by index."""
        self.jobs = nodes.jobs() if config.cluster and not nodes.over() else None
        """What was submitted to a cluster's engine, until the run is over."""
        self.numbers = metrics or Numbers.read(run_dir.metrics)
        self.events = read_events(self.rl_dir.events)
        self.end = read_json(run_dir.run_end, RunEnd)
        self.newest_batch = run_dir.newest_batch()
        self.newest_version = max(numbers(run_dir.weights_dir), default=0)
        self.newest_checkpoint = max(numbers(run_dir.checkpoints), default=0)
        evals = numbered(run_dir.evals).items()
        self.newest_eval = max((n for n, path in evals if any(path.glob("*.jsonl"))), default=None)
        self.quarantined = numbers(run_dir.batches, ".quarantined")

    @property
    def alive(self) -> bool:
        signs = (
            not process.silent and process.status.heartbeat is not None
            if process.alive is None
            else process.alive
            for process in self.processes.values()
        )
        return any(signs) or any(machine.is_up for machine in self.machines) or self.is_led

    @property
    def is_led(self) -> bool:
        """Whether an `rl` runs, here or on a machine of a cluster."""
        leads = any(machine.is_up and "leader" in machine.roles for machine in self.machines)
        return leads or bool(self.launcher and self.launcher.alive)

    @property
    def servers(self) -> list[Process]:
        """The run's inference servers: the one that `rl` started, then further ones, of these
        first those that are running."""
        servers = [p for name, p in self.processes.items() if name.split("-")[0] == "inference"]
        return sorted(servers, key=lambda server: (server.name != "inference", not server.is_ready))

    @property
    def own_servers(self) -> list[str]:
        """The inference servers that the run itself starts."""
        if not self.config.starts_inference:
            return []
        if not (division := plan(self.config)).is_one_machine:
            return division.server_names
        by_hand = self.servers and not self.is_led and "inference" not in self.processes
        return [] if by_hand else ["inference"]

    @property
    def roles(self) -> list[str]:
        """The processes of this run, without further inference servers."""
        others = [role for role in self.config.kind.roles if role != "inference"]
        return [*self.own_servers, *others]

    def processes_on(self, machine: RunMachine) -> list[str]:
        """Returns the processes on a machine that have a status, the ranks of a trainer as one:
        `orchestrator`, `ranks 8 to 15`."""
        names = [name for name, process in self.processes.items() if machine.runs(process.status)]
        ranks = sorted(int(match[1] or 0) for name in names if (match := RANK.fullmatch(name)))
        others = [name for name in names if not RANK.fullmatch(name)]
        return [*others, f"ranks {ranks[0]} to {ranks[-1]}"] if ranks else others

    def log(self, name: str) -> Path | None:
        """Returns the newest log of a process: of a rank on a machine of a cluster, that of the
        ranks there."""
        process = self.processes.get(name)
        if process and RANK.fullmatch(name):
            for machine in self.machines:
                if machine.status and machine.status.log and machine.runs(process.status):
                    return Path(machine.status.log)
        return newest_log(self.rl_dir.logs, name)

    def logs(self, name: str) -> tuple[Path, ...]:
        """Returns the newest log of a process, if it has one, as evidence."""
        log = self.log(name)
        return (log,) if log else ()

    def log_name(self, name: str) -> str:
        """Returns where to look for what a process logs."""
        return str(self.log(name) or self.rl_dir.logs)

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return continued_by(self.run_dir.root, self.config)

    @cached_property
    def step(self) -> int:
        """The newest step that the trainer reported; before the first one, the step that the run
        started from."""
        steps = self.numbers.steps("trainer")
        return int(steps[-1]) if len(steps) else first_step(self.run_dir)

    def values(self, source: str, metric: str) -> list[float]:
        """Returns a metric's values, oldest first."""
        return self.numbers.points(source, metric)[1]

    def recent(self, source: str, metric: str) -> list[float]:
        """Returns a metric's values in the newest steps, oldest first."""
        return self.numbers.points(source, metric, RECENT)[1]

    def steady(self, metric: str) -> list[float]:
        """Returns the trainer's recent values without a run's first step, whose time includes
        the startup of all processes."""
        values = self.recent("trainer", metric)
        return values[1:] if 1 < len(values) < RECENT else values

    def pace_s(self) -> float | None:
        """Returns the median duration of the newest steps in seconds."""
        times = self.steady("time/step")
        return statistics.median(times) if times else None

    def share(self, metric: str) -> float | None:
        """Returns the fraction of the newest steps' time that `metric`, one of its parts, took."""
        part, whole = self.steady(metric), sum(self.steady("time/step"))
        return sum(part) / whole if part and whole > 0 else None

    def moved_s(self) -> float:
        """Returns the seconds since any progress: a counter, a batch, a line of metrics, or the
        start of a process."""
        times = [self.numbers.newest()]
        times += [event.time for event in self.events if event.event in ("ready", "restart")]
        for process in self.processes.values():
            times += [process.status.progressed, process.status.started]
        if self.newest_batch:
            times.append(self.run_dir.batch(self.newest_batch).stat().st_mtime)
        newest = max((time for time in times if time is not None), default=self.now)
        return max(0.0, self.now - newest)

    def deaths(self, name: str) -> list[Event]:
        return [event for event in self.events if event.event == "death" and event.process == name]

    @property
    def recent_events(self) -> list[Event]:
        """Events since `rl` was last started."""
        starts = [
            i
            for i, event in enumerate(self.events)
            if event.event == "start" and event.process == "rl"
        ]
        return self.events[starts[-1] :] if starts else self.events

    @property
    def stop(self) -> Event | None:
        """The signal by which the user or the machine's management stopped the run since; None
        if nobody did."""
        return next((event for event in self.recent_events if event.event == "stop"), None)

    def down(self, name: str) -> Event | None:
        """Returns the death of a process that has not been restarted since; None otherwise."""
        for event in reversed(self.recent_events):
            if event.process == name and event.event in ("death", "restart", "ready"):
                return event if event.event == "death" else None
        return None


def is_doubtful(status: RoleStatus | NodeStatus, now: float) -> bool:
    """Returns whether a process is on another host and its heartbeat looks old or in the future
    by this host's clock."""
    if not status.heartbeat or status.place == pid_scope():
        return False
    return not -HEARTBEAT_S <= now - status.heartbeat <= SILENT_S


def clock_of(
    name: str, status: RoleStatus | NodeStatus, heartbeats: Staleness, now: float
) -> float:
    """Returns the time on a process's host. While a doubtful heartbeat has not changed, it counts
    as at least as old as it looks."""
    if not status.heartbeat or not is_doubtful(status, now):
        return now
    shown = status.heartbeat + heartbeats.look(name, status.heartbeat)
    return shown if heartbeats.moved(name) else max(now, shown)


def watch(rl_dir: RunDir) -> Staleness:
    """Waits up to SILENT_S for new heartbeats of the processes and machines whose heartbeat is
    doubtful: one that changes is new, whatever its time. Returns what it has seen."""
    heartbeats, now, began = Staleness(), time.time(), time.monotonic()
    statuses = read_statuses(rl_dir.status_dir) | read_statuses(rl_dir.status_dir, f"{NODES}/")
    doubtful = [name for name, status in statuses.items() if is_doubtful(status, now)]
    if doubtful:
        names = ", ".join(doubtful)
        say(f"waiting up to {SILENT_S:.0f} s for new heartbeats of {names} on other hosts")
    while time.monotonic() - began <= SILENT_S and not all(map(heartbeats.moved, doubtful)):
        for name in doubtful:
            if (newer := read_status(rl_dir.status(name))) and newer.heartbeat:
                heartbeats.look(name, newer.heartbeat)
        time.sleep(POLL_S)
    return heartbeats


def read_statuses(folder: Path, prefix: str = "") -> dict[str, RoleStatus]:
    """Returns the statuses in a folder, or in its folder `prefix`, by name."""
    paths = files_in(folder / prefix, ".json")
    statuses = {f"{prefix}{path.stem}": read_status(path) for path in paths}
    return {name: status for name, status in statuses.items() if status and status.pid is not None}


def read_machines(
    run_dir: RunDir, config: RLConfig, heartbeats: Staleness, now: float
) -> list[RunMachine]:
    """Returns the machines of a run, none for one without a cluster. `heartbeats`: see RunState."""
    if config.cluster is None:
        return []
    nodes, division = Nodes(run_dir), plan(config)
    statuses, world = nodes.statuses(), nodes.world()
    machines = []
    for index in range(division.nodes):
        if (status := statuses.get(index)) is None:
            machines.append(RunMachine(index, division.roles(index)))
            continue
        silent_s = clock_of(f"{NODES}/{index}", status, heartbeats, now) - status.heartbeat
        ended = status.place == pid_scope() and not psutil.pid_exists(status.pid)
        trains = world and index in world.nodes and status.generation == world.generation
        generation = status.generation if trains else None
        machines.append(
            RunMachine(index, status.roles, status, max(0.0, silent_s), ended, generation)
        )
    return machines


def machine_changes(told: dict[int, str], machines: list[RunMachine]) -> list[str]:
    """Returns what became of machines since the last call, which left its knowledge in `told`."""
    lines = []
    for machine in machines:
        host = f" ({machine.status.host})" if machine.status else ""
        texts = {
            "absent": "has left",
            "lost": f"is {machine.loss}",
            "leaving": "is leaving",
            "live": machine.does,
        }
        sign = f"{machine.state} {machine.does}" if machine.is_up else machine.state
        if told.get(machine.index, "absent") != sign:
            lines.append(f"  machine {machine.index}{host} {texts[machine.state]}")
        told[machine.index] = sign
    return lines


def inspect_process(name: str, status: RoleStatus, now: float) -> Process:
    """Returns a process from its status and the kernel."""
    if not (alive := status.lives()):
        return Process(name, status, now, alive)
    try:
        process = psutil.Process(status.pid)
        # Workers may stop their own children, and `rl` is the parent of all.
        below = [] if name == "rl" else process.children(recursive=name != "orchestrator")
        blocked = process.status() == psutil.STATUS_DISK_SLEEP
    except psutil.NoSuchProcess:
        return Process(name, status, now, False)
    stopped = dict[int, str]()
    for member in [process, *below]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if member.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                stopped[member.pid] = member.name()
    return Process(name, status, now, True, stopped, blocked)


def read_launcher(lock: Path, now: float) -> Process | None:
    """Returns the process recorded in the lock, if it can be seen from here. Does not try the
    lock, which could interfere with a start."""
    owner = read_json(lock, LockOwner)
    if owner is None or owner.lives() is None:
        return None
    status = RoleStatus(pid=owner.pid, place=owner.place, start_ticks=owner.started)
    return inspect_process("rl", status, now)
