"""Decides what a process's death means for the run: quarantine a batch, repair files, end, or only
restart. Also warns of stalls, and finds the batches that kill the trainer.

    death -> (quarantine, repair) -> start after a back-off;   no progress -> a diagnosis

The processes themselves are started, watched and restarted by the keeper of their machine
(launch/keeper.py). Every event is a line in `events.jsonl`, see rl/run_dir/spans.py.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.keeper import Keeper
from rl.launch.role_state import Attempt, Death, failure
from rl.launch.roles import PREPARING, Role
from rl.run_dir.files import write_file
from rl.run_dir.logs import last_lines
from rl.run_dir.paths import RunDir
from rl.run_dir.status import describe
from rl.system.errors import DAMAGED, RunError


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
        """Processes new lines of the trainer's metrics: a step that was completed did not kill
        the trainer."""
        for line in lines:
            if line["step"] >= self.step:
                self.deaths = []
            if self.in_a_row and line["step"] > self.in_a_row[-1] and not line.get("quarantined"):
                self.in_a_row = []

    def repeats(self, death: Death) -> bool:
        """Returns whether a death has the same error for which the previous batch was
        quarantined: then no batch is the cause."""
        return bool(
            self.in_a_row
            and death.error == self.error != ""
            and death.training_step not in (None, self.in_a_row[-1])
        )

    def note_death(self, death: Death) -> Path | None:
        """Counts deaths in the same step, ignoring those outside of training. Returns the marker
        if one was written."""
        if death.training_step is None:
            return None
        if death.training_step != self.step:
            self.step, self.deaths = death.training_step, []
        self.deaths.append(death)
        if len(self.deaths) < self.patience:
            return None
        path = self.run_dir.quarantined(self.step)
        record = {
            "step": self.step,
            "why": death.reason,
            "deaths": [str(death) for death in self.deaths],
            "time": round(time.time(), 3),
        }
        write_file(path, json.dumps(record, indent=2).encode() + b"\n")
        self.in_a_row.append(self.step)
        self.deaths, self.error = [], death.error
        return path


if TYPE_CHECKING:
    from rl.diagnosis.waits import Diagnosis

MAX_QUARANTINED = 3
"""The run ends after this many quarantined batches in a row: the batches cannot be the cause."""


class Supervisor:
    """Supervises a run. Call `poll` several times a second; it raises RunError when the run
    cannot continue."""

    def __init__(
        self, config: RLConfig, run_dir: RunDir, children: Children, say: Callable[[str], None]
    ):
        self.config, self.settings, self.run_dir, self.say = config, config.supervisor, run_dir, say
        self.keeper = Keeper(config, run_dir, children, say)
        self.event = self.keeper.event
        self.quarantine = Quarantine(run_dir, self.settings.quarantine_after)
        self.moved_at = 0.0
        """When anything last moved, by the keeper's clock."""
        self.num_lines = 0
        """Number of lines of metrics so far."""
        self.repaired_nothing = False
        """Whether the newest repair found nothing, and no step was made since."""
        self.moved = None
        """The counters, `num_lines` among them, when anything last moved: a change shows that
        the run goes on."""
        self.diagnosis: Thread | None = None
        self.diagnoses: SimpleQueue[Diagnosis] = SimpleQueue()
        """Diagnoses of stalls that were not reported yet."""
        self.event("start", "rl", pid=os.getpid())

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of the previous ones."""
        self.moved_at = self.keeper.clock
        self.keeper.begin(roles)

    def poll(self, lines: list[dict[str, Any]]) -> None:
        """Checks every process and acts; `lines` are the new lines of metrics.jsonl."""
        states = self.keeper.states
        for line in lines:
            state = states.get("orchestrator" if line["source"] == "eval" else line["source"])
            if state and state.attempt:
                state.attempt.progressed = True
        self.num_lines += len(lines)
        self.repaired_nothing = self.repaired_nothing and not lines
        self.quarantine.note_steps([line for line in lines if line["source"] == "trainer"])
        for death in self.keeper.poll():
            self._handle(death)
        if (trainer := states.get("trainer")) and trainer.is_down:
            # The restarted trainer needs the orchestrator, even one that ended because it believed
            # that the run was finished.
            self.keeper.wake("orchestrator")
        self._check_stall()

    def _handle(self, death: Death) -> None:
        """Does what a death demands beside the restart. Raises RunError if the process is not
        restarted."""
        if death.role == "trainer" and self.quarantine.repeats(death):
            raise self._same_error_elsewhere(death)
        if not death.verdict:
            self.say(f"  {death.role} {death.reason}, {death.again}")
            if death.role == "trainer":
                self._quarantine(death)
        if death.code == DAMAGED:
            # also before the end of the run: the next --resume goes on from what is sound
            self._repair(death)
        if death.verdict:
            raise death.verdict

    def _quarantine(self, death: Death) -> None:
        """Reports a batch that this death puts into quarantine. Raises RunError if the batches
        cannot be the cause."""
        if not (path := self.quarantine.note_death(death)):
            return
        step, deaths = self.quarantine.step, self.settings.quarantine_after
        fields = {"step": step, "file": str(path), "reason": death.reason, "deaths": deaths}
        self.event("quarantine", "trainer", **fields)
        self.say(
            f"warning: the trainer died {deaths} times in a row (supervisor.quarantine_after) in "
            f"step {step}: its batch {self.run_dir.batch(step)} is quarantined, and version "
            f"{step} will equal version {step - 1}; see {path}"
        )
        if len(self.quarantine.in_a_row) >= MAX_QUARANTINED:
            steps = ", ".join(map(str, self.quarantine.in_a_row))
            reason = (
                f"batches {steps} were quarantined with no good step between: the fault is "
                "elsewhere"
            )
            self.event("give_up", "trainer", reason=reason)
            raise RunError(f"{reason}.\n{self.keeper.summary()}\n  the logs: {self.run_dir.logs}")

    def _same_error_elsewhere(self, death: Death) -> RunError:
        """Returns the error of a run whose trainer dies of the same error with different
        batches."""
        before, last = self.quarantine.in_a_row[0] - 1, self.quarantine.in_a_row[-1]
        reason = (
            f"the same error in step {death.training_step} as in step {last}, whose batch was "
            "quarantined: no batch is the cause"
        )
        self.event("give_up", "trainer", attempt=death.child.attempt, reason=reason)
        return RunError(
            f"{reason}; fix the cause, then continue before the skipped batch: --resume {before}\n"
            f"{failure(death.child, death.reason)}",
            resume_at=before,
        )

    def _repair(self, death: Death) -> None:
        """Stops the processes that use damaged files, moves these files away, and restarts the
        processes. Raises RunError if two repairs in a row find nothing: another machine sees
        damage that this one does not, and a restart there finds the same."""
        from rl.launch.repair import repair

        for name in ("orchestrator", "trainer"):
            self.keeper.end(name)
            self.keeper.wake(name)
        lines = repair(self.run_dir, logged=self.config.kind.has_rollouts)
        self.event("repair", "rl", lines=lines)
        for line in lines or ["repair found nothing damaged"]:
            self.say(f"  {line}")
        if not lines and self.repaired_nothing:
            raise RunError(
                f"{death.role} finds damage where this machine finds none, "
                f"twice:\n{failure(death.child, death.reason)}"
            )
        self.repaired_nothing = not lines

    def _check_stall(self) -> None:
        """Warns when nothing moves, with a diagnosis of what everything waits for. It only
        warns: each wait has its own deadline."""
        attempts = [state.attempt for state in self.keeper.states.values() if state.attempt]
        counters = {
            name: (status.progress, status.batch)
            for attempt in attempts
            for name, status in attempt.statuses.items()
        }
        now, stall_s = (counters, self.num_lines), self.settings.stall_s
        if now != self.moved:
            self.moved, self.moved_at = now, self.keeper.clock
        elif self.keeper.clock - self.moved_at >= stall_s:
            self.moved_at = self.keeper.clock
            if preparing := [attempt for attempt in attempts if attempt.child.name in PREPARING]:
                self._tell_preparing(preparing[0])
            elif not (self.diagnosis and self.diagnosis.is_alive()):
                self.diagnosis = Thread(target=self._diagnose, name="diagnosis", daemon=True)
                self.diagnosis.start()
        while not self.diagnoses.empty():
            diagnosis = self.diagnoses.get()
            self.event("stall", "rl", reason=diagnosis.bottleneck, seconds=stall_s)
            text = (
                f"warning: no token, rollout, batch or step for {stall_s:g} s "
                f"(supervisor.stall_s): {diagnosis.bottleneck}"
            )
            self.say("\n  ".join([text, *diagnosis.all_lines]))

    def _tell_preparing(self, attempt: Attempt) -> None:
        """Says what a process that prepares the run does. It has no deadline: a download may
        take hours."""
        name, log = attempt.child.name, attempt.child.log
        what = (
            "the model is being found or downloaded"
            if name == "model"
            else f"the data are being prepared ({describe(attempt.status)})"
        )
        last = [*last_lines(log, 1), "nothing logged yet"][0]
        text = f"{what}, for {self.keeper.clock - attempt.began:.0f} s so far: {last}"
        self.event("stall", name, reason=text, seconds=self.settings.stall_s)
        self.say(
            f"warning: {text} (log: {log}); if nothing changes, a file system may hang, or "
            "another process hold a lock on the files"
        )

    def _diagnose(self) -> None:
        """Finds out what everything waits for. Runs in a thread: it reads all metrics, and may
        watch heartbeats of other hosts for 10 s."""
        from rl.diagnosis.waits import diagnose

        self.diagnoses.put(diagnose(self.run_dir, self.config))
