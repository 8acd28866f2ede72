"""What the supervisor knows of each process over all its attempts, and the batch that ends them."""

import json
import re
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.files import write_file
from rl.prepare import RunError
from rl.processes import Child, last_lines
from rl.run_dir import RunDir

READY = re.compile(r"(training|waiting for batch|publishing|writing checkpoint|validating)\b")
"""What a trainer does once it is up."""


@dataclass(frozen=True)
class Role:
    """How a process is started, each time anew."""

    name: str
    command: list[str]
    env: dict[str, str]
    cores: list[int] | None = None
    leaves_copy: bool = False
    """For a warm start of its next attempt, see standby.py."""


@dataclass
class Death:
    """One end of a process that was none of its own choice."""

    time: float
    attempt: int
    reason: str
    doing: str

    def __str__(self) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))} attempt {self.attempt}, {self.doing}: {self.reason}"


@dataclass
class Life:
    """A role over all its attempts. Times are the supervisor's."""

    role: Role
    start_at: float = 0.0
    """When it is to be started, while there is no child."""
    child: Child | None = None
    done: bool = False
    began: float = 0.0
    died: float | None = None
    """Of the attempt before this one."""
    ready: bool = False
    was_ready: bool = False
    """At some attempt."""
    progressed: bool = False
    """In this attempt."""
    streak: int = 0
    """Deaths in a row without progress."""
    deaths: list[Death] = field(default_factory=list)
    recent: deque[float] = field(default_factory=deque)
    """Deaths within the window."""
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By file: its own, and of a trainer those of the other ranks."""
    silent_s: dict[str, float] = field(default_factory=dict)
    """For how long each of them has had the same heartbeat."""
    stopped_s: float = 0.0

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def status(self) -> dict[str, Any]:
        return self.statuses.get(self.name, {})

    @property
    def doing(self) -> str:
        return self.status.get("doing", "before its first status")

    def is_up(self) -> bool:
        """Whether it does its work (again)."""
        if self.name == "inference":
            return bool(self.status.get("address") or self.status.get("ready"))
        doing = self.status.get("doing", "")
        return bool(READY.match(doing) if self.name == "trainer" else doing and doing not in ("starting", "loading environments"))


class Poison:
    """Finds the batch that kills the trainer each time."""

    def __init__(self, run_dir: RunDir, patience: int):
        self.run_dir, self.patience = run_dir, patience
        self.step, self.deaths = 0, list[Death]()
        self.in_a_row = list[int]()
        """Quarantined steps with no good one since the first of them."""

    def note_steps(self, lines: list[dict[str, Any]]) -> None:
        """Lines of the trainer's metrics: a step that was done did not kill."""
        for line in lines:
            if line["step"] >= self.step:
                self.deaths = []
            if self.in_a_row and line["step"] > self.in_a_row[-1] and not line.get("quarantined"):
                self.in_a_row = []

    def note_death(self, death: Death) -> Path | None:
        """Counts deaths within the same step; one while loading says nothing about any. Returns the marker when one was written."""
        found = re.match(r"training step (\d+)", death.doing)
        if not found:
            return None
        if int(found[1]) != self.step:
            self.step, self.deaths = int(found[1]), []
        self.deaths.append(death)
        if len(self.deaths) < self.patience:
            return None
        path = self.run_dir.quarantined(self.step)
        record = {"step": self.step, "why": death.reason, "deaths": [str(one) for one in self.deaths], "time": round(time.time(), 3)}
        write_file(path, json.dumps(record, indent=2).encode() + b"\n")
        self.in_a_row.append(self.step)
        self.deaths = []
        return path


def failure(child: Child, what: str) -> RunError:
    """The end of a run through one process: what it said last, and where the rest stands."""
    lines = "\n".join(f"  | {line}" for line in last_lines(child.log))
    return RunError(f"{child.name} {what}. The end of its log:\n{lines}\n  the whole log: {child.log}")
