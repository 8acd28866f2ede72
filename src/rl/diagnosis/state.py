"""A run as its files show it at one moment: which processes live and what they do, how far it is, what happened. Nothing is written.

Ages are by this host's clock, but for processes on other hosts whose heartbeat looks wrong by it: that is watched for a few seconds.
"""

import contextlib
import shlex
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

from rl.config.run import RLConfig
from rl.run_dir.events import Event, read_events
from rl.run_dir.files import files_in
from rl.run_dir.lease import LockOwner
from rl.run_dir.metrics import Numbers, ReadOnce, read_metrics
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir, numbered, numbers
from rl.run_dir.status import HEARTBEAT_S, Phase, RoleStatus, RunEnd, describe, read_json, read_status
from rl.system.linux import place

SILENT_S = 5 * HEARTBEAT_S
"""Age from which a missing heartbeat is reported, seconds. (`rl` acts later: supervisor.silence_s.)"""
POLL_S = 0.1
RECENT = 10
"""Steps over which paces and shares are taken."""
STARTED_SLACK_S = 5.0
"""Tolerated between the start of a process by the kernel's clock and by its own, seconds."""


@dataclass(frozen=True)
class Process:
    """A status file, and its process as the kernel shows it."""

    name: str
    status: RoleStatus
    now: float
    """The time, by the clock of its host."""
    alive: bool | None
    """None: it runs on another machine, so only its heartbeat tells."""
    stopped: dict[int, str] = field(default_factory=dict)
    """Processes of its tree that SIGSTOP or a debugger holds: pid -> name."""
    blocked: bool = False
    """It is in a call of the kernel that cannot be interrupted: a disk or network file system that does not answer."""

    @property
    def doing(self) -> str:
        """Its phase as a sentence for people."""
        return describe(self.status)

    @property
    def doing_for(self) -> str:
        """Its phase and how long it has been in it."""
        return f"{self.doing} for {span(self.phase_s)}"

    def seconds_since(self, time: float | None) -> float:
        """Seconds from a time that its status gives until now; 0 without one."""
        return 0.0 if time is None else max(0.0, self.now - time)

    @property
    def phase_s(self) -> float:
        """Seconds in its phase."""
        return self.seconds_since(self.status.since)

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat."""
        return self.seconds_since(self.status.heartbeat)

    @property
    def dry_s(self) -> float:
        """Seconds since its counter last grew, or since it started."""
        return self.seconds_since(self.status.started if self.status.progressed is None else self.status.progressed)

    @property
    def silent(self) -> bool:
        """Whether its heartbeat is missing."""
        return self.silent_s > SILENT_S

    @property
    def heard(self) -> bool:
        """Whether it has a heartbeat, and that is not missing."""
        return self.status.heartbeat is not None and not self.silent

    @property
    def there(self) -> bool:
        """Whether it can still do something; one on another machine is given the benefit of the doubt."""
        return self.alive is not False


@dataclass
class RunState:
    """A run at the time `now`."""

    run_dir: RunDir
    config: RLConfig
    now: float
    launcher: Process | None
    """The run's `rl`; None: it had none, or it is on another machine."""
    processes: dict[str, Process]
    numbers: Numbers
    events: list[Event]
    end: RunEnd | None
    newest_batch: int
    newest_version: int
    newest_checkpoint: int
    newest_eval: int | None
    quarantined: list[int]

    @property
    def alive(self) -> bool:
        signs = (process.alive or (process.alive is None and process.heard) for process in self.processes.values())
        return any(signs) or bool(self.launcher and self.launcher.alive)

    @property
    def further_servers(self) -> list[Process]:
        """Inference servers of this run that `rl` has not started."""
        return [process for name, process in self.processes.items() if name.startswith("inference-")]

    @property
    def inference(self) -> Process | None:
        """The run's own inference server; without one the first of the further ones that is there."""
        further = sorted(self.further_servers, key=lambda process: not (process.there and process.status.address))
        return self.processes.get("inference") or next(iter(further), None)

    @property
    def roles(self) -> list[str]:
        """The processes that this run consists of, further inference servers not counted."""
        if self.config.sft:
            return ["trainer"]
        by_hand = self.further_servers and not (self.launcher and self.launcher.alive) and "inference" not in self.processes
        elsewhere = self.config.orchestrator.inference_urls or by_hand
        return [*([] if elsewhere else ["inference"]), "orchestrator", "trainer"]

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return f"rl @ {shlex.quote(str(self.run_dir.config))} --resume"

    @cached_property
    def step(self) -> int:
        """The newest step that the trainer reported; before the first, the one that the run begins behind."""
        steps = self.numbers.steps("trainer")
        return int(steps[-1]) if len(steps) else first_step(self.run_dir)

    def values(self, source: str, metric: str) -> list[float]:
        """A metric's values, oldest first."""
        return self.numbers.points(source, metric)[1]

    def recent(self, source: str, metric: str) -> list[float]:
        """A metric's values in the newest steps, oldest first."""
        return self.numbers.points(source, metric, RECENT)[1]

    def steady(self, metric: str) -> list[float]:
        """The trainer's recent values without those of a run's first step, whose time is the wait for everything to come up."""
        values = self.recent("trainer", metric)
        return values[1:] if 1 < len(values) < RECENT else values

    def pace_s(self) -> float | None:
        """Median seconds of the newest steps."""
        times = self.steady("time/step")
        return statistics.median(times) if times else None

    def share(self, metric: str) -> float | None:
        """Part of the newest steps' time that one of its parts took."""
        part, whole = self.steady(metric), self.steady("time/step")
        return sum(part) / sum(whole) if part and sum(whole) > 0 else None

    def moved_s(self) -> float:
        """Seconds since anything of the run moved: a counter, a batch, a line of metrics, a process that started."""
        times = [time] if (time := self.numbers.newest()) else []
        times += [event.time for event in self.events if event.event in ("ready", "restart")]
        for process in self.processes.values():
            times += [time for time in (process.status.progressed, process.status.started) if time is not None]
        if self.newest_batch:
            times.append(self.run_dir.batch(self.newest_batch).stat().st_mtime)
        return max(0.0, self.now - max(times)) if times else 0.0

    def deaths(self, name: str) -> list[Event]:
        return [event for event in self.events if event.event == "death" and event.process == name]

    @property
    def recent_events(self) -> list[Event]:
        """Events since `rl` was last started."""
        starts = [i for i, event in enumerate(self.events) if event.event == "start" and event.process == "rl"]
        return self.events[starts[-1] :] if starts else self.events

    @property
    def stop(self) -> Event | None:
        """The signal by which its user, or what manages the machine, stopped the run since; None: nobody did."""
        return next((event for event in self.recent_events if event.event == "stop"), None)

    def down(self, name: str) -> Event | None:
        """The death of a process that has not been started again since."""
        mine = [event for event in self.recent_events if event.process == name and event.event in ("death", "restart", "ready")]
        return mine[-1] if mine and mine[-1].event == "death" else None


class Heartbeats:
    """Heartbeats from hosts with other clocks, as whoever looks again and again has seen them: so it need not wait for them."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, float, bool]] = {}
        """Process -> its heartbeat, when that was first seen (time.monotonic), and whether another one was seen before."""

    def clock(self, name: str, heartbeat: float, now: float) -> float:
        """What the clock of a process's host shows. While its heartbeat was not seen to change, it is at least as old as it looks."""
        known, moment = self.seen.get(name), time.monotonic()
        if known is None or known[0] != heartbeat:
            self.seen[name] = heartbeat, moment, known is not None
        _, since, moves = self.seen[name]
        return heartbeat + moment - since if moves else max(now, heartbeat + moment - since)


def read_state(run_dir: RunDir, config: RLConfig, heartbeats: Heartbeats | None = None, metrics: Numbers | None = None) -> RunState:
    """The state of a run. A file that is missing or half written counts as not there. Raises PermissionError for what may not be read.

    heartbeats: what was seen by earlier looks; without it `other_clocks` waits where a clock may be another one. metrics: of the run, from
    whoever follows them; without it they are read.
    """
    now = time.time()
    evals = reversed(numbered(run_dir.evals).items())
    paths = files_in(run_dir.status_dir, ".json")
    statuses = {path.stem: status for path in paths if (status := read_status(path)) and status.pid is not None}
    doubtful = [name for name, status in statuses.items() if is_doubtful(status, now)]
    clocks = (
        other_clocks(run_dir, statuses, doubtful, now)
        if heartbeats is None
        else {name: heartbeats.clock(name, statuses[name].heartbeat or now, now) for name in doubtful}
    )
    processes = {name: inspect_process(name, status, clocks.get(name, now)) for name, status in statuses.items()}
    return RunState(
        run_dir=run_dir,
        config=config,
        now=now,
        launcher=read_launcher(run_dir.lock("rl"), now),
        processes=processes,
        numbers=metrics or ReadOnce(read_metrics(run_dir.metrics)),
        events=read_events(run_dir.events),
        end=read_json(run_dir.run_end, RunEnd),
        newest_batch=run_dir.newest_batch(),
        newest_version=max(numbers(run_dir.weights_dir), default=0),
        newest_checkpoint=max(numbers(run_dir.checkpoints), default=0),
        newest_eval=next((version for version, path in evals if any(path.glob("*.jsonl"))), None),
        quarantined=numbers(run_dir.batches, ".quarantined"),
    )


def is_doubtful(status: RoleStatus, now: float) -> bool:
    """Whether a process is on another host, and its heartbeat looks old, or ahead of time, by this host's clock."""
    elsewhere = bool(status.phase and status.heartbeat and not is_here(status))
    return elsewhere and not -HEARTBEAT_S <= now - (status.heartbeat or now) <= SILENT_S


def other_clocks(run_dir: RunDir, statuses: dict[str, RoleStatus], doubtful: list[str], now: float) -> dict[str, float]:
    """What the clocks of other hosts show, by process, for those whose heartbeat is doubtful.

    It is watched for up to SILENT_S: one that changes meanwhile is new, whatever time it names, and one that does not is at least so old.
    `statuses` gets the newer ones.
    """
    ages = {name: now - (statuses[name].heartbeat or now) for name in doubtful}
    doubtful = [*doubtful]
    if doubtful:
        text = f"watching for up to {SILENT_S:.0f} s whether there are new heartbeats of {', '.join(doubtful)}, on other hosts"
        print(text, file=sys.stderr, flush=True)
    clocks, since = dict[str, float](), time.monotonic()
    while doubtful and (watched_s := time.monotonic() - since) <= SILENT_S:
        time.sleep(POLL_S)
        for name in doubtful[:]:
            newer = read_status(run_dir.status(name))
            if newer and newer.heartbeat and newer.heartbeat != statuses[name].heartbeat:
                statuses[name], clocks[name] = newer, newer.heartbeat
                doubtful.remove(name)
    return clocks | {name: max(now, now - ages[name] + watched_s + POLL_S) for name in doubtful}


def inspect_process(name: str, status: RoleStatus, now: float) -> Process:
    """A process as its status and the kernel show it. A pid that has gone to another process since is recognised by its start."""
    if status.phase is None:  # a version of rl before these statuses wrote it
        return Process(name, status, now, False)
    if not is_here(status):
        return Process(name, status, now, None)
    try:
        process = psutil.Process(status.pid)
        started = now if status.started is None else status.started
        if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > started + STARTED_SLACK_S:
            return Process(name, status, now, False)
        # An orchestrator's workers may stop what they have started, and `rl` is above all.
        tree = [process, *([] if name == "rl" else process.children(recursive=name != "orchestrator"))]
    except (psutil.NoSuchProcess, ValueError):
        return Process(name, status, now, False)
    states = []
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            states.append((member.status(), member.pid, member.name()))
    stopped = {number: title for state, number, title in states if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)}
    return Process(name, status, now, True, stopped, bool(states) and states[0][0] == psutil.STATUS_DISK_SLEEP)


def is_here(process: RoleStatus | LockOwner) -> bool:
    """Whether the pid that a file names can be looked at here. Of one that a version of rl before places wrote, the host must do."""
    return process.host == socket.gethostname() and process.place in ("", place())


def read_launcher(lock: Path, now: float) -> Process | None:
    """The process that wrote itself into the lock. The lock is not tried: that would get in the way of a start."""
    owner = read_json(lock, LockOwner)
    if owner is None or not is_here(owner):
        return None
    status = RoleStatus(process="rl", pid=owner.pid, host=owner.host, place=owner.place, started=lock.stat().st_mtime, phase=Phase.STARTING)
    return inspect_process("rl", status, now)


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
