"""The keeper's state of each role across all its attempts."""

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from rl.launch.roles import Role
from rl.run_dir.logs import last_lines, last_words
from rl.run_dir.paths import RunDir
from rl.run_dir.status import TRAINER_STEPS, Phase, RoleStatus, Staleness, describe
from rl.system.children import Child
from rl.system.errors import RunError


@dataclass
class Death:
    """One unplanned end of a process."""

    child: Child
    time: float
    reason: str
    code: int | None
    """Its exit code; None if it was killed for its silence."""
    doing: str
    """Text for people."""
    training_step: int | None
    """The step that it was training; None if it was doing something else."""
    error: str = ""
    """The error it ended with, see logs.error_line."""
    again: str = ""
    """What it was doing and when it starts again, for people."""
    verdict: RunError | None = None
    """Why it is not started again."""

    @property
    def role(self) -> str:
        return self.child.name

    def __str__(self) -> str:
        return (
            f"{time.strftime('%H:%M:%S', time.localtime(self.time))} attempt "
            f"{self.child.attempt}, {self.doing}: {self.reason}"
        )


@dataclass
class Attempt:
    """One process of a role, from its start to its end. Times are seconds of the keeper's clock."""

    child: Child
    began: float
    ready: bool = False
    """Whether it has come up."""
    progressed: bool = False
    """Whether it has made progress."""
    statuses: dict[str, RoleStatus] = field(default_factory=dict)
    """Newest statuses by process: its own, and those of the other ranks of a trainer."""
    has_status: bool = False
    """Whether its own status file was there at the last look; `statuses` keeps what that said
    last."""
    staleness: Staleness = field(default_factory=Staleness)
    num_warnings: int = 0
    """Number of its warnings that were printed."""
    stopped: list[int] = field(default_factory=list)
    """The pids below it that a signal has stopped."""
    stopped_s: float = 0.0
    """Seconds for which there have been any."""

    @property
    def status(self) -> RoleStatus:
        """Its last status; an empty one before the first."""
        return self.statuses.get(self.child.name, RoleStatus())

    def rank(self, name: str) -> str:
        """Names one of several processes by its status, and its machine: `trainer rank 1 on
        host-b`; empty if there is only one."""
        if len(self.statuses) == 1:
            return ""
        process, _, rank = name.partition("-")
        host = f" on {self.statuses[name].host}" if self.statuses[name].host else ""
        return (name if rank and not rank.isdigit() else f"{process} rank {rank or 0}") + host

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

    def has_come_up(self) -> bool:
        """Returns whether it is past its start-up and doing its work."""
        role, phase = self.child.name.partition("-")[0], self.status.phase
        if role == "inference":
            return self.status.address is not None
        return (
            phase in TRAINER_STEPS
            if role == "trainer"
            else phase not in (None, Phase.STARTING, Phase.LOADING_ENVIRONMENTS)
        )


@dataclass
class RoleState:
    """A role across all its attempts: waiting for its start, running an attempt, or done. Times
    are seconds of the keeper's clock."""

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
    """Number of attempts that ended with their own error before any attempt came up; for a
    server, before any sampled a token."""
    streak: int = 0
    """Number of consecutive deaths without progress."""
    deaths: list[Death] = field(default_factory=list)
    death_times: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.role.name

    @property
    def is_down(self) -> bool:
        """Whether it has died, and no attempt has come up since."""
        return self.died is not None and not self.done and not (self.attempt and self.attempt.ready)


def rank_code(run_dir: RunDir) -> int | None:
    """Returns the exit code of the trainer's rank that failed first; None if none has left one."""
    with contextlib.suppress(OSError, ValueError):
        return int(run_dir.exit_code("trainer").read_text())
    return None


def failure(child: Child, what: str) -> RunError:
    """Returns the error of a run that ends because of one process: what that did, the end of its
    log, and the log's path."""
    lines, words = last_lines(child.log), last_words(child.log)
    # otherwise they are quoted already
    if words.rstrip(".") not in what and not any(words in line for line in lines):
        what = f"{what}, saying: {words}"
    quoted = "\n".join(f"  | {line}" for line in lines)
    return RunError(
        f"{child.name} {what}. The end of its log:\n{quoted}\n  the whole log: {child.log}"
    )
