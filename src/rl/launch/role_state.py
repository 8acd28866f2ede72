"""What the supervisor knows of each role over all its attempts, and which batch kills the trainer."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.launch.roles import Role
from rl.run_dir.files import write_file
from rl.run_dir.logs import last_lines, last_words
from rl.run_dir.paths import RunDir
from rl.run_dir.status import TRAINER_STEPS, Phase, RoleStatus, describe
from rl.system.children import Child
from rl.system.errors import RunError


@dataclass
class Death:
    """One end of a process that was not of its own choice."""

    time: float
    attempt: int
    reason: str
    doing: str
    """For people."""
    training_step: int | None
    """The step that it was training; None: it did something else."""
    error: str = ""
    """What it ended with, see logs.error_line."""

    def __str__(self) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))} attempt {self.attempt}, {self.doing}: {self.reason}"


@dataclass
class RoleState:
    """A role over all its attempts. Times are seconds on the supervisor's clock."""

    role: Role
    start_at: float = 0.0
    """When it is to be started, while there is no child."""
    child: Child | None = None
    done: bool = False
    began: float = 0.0
    """Start of this attempt."""
    died: float | None = None
    """End of the attempt before this one."""
    ready: bool = False
    """This attempt has come up."""
    was_ready: bool = False
    """Some attempt has come up."""
    failed_starts: int = 0
    """Attempts that failed by themselves before any had come up, or, of a server, had sampled a token."""
    progressed: bool = False
    """This attempt has got something done."""
    ever_progressed: bool = False
    """Some attempt has."""
    streak: int = 0
    """Deaths in a row without progress."""
    deaths: list[Death] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    """When it died."""
    statuses: dict[str, RoleStatus] = field(default_factory=dict)
    """By process: its own, and of a trainer those of the other ranks."""
    silent_s: dict[str, float] = field(default_factory=dict)
    """Seconds for which each of them has had the same heartbeat."""
    warned: int = 0
    """How many of this attempt's warnings were said."""
    stopped_s: float = 0.0
    """Seconds for which a signal has held it."""

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def status(self) -> RoleStatus:
        """Its last status, an empty one before the first."""
        return self.statuses.get(self.name, RoleStatus())

    @property
    def doing(self) -> str:
        """Its phase as a sentence for people."""
        return describe(self.status) if self.status.phase else "before its first status"

    @property
    def training_step(self) -> int | None:
        """The step that it is training; None: it does something else."""
        return self.status.step if self.status.phase is Phase.TRAINING else None

    @property
    def is_down(self) -> bool:
        """Whether it has died, and no attempt has come up since."""
        return self.died is not None and not self.done and not (self.child and self.ready)

    def is_up(self) -> bool:
        """Whether it does its work (again)."""
        if self.name == "inference":
            return self.status.address is not None
        phase = self.status.phase
        return phase in TRAINER_STEPS if self.name == "trainer" else phase not in (None, Phase.STARTING, Phase.LOADING_ENVIRONMENTS)


class Quarantine:
    """Finds the batch that kills the trainer each time, and marks it to be skipped."""

    def __init__(self, run_dir: RunDir, patience: int):
        self.run_dir, self.patience = run_dir, patience
        self.step, self.deaths = 0, list[Death]()
        self.in_a_row = list[int]()
        """Quarantined steps with no good one since the first of them."""
        self.error = ""
        """What the trainer ended with in the newest of them."""

    def note_steps(self, lines: list[dict[str, Any]]) -> None:
        """Takes new lines of the trainer's metrics: a step that was done did not kill."""
        for line in lines:
            if line["step"] >= self.step:
                self.deaths = []
            if self.in_a_row and line["step"] > self.in_a_row[-1] and not line.get("quarantined"):
                self.in_a_row = []

    def repeats(self, death: Death) -> bool:
        """Whether a death has the error for which the batch before was quarantined: then no batch is the cause."""
        return bool(self.in_a_row and death.error == self.error != "" and death.training_step not in (None, self.in_a_row[-1]))

    def note_death(self, death: Death) -> Path | None:
        """Counts deaths within the same step; one while loading says nothing about any. Returns the marker when one was written."""
        if death.training_step is None:
            return None
        if death.training_step != self.step:
            self.step, self.deaths = death.training_step, []
        self.deaths.append(death)
        if len(self.deaths) < self.patience:
            return None
        path = self.run_dir.quarantined(self.step)
        record = {"step": self.step, "why": death.reason, "deaths": [str(one) for one in self.deaths], "time": round(time.time(), 3)}
        write_file(path, json.dumps(record, indent=2).encode() + b"\n")
        self.in_a_row.append(self.step)
        self.deaths, self.error = [], death.error
        return path


def failure(child: Child, what: str) -> RunError:
    """The error of a run that ends through one process: what that did, the end of its log, and where the rest of the log is."""
    lines, words = last_lines(child.log), last_words(child.log)
    if words.rstrip(".") not in what and not any(words in line for line in lines):  # it stands above them
        what = f"{what}, saying: {words}"
    quoted = "\n".join(f"  | {line}" for line in lines)
    return RunError(f"{child.name} {what}. The end of its log:\n{quoted}\n  the whole log: {child.log}")
