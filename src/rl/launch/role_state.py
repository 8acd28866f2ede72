"""The supervisor's state of each role across all its attempts, and the detection of batches that kill the trainer."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.launch.roles import Role
from rl.run_dir.files import write_file
from rl.run_dir.logs import last_lines, last_words
from rl.run_dir.paths import RunDir
from rl.run_dir.status import TRAINER_STEPS, Phase, RoleStatus, Staleness, describe
from rl.system.children import Child
from rl.system.errors import RunError


@dataclass
class Death:
    """One unplanned end of a process."""

    time: float
    attempt: int
    reason: str
    doing: str
    """Text for people."""
    training_step: int | None
    """The step that it was training; None if it was doing something else."""
    error: str = ""
    """The error it ended with, see logs.error_line."""

    def __str__(self) -> str:
        return f"{time.strftime('%H:%M:%S', time.localtime(self.time))} attempt {self.attempt}, {self.doing}: {self.reason}"


@dataclass
class Attempt:
    """One process of a role, from its start to its end. Times are seconds of the supervisor's clock."""

    name: str
    """The role's name."""
    child: Child
    began: float
    ready: bool = False
    """Whether it has come up."""
    progressed: bool = False
    """Whether it has made progress."""
    statuses: dict[str, RoleStatus] = field(default_factory=dict)
    """Newest statuses by process: its own, and those of the other ranks of a trainer."""
    staleness: Staleness = field(default_factory=Staleness)
    silent_s: dict[str, float] = field(default_factory=dict)
    """Seconds since the heartbeat of each process last changed, on the clock of `staleness`."""
    num_warnings: int = 0
    """Number of its warnings that were printed."""
    stopped_s: float = 0.0
    """Seconds for which a signal has kept it stopped."""

    @property
    def status(self) -> RoleStatus:
        """Its last status; an empty one before the first."""
        return self.statuses.get(self.name, RoleStatus())

    @property
    def doing(self) -> str:
        """Its phase as a sentence for people."""
        return describe(self.status) if self.status.phase else "before its first status"

    @property
    def training_step(self) -> int | None:
        """The step that it is training; None if it is doing something else."""
        return self.status.step if self.status.phase is Phase.TRAINING else None

    @property
    def last_phase(self) -> dict[str, Any]:
        """Its phase as fields of an event."""
        return {"phase": self.status.phase, "step": self.status.step, "doing": self.doing}

    def works(self) -> bool:
        """Returns whether it is past its start-up and doing its work."""
        if self.name == "inference":
            return self.status.address is not None
        phase = self.status.phase
        return phase in TRAINER_STEPS if self.name == "trainer" else phase not in (None, Phase.STARTING, Phase.LOADING_ENVIRONMENTS)


@dataclass
class RoleState:
    """A role across all its attempts: waiting for its start, running an attempt, or done. Times are seconds of the supervisor's clock."""

    role: Role
    start_at: float = 0.0
    """Time at which to start it, while there is no attempt."""
    attempt: Attempt | None = None
    done: bool = False
    died: float | None = None
    """Time at which the previous attempt ended."""
    came_up: bool = False
    """Whether any attempt has come up."""
    progressed: bool = False
    """Whether any attempt has made progress."""
    failed_starts: int = 0
    """Number of attempts that failed by themselves before any came up or, for a server, before any sampled a token."""
    streak: int = 0
    """Number of consecutive deaths without progress."""
    deaths: list[Death] = field(default_factory=list)
    death_times: list[float] = field(default_factory=list)
    last_was_ready: bool = False
    """Whether the previous attempt had come up."""

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def child(self) -> Child | None:
        """The process of its attempt; None without an attempt."""
        return self.attempt.child if self.attempt else None

    def end_attempt(self, now: float) -> None:
        """Records the end of its attempt."""
        assert self.attempt is not None
        self.attempt, self.died, self.last_was_ready = None, now, self.attempt.ready

    @property
    def is_down(self) -> bool:
        """Whether it has died, and no attempt has come up since."""
        return self.died is not None and not self.done and not (self.attempt and self.attempt.ready)


class Quarantine:
    """Finds a batch that repeatedly kills the trainer, and marks it to be skipped."""

    def __init__(self, run_dir: RunDir, patience: int):
        self.run_dir, self.patience = run_dir, patience
        self.step, self.deaths = 0, list[Death]()
        self.in_a_row = list[int]()
        """Quarantined steps without a good step since the first of them."""
        self.error = ""
        """The error with which the trainer ended in the newest of them."""

    def note_steps(self, lines: list[dict[str, Any]]) -> None:
        """Processes new lines of the trainer's metrics: a step that was completed did not kill the trainer."""
        for line in lines:
            if line["step"] >= self.step:
                self.deaths = []
            if self.in_a_row and line["step"] > self.in_a_row[-1] and not line.get("quarantined"):
                self.in_a_row = []

    def repeats(self, death: Death) -> bool:
        """Returns whether a death has the same error for which the previous batch was quarantined: then no batch is the cause."""
        return bool(self.in_a_row and death.error == self.error != "" and death.training_step not in (None, self.in_a_row[-1]))

    def note_death(self, death: Death) -> Path | None:
        """Counts deaths in the same step, ignoring those outside of training. Returns the marker if one was written."""
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
    """Returns the error of a run that ends because of one process: what that did, the end of its log, and the log's path."""
    lines, words = last_lines(child.log), last_words(child.log)
    if words.rstrip(".") not in what and not any(words in line for line in lines):  # otherwise they are quoted already
        what = f"{what}, saying: {words}"
    quoted = "\n".join(f"  | {line}" for line in lines)
    return RunError(f"{child.name} {what}. The end of its log:\n{quoted}\n  the whole log: {child.log}")
