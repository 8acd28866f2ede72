"""A run as its files show it at one moment: who lives and what it does, how far it is, what happened. Reads only; no torch, no vllm."""

import json
import re
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rl.config import RLConfig
from rl.metrics import read_metrics
from rl.processes import last_lines
from rl.run_dir import RunDir, numbered
from rl.status import HEARTBEAT_S, read_status

SILENT_S = 5 * HEARTBEAT_S
"""A heartbeat that is older is worth a word. (`rl` acts later: supervisor.silence_s.)"""
RECENT = 10
"""Steps over which paces and shares are taken."""
STARTED_SLACK_S = 5.0
"""Between the start of a process by the kernel's clock and by its own."""
Line = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """One status file, and what the kernel says of its process if that runs on this machine."""

    name: str
    status: Line
    now: float
    alive: bool | None
    """None: it runs on another machine, so only its heartbeat tells."""
    stopped: list[str] = field(default_factory=list)
    """Processes of its tree that SIGSTOP or a debugger holds, `pid (name)`."""
    blocked: bool = False
    """It is in a call of the kernel that cannot be interrupted: a disk or network file system that does not answer."""

    @property
    def doing(self) -> str:
        return str(self.status.get("doing", "nothing that it told"))

    @property
    def doing_s(self) -> float:
        return max(0.0, self.now - float(self.status.get("since", self.now)))

    @property
    def silent_s(self) -> float:
        return max(0.0, self.now - float(self.status.get("heartbeat", self.now)))

    @property
    def up_s(self) -> float:
        return max(0.0, self.now - float(self.status.get("started", self.now)))

    @property
    def idle_s(self) -> float | None:
        """Since its counter last grew; None: it has counted nothing, or does not say when."""
        at = self.status.get("progressed")
        return None if at is None else max(0.0, self.now - float(at))

    @property
    def silent(self) -> bool:
        return self.silent_s > SILENT_S

    @property
    def there(self) -> bool:
        """Whether it can still do something; one on another machine is given the benefit of the doubt."""
        return self.alive is not False


@dataclass
class RunState:
    """What `read_state` found."""

    run_dir: RunDir
    config: RLConfig
    now: float
    launcher: Process | None
    """The run's `rl`, with everything below it; None: it had none, or it is on another machine."""
    processes: dict[str, Process]
    lines: dict[tuple[int, str], Line]
    events: list[Line]
    newest_batch: int
    newest_version: int
    newest_checkpoint: int
    newest_eval: int | None
    quarantined: list[int]

    @property
    def alive(self) -> bool:
        heard = (process.alive or (process.alive is None and not process.silent) for process in self.processes.values())
        return any(heard) or bool(self.launcher and self.launcher.alive)

    @property
    def roles(self) -> list[str]:
        """The processes that this run consists of."""
        if self.config.sft:
            return ["trainer"]
        return [*([] if self.config.orchestrator.inference_urls else ["inference"]), "orchestrator", "trainer"]

    @property
    def resume(self) -> str:
        """The command that continues the run."""
        return f"rl @ {self.run_dir.config} --resume"

    @property
    def step(self) -> int:
        """The newest step that the trainer reported."""
        return max((step for step, source in self.lines if source == "trainer"), default=0)

    def recent(self, source: str, metric: str) -> list[float]:
        """A metric's values in the newest steps, oldest first."""
        points = sorted((step, line[metric]) for (step, of), line in self.lines.items() if of == source and line.get(metric) is not None)
        return [float(value) for _, value in points[-RECENT:]]

    def steady(self, metric: str) -> list[float]:
        """As `recent`, of the trainer, without a run's first step, whose time is the wait for everything to come up."""
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
        """Since anything of the run moved: a counter, a batch, a line of metrics, a process that started."""
        times = [float(line["time"]) for line in self.lines.values() if "time" in line]
        times += [event["time"] for event in self.events if event.get("event") in ("ready", "restart")]
        for process in self.processes.values():
            times += [float(process.status[key]) for key in ("progressed", "started") if key in process.status]
        if self.newest_batch:
            times.append(self.run_dir.batch(self.newest_batch).stat().st_mtime)
        return max(0.0, self.now - max(times)) if times else 0.0

    def deaths(self, name: str) -> list[Line]:
        return [event for event in self.events if event.get("event") == "death" and event.get("process") == name]

    @property
    def recent_events(self) -> list[Line]:
        """Since `rl` was last started."""
        starts = [i for i, event in enumerate(self.events) if event.get("event") == "start"]
        return self.events[starts[-1] :] if starts else self.events

    def down(self, name: str) -> Line | None:
        """The death of a process that has not been started again since."""
        told = [event for event in self.recent_events if event.get("process") == name]
        mine = [event for event in told if event.get("event") in ("death", "restart", "ready")]
        return mine[-1] if mine and mine[-1]["event"] == "death" else None


def read_state(run_dir: RunDir, config: RLConfig, now: float | None = None) -> RunState:
    """Reads all of it. Nothing here waits, and a file that is missing or half written is as if it were not there."""
    now = time.time() if now is None else now
    evals = [int(path.name) for path in run_dir.evals.glob("*") if path.name.isdigit() and any(path.glob("*.jsonl"))]
    return RunState(
        run_dir=run_dir,
        config=config,
        now=now,
        launcher=read_launcher(run_dir.lock("rl"), now),
        processes=read_processes(run_dir, now),
        lines=read_metrics(run_dir.metrics),
        events=read_events(run_dir.events),
        newest_batch=run_dir.newest_batch(),
        newest_version=max(numbered(run_dir.weights_dir), default=0),
        newest_checkpoint=max(numbered(run_dir.checkpoints), default=0),
        newest_eval=max(evals, default=None),
        quarantined=list(numbered(run_dir.batches, ".quarantined")),
    )


def read_processes(run_dir: RunDir, now: float) -> dict[str, Process]:
    """Every status file's process by its name."""
    found = {}
    for path in sorted(run_dir.status("any").parent.glob("*.json")):
        status = read_status(path)
        if isinstance(status, dict) and "pid" in status:
            found[path.stem] = look_at(path.stem, status, now)
    return found


def look_at(name: str, status: Line, now: float) -> Process:
    """Adds what the kernel says. A number that was given to another process since is told by its start."""
    if status.get("host") != socket.gethostname():
        return Process(name, status, now, None)
    try:
        process = psutil.Process(int(status["pid"]))
        if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > float(status.get("started", now)) + STARTED_SLACK_S:
            return Process(name, status, now, False)
        # An orchestrator's workers may stop what they have started, and `rl` is above all.
        below = [] if name == "rl" else process.children(recursive=name != "orchestrator")
        tree = [process, *below]
    except (psutil.NoSuchProcess, ValueError):
        return Process(name, status, now, False)
    states = []
    for member in tree:
        try:
            states.append((member.status(), f"{member.pid} ({member.name()})"))
        except psutil.NoSuchProcess:
            continue
    stopped = [who for state, who in states if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)]
    return Process(name, status, now, True, stopped, bool(states) and states[0][0] == psutil.STATUS_DISK_SLEEP)


def read_launcher(lock: Path, now: float) -> Process | None:
    """The process that wrote itself into the lock. The lock is not tried: that would get in the way of a start."""
    try:
        found = re.fullmatch(r"pid (\d+) on (.+)", lock.read_text())
        written = lock.stat().st_mtime
    except OSError:
        return None
    if not found or found[2] != socket.gethostname():
        return None
    return look_at("rl", {"pid": int(found[1]), "host": found[2], "started": written}, now)


def read_events(path: Path) -> list[Line]:
    """The supervisor's account: deaths, restarts, quarantines; oldest first."""
    try:
        raw = path.read_bytes().splitlines()
    except OSError:
        return []
    events = []
    for text in raw:
        try:
            event = json.loads(text)
        except ValueError:  # the line that its writer was killed in
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), (int, float)):
            events.append(event)
    return events


def newest_log(logs: Path, role: str) -> Path | None:
    """The log of a role's last attempt. Ranks of a trainer share one."""
    name = re.sub(r"^trainer-\d+$", "trainer", role)
    attempts = {path.stem.removeprefix(f"{name}-"): path for path in logs.glob(f"{name}-*.log")}
    numbers = [int(attempt) for attempt in attempts if attempt.isdigit()]
    return attempts[str(max(numbers))] if numbers else None


def log_end(log: Path | None, count: int) -> list[str]:
    """The last lines of a log that say something."""
    try:
        return [line for line in last_lines(log) if line.strip()][-count:] if log else []
    except OSError:
        return []


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
