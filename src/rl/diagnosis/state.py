"""Reads a run's state from its files: live processes and what they do, progress, and events.
Nothing is written.

Ages use this host's clock. If the heartbeat of a process on another host looks wrong by that clock,
it is watched for a few seconds.
"""

import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.config.stored import continued_by, rl_dir_of
from rl.run_dir.events import Event, read_events
from rl.run_dir.files import files_in
from rl.run_dir.lease import LEASE_S, LockOwner
from rl.run_dir.logs import newest_log
from rl.run_dir.nodes import Jobs, Nodes, NodeStatus, World
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir, numbered, numbers
from rl.run_dir.status import (
    HEARTBEAT_S,
    Phase,
    RoleStatus,
    RunEnd,
    Staleness,
    describe,
    read_json,
    read_status,
)
from rl.system.linux import pid_scope
from rl.system.terminal import span

if TYPE_CHECKING:
    from rl.run_dir.numbers import Numbers

SILENT_S = 5 * HEARTBEAT_S
"""Age in seconds from which a heartbeat is reported as missing. (`rl` acts later:
supervisor.silence_s.)"""
POLL_S = 0.1
RECENT = 10
"""Number of newest steps over which paces and shares are computed."""


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
        return self.seconds_since(
            self.status.started if self.status.progressed is None else self.status.progressed
        )

    @property
    def silent(self) -> bool:
        """Whether its heartbeat is missing."""
        return self.silent_s > SILENT_S

    @property
    def heard(self) -> bool:
        """Whether it has a recent heartbeat."""
        return self.status.heartbeat is not None and not self.silent

    @property
    def there(self) -> bool:
        """Whether it may still be running; always true for a process on another machine."""
        return self.alive is not False


@dataclass(frozen=True)
class Machine:
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
    def there(self) -> bool:
        return self.state in ("live", "leaving")

    def runs(self, process: RoleStatus) -> bool:
        return (
            self.status is not None and bool(process.place) and process.place == self.status.place
        )


@dataclass
class RunState:
    """A run at the time `now`."""

    run_dir: RunDir
    rl_dir: RunDir
    """The directory of its `rl`, with the status, logs and events of its processes, see
    rl_dir_of."""
    config: RLConfig
    now: float
    launcher: Process | None
    """The run's `rl`; None if there was none or it is on another machine."""
    processes: dict[str, Process]
    machines: list[Machine]
    """All machines of a run on a cluster, by index."""
    jobs: Jobs | None
    """What was submitted to a cluster's engine, until the run is over."""
    numbers: "Numbers"
    events: list[Event]
    end: RunEnd | None
    newest_batch: int
    newest_version: int
    newest_checkpoint: int
    newest_eval: int | None
    quarantined: list[int]

    @property
    def alive(self) -> bool:
        signs = (
            process.alive or (process.alive is None and process.heard)
            for process in self.processes.values()
        )
        return any(signs) or any(machine.there for machine in self.machines) or self.is_led

    @property
    def is_led(self) -> bool:
        """Whether an `rl` runs, here or on a machine of a cluster."""
        leads = any(machine.there and "leader" in machine.roles for machine in self.machines)
        return leads or bool(self.launcher and self.launcher.alive)

    @property
    def servers(self) -> list[Process]:
        """The run's inference servers, those that are running first, and of these the one that
        `rl` started."""
        found = [
            process
            for name, process in self.processes.items()
            if name.partition("-")[0] == "inference"
        ]
        return sorted(
            found,
            key=lambda process: (
                process.name != "inference",
                not (process.there and process.status.address),
            ),
        )

    @property
    def inference(self) -> Process | None:
        """The run's own inference server; without one, a further server, preferably one that is
        running."""
        return next(iter(self.servers), None)

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
        if self.config.serve:
            return [*self.own_servers, "tinker"]
        return ["trainer"] if self.config.sft else [*self.own_servers, "orchestrator", "trainer"]

    def log(self, name: str) -> Path | None:
        """Returns the newest log of a process: of a rank on a machine of a cluster, that of the
        ranks there."""
        process = self.processes.get(name)
        if process and name.partition("-")[0] == "trainer" and name != "trainer-launcher":
            for machine in self.machines:
                if machine.status and machine.status.log and machine.runs(process.status):
                    return Path(machine.status.log)
        return newest_log(self.rl_dir.logs, name)

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
        part, whole = self.steady(metric), self.steady("time/step")
        return sum(part) / sum(whole) if part and sum(whole) > 0 else None

    def moved_s(self) -> float:
        """Returns the seconds since any progress: a counter, a batch, a line of metrics, or the
        start of a process."""
        times = [time] if (time := self.numbers.newest()) else []
        times += [event.time for event in self.events if event.event in ("ready", "restart")]
        for process in self.processes.values():
            times += [
                time
                for time in (process.status.progressed, process.status.started)
                if time is not None
            ]
        if self.newest_batch:
            times.append(self.run_dir.batch(self.newest_batch).stat().st_mtime)
        return max(0.0, self.now - max(times)) if times else 0.0

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
        mine = [
            event
            for event in self.recent_events
            if event.process == name and event.event in ("death", "restart", "ready")
        ]
        return mine[-1] if mine and mine[-1].event == "death" else None


def other_clock(staleness: Staleness, name: str, heartbeat: float, now: float) -> float:
    """Returns the time on a process's host. While its heartbeat has not changed, it counts as at
    least as old as it looks."""
    shown = heartbeat + staleness.look(name, heartbeat)
    return shown if staleness.moved(name) else max(now, shown)


def read_state(
    run_dir: RunDir,
    config: RLConfig,
    heartbeats: Staleness | None = None,
    metrics: "Numbers | None" = None,
) -> RunState:
    """Returns the state of a run. Missing or half-written files count as absent. Raises
    PermissionError for unreadable files.

    `heartbeats` holds earlier observations; without it, `watch` waits where clocks may differ.
    `metrics` are the run's numbers if the caller follows them; without it, they are read.
    """
    from rl.run_dir.numbers import Numbers

    now, nodes = time.time(), Nodes(run_dir)
    rl_dir = rl_dir_of(run_dir, config)
    evals = reversed(numbered(run_dir.evals).items())
    paths = files_in(rl_dir.status_dir, ".json")
    statuses = {
        path.stem: status
        for path in paths
        if (status := read_status(path)) and status.pid is not None
    }
    doubtful = [
        name for name, status in statuses.items() if status.phase and is_doubtful(status, now)
    ]
    machines = (
        {machine_name(index): as_process(status) for index, status in nodes.statuses().items()}
        if config.cluster
        else {}
    )
    doubtful_machines = [name for name, status in machines.items() if is_doubtful(status, now)]
    if heartbeats is None:
        heartbeats = Staleness()
        watch(rl_dir, statuses, [*doubtful, *doubtful_machines], heartbeats)
    clocks = {
        name: other_clock(heartbeats, name, statuses[name].heartbeat or now, now)
        for name in doubtful
    }
    processes = {
        name: inspect_process(name, status, clocks.get(name, now))
        for name, status in statuses.items()
    }
    return RunState(
        run_dir=run_dir,
        rl_dir=rl_dir,
        config=config,
        now=now,
        launcher=read_launcher(rl_dir.lock("rl"), now),
        processes=processes,
        machines=read_machines(run_dir, config, heartbeats, now),
        jobs=nodes.jobs() if config.cluster and not nodes.over() else None,
        numbers=metrics or Numbers.read(run_dir.metrics),
        events=read_events(rl_dir.events),
        end=read_json(run_dir.run_end, RunEnd),
        newest_batch=run_dir.newest_batch(),
        newest_version=max(numbers(run_dir.weights_dir), default=0),
        newest_checkpoint=max(numbers(run_dir.checkpoints), default=0),
        newest_eval=next((version for version, path in evals if any(path.glob("*.jsonl"))), None),
        quarantined=numbers(run_dir.batches, ".quarantined"),
    )


def is_doubtful(status: RoleStatus, now: float) -> bool:
    """Returns whether a process is on another host and its heartbeat looks old or in the future
    by this host's clock."""
    elsewhere = bool(status.heartbeat and status.lives() is None)
    return elsewhere and not -HEARTBEAT_S <= now - (status.heartbeat or now) <= SILENT_S


def watch(
    run_dir: RunDir, statuses: dict[str, RoleStatus], doubtful: list[str], heartbeats: Staleness
) -> None:
    """Waits up to SILENT_S for new heartbeats of the processes whose heartbeat is doubtful: one
    that changes is new, whatever its time.

    Updates `statuses` with newer ones.
    """
    if not doubtful:
        return
    names = ", ".join(name.replace("nodes/", "machine ") for name in doubtful)
    print(
        f"waiting up to {SILENT_S:.0f} s for new heartbeats of {names} on other hosts",
        file=sys.stderr,
        flush=True,
    )
    began = time.monotonic()
    while time.monotonic() - began <= SILENT_S and not all(map(heartbeats.moved, doubtful)):
        for name in doubtful:
            if (newer := read_status(run_dir.status(name))) and newer.heartbeat:
                statuses |= {name: newer} if name in statuses else {}
                heartbeats.look(name, newer.heartbeat)
        time.sleep(POLL_S)


def machine_name(index: int) -> str:
    """Returns what a machine's status is called among those of the processes."""
    return f"nodes/{index}"


def as_process(status: NodeStatus) -> RoleStatus:
    """Returns the status of a machine's `rl node`."""
    return RoleStatus(
        pid=status.pid, host=status.host, place=status.place, heartbeat=status.heartbeat
    )


def read_machines(
    run_dir: RunDir, config: RLConfig, heartbeats: Staleness, now: float
) -> list[Machine]:
    """Returns the machines of a run, none for one without a cluster. `heartbeats`: see
    read_state."""
    if config.cluster is None:
        return []
    nodes, division, found = Nodes(run_dir), plan(config), []
    statuses, world = (
        nodes.statuses(),
        nodes.world() or World(generation=0, nodes=[], leases=[], ranks=[]),
    )
    for index in range(division.nodes):
        if (status := statuses.get(index)) is None:
            found.append(Machine(index, division.roles(index)))
            continue
        process, clock = as_process(status), now
        if is_doubtful(process, now):
            clock = other_clock(heartbeats, machine_name(index), status.heartbeat, now)
        trains = index in world.nodes and status.generation == world.generation
        ended, generation = (
            status.place == pid_scope() and not psutil.pid_exists(status.pid),
            world.generation if trains else None,
        )
        found.append(
            Machine(
                index, status.roles, status, max(0.0, clock - status.heartbeat), ended, generation
            )
        )
    return found


def inspect_process(name: str, status: RoleStatus, now: float) -> Process:
    """Returns a process from its status and the kernel."""
    if not (alive := status.lives()):
        return Process(name, status, now, alive)
    try:
        process = psutil.Process(status.pid)
        # Workers may stop their own children, and `rl` is the parent of all.
        tree = [
            process,
            *([] if name == "rl" else process.children(recursive=name != "orchestrator")),
        ]
    except psutil.NoSuchProcess:
        return Process(name, status, now, False)
    states = []
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            states.append((member.status(), member.pid, member.name()))
    stopped = {
        number: title
        for state, number, title in states
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    }
    return Process(
        name, status, now, True, stopped, bool(states) and states[0][0] == psutil.STATUS_DISK_SLEEP
    )


def read_launcher(lock: Path, now: float) -> Process | None:
    """Returns the process recorded in the lock. Does not try the lock, which could interfere
    with a start."""
    owner = read_json(lock, LockOwner)
    if owner is None or owner.lives() is None:
        return None
    status = RoleStatus(
        process="rl",
        phase=Phase.STARTING,
        pid=owner.pid,
        host=owner.host,
        place=owner.place,
        start_ticks=owner.started,
    )
    return inspect_process("rl", status, now)
