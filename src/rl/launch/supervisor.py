"""Keeps the processes of a run alive: restarts dead ones, kills silent ones, and knows when to give up.

    exit -> death -> (quarantine, repair) -> start after a back-off;   no heartbeat -> kill -> death;   no progress -> a diagnosis

A death affects only the process and its descendants; the others wait for it. Workers of environments are restarted by the orchestrator
(orchestrator/workers/pool.py), not here. Every event is a line in `events.jsonl`, see
rl/run_dir/events.py. The supervisor's clock only counts time in which `rl` could poll: if `rl` is stopped or the machine sleeps, no
process is late.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.role_state import Attempt, Death, Quarantine, RoleState, failure
from rl.launch.roles import PREPARING, Role
from rl.run_dir.events import Event, EventKind, append_event
from rl.run_dir.logs import error_line, last_lines, last_words, trim_logs
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Staleness, archive_status, describe, read_status
from rl.system.children import Child, RestartPolicy
from rl.system.errors import DAMAGED, GIVE_UP, WRONG_SETTINGS, RunError

if TYPE_CHECKING:
    from rl.diagnosis.waits import Diagnosis

LONGEST_POLL_S = 1.0
"""Seconds between polls count at most this much."""
SLOW_POLL_S = 2.0
"""Seconds between polls of the process table, which costs more than the rest."""
TRIM_EVERY_S = 10.0
"""Seconds between checks of log sizes."""
FIRST_SIGN_S = 300.0
"""A process without a status file after this time, and after inference.startup_timeout_s, is restarted: its imports come before it."""
MAX_QUARANTINED = 3
"""If this many consecutive batches kill the trainer, the batches are not the cause."""
MAX_FAILED_STARTS = 2
"""A role that never came up has not crashed: the same fault would end every attempt. SIGKILL, which comes from outside, does not count.
The same holds for a server that ends with an error in every attempt before it has sampled a token: its model, settings or device."""
SHOWN_DEATHS = 5
AFTER_S = 30.0
"""Longest wait of a role that starts after another one; after a server it is the server's start-up limit, because they share a GPU."""


class Supervisor:
    """Supervises the processes of a run. Call `poll` several times a second; it raises RunError when the run cannot continue."""

    def __init__(self, config: RLConfig, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.config, self.settings, self.run_dir, self.children, self.say = config, config.supervisor, run_dir, children, say
        self.states: dict[str, RoleState] = {}
        self.clock, self.polled, self.slow_at, self.trim_at = 0.0, time.monotonic(), 0.0, 0.0
        limits = self.settings.max_restarts, self.settings.window_s
        self.restarts = RestartPolicy(self.settings.backoff_s, self.settings.backoff_limit_s, *limits)
        self.quarantine = Quarantine(run_dir, config.supervisor.quarantine_after)
        self.moved_at, self.num_lines, self.moved = 0.0, 0, None
        """Time at which anything last moved, and the counters that show it."""
        self.diagnosis: Thread | None = None
        self.found: SimpleQueue[Diagnosis] = SimpleQueue()
        """Diagnoses of stalls that were not reported yet."""
        self.event("start", "rl", pid=os.getpid())

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of the previous ones."""
        self.states = {role.name: RoleState(role, start_at=self.clock) for role in roles}
        self.moved_at = self.clock
        for state in self.states.values():
            if state.role.after in self.states:
                state.start_at += self.config.inference.startup_timeout_s if state.role.after == "inference" else AFTER_S
            else:
                self._start(state)

    @property
    def finished(self) -> bool:
        """Whether everything has ended except inference, which never ends by itself."""
        return all(state.done for state in self.states.values() if state.name != "inference")

    def poll(self, lines: list[dict[str, Any]] | None = None) -> None:
        """Checks every process and acts; `lines` are the new lines of metrics.jsonl."""
        now = time.monotonic()
        gap, self.polled = min(now - self.polled, LONGEST_POLL_S), now
        self.clock += gap
        self._take_in(lines or [])
        slow_s = self.clock - self.slow_at if self.clock - self.slow_at >= SLOW_POLL_S else 0.0
        for state in list(self.states.values()):
            if (attempt := state.attempt) and attempt.child.exit_code is not None:
                self._ended(state, attempt)
            elif attempt:
                self._watch(state, attempt, slow_s)
            elif not state.done and self.clock >= state.start_at:
                self._start(state)
        if slow_s:
            self.slow_at = self.clock
            self.children.poll()
            self._check_stall()
            if self.clock >= self.trim_at:
                self.trim_at = self.clock + TRIM_EVERY_S
                trim_logs(self.run_dir.logs)

    def event(self, kind: EventKind, process: str, **fields: Any) -> None:
        """Appends to events.jsonl."""
        append_event(self.run_dir.events, Event(time=round(time.time(), 3), event=kind, process=process, **fields))

    # Starts -------------------------------------------------------------------------------------------------------------

    def _start(self, state: RoleState) -> None:
        role = state.role
        # Only after an attempt that came up, and not twice without progress: the fault may be in the state that a copy inherits.
        warm = (state.died is not None and state.streak <= (1 if state.last_was_ready else 0)) if role.leaves_copy else None
        try:
            if role.name == "trainer":
                self.run_dir.exit_code("trainer").unlink(missing_ok=True)
            child = self.children.start(role.name, role.command, role.env, self.run_dir.logs, role.cores, warm)
        except OSError as error:
            return self._not_started(state, error)
        state.attempt = Attempt(role.name, child, began=self.clock, staleness=Staleness(lambda: self.clock))
        if state.died is not None:
            self.event("restart", state.name, attempt=child.attempt, seconds=round(self.clock - state.died, 1))
        elif state.name not in PREPARING:
            self.event("start", state.name, attempt=child.attempt)
        return None

    def _not_started(self, state: RoleState, error: OSError) -> None:
        """Schedules a retry of a start that the system refused: a full process table or disk may pass. Raises RunError when the policy
        allows no more refusals and deaths."""
        reason = f"could not be started: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        state.streak += 1
        state.death_times.append(self.clock)
        self.event("death", state.name, reason=reason)
        delay = self.restarts.delay_s(state.streak, state.death_times)
        if delay is None:
            self.event("give_up", state.name, reason=reason)
            raise RunError(f"{state.name} {reason}, {len(state.death_times)} times; make room for its files or processes, then go on")
        state.start_at = self.clock + delay
        self.say(f"warning: {state.name} {reason}; it is tried again in {delay:g} s")

    def _start_followers(self, state: RoleState) -> None:
        """Starts the roles that wait for this one, which is up or has ended."""
        for other in self.states.values():
            if other.role.after == state.name and not other.attempt and other.died is None and not other.done:
                other.start_at = self.clock

    def _take_in(self, lines: list[dict[str, Any]]) -> None:
        """Records the progress of the processes since the last poll."""
        for line in lines:
            state = self.states.get("orchestrator" if line["source"] == "eval" else line["source"])
            if state and state.attempt:
                state.attempt.progressed = True
        self.quarantine.note_steps([line for line in lines if line["source"] == "trainer"])
        self.num_lines += len(lines)

    def _read_statuses(self, state: RoleState, attempt: Attempt) -> None:
        """Reads its heartbeats, and measures how long each has not changed."""
        names = [state.name]
        if state.name == "trainer":
            names += sorted(path.stem for path in self.run_dir.status(state.name).parent.glob("trainer-*.json"))
        before, attempt.statuses = attempt.statuses, {}
        for name in names:
            if status := read_status(self.run_dir.status(name)) or before.get(name):
                attempt.statuses[name] = status
                attempt.silent_s[name] = attempt.staleness.look(name, status.heartbeat)
        attempt.progressed = attempt.progressed or any(status.progress for status in attempt.statuses.values())
        state.progressed = state.progressed or attempt.progressed
        state.came_up = state.came_up or attempt.works()
        for warning in attempt.status.warnings[attempt.num_warnings :]:
            attempt.num_warnings += 1
            self.event("warning", state.name, env=warning.env, reason=warning.text)
            self.say(f"warning: {warning.text}")

    def _watch(self, state: RoleState, attempt: Attempt, slow_s: float) -> None:
        """Kills a process that is silent or does not come up."""
        self._read_statuses(state, attempt)
        child = attempt.child
        if not attempt.ready and attempt.works():
            attempt.ready = True
            self._start_followers(state)
            seconds = round(self.clock - (attempt.began if state.died is None else state.died), 1)
            self.event("ready", state.name, attempt=child.attempt, seconds=seconds)
            if state.died is not None:
                self.say(f"  {state.name} is back after {seconds:.1f} s ({describe(attempt.status)})")
        if slow_s:
            # The orchestrator watches its own workers, and an environment may stop processes.
            stopped = self.children.stopped(child, whole_tree=state.name != "orchestrator")
            attempt.stopped_s = attempt.stopped_s + slow_s if stopped else 0.0
        if reason := self._silence(attempt) or self._late(state, attempt):
            self.event("silent", state.name, attempt=child.attempt, reason=reason, **attempt.last_phase)
            if left := self.children.kill_tree(child):
                reason += f"; {left} do not end, even after SIGKILL: stuck in the kernel, for example in a hung file system"
            self._died(state, attempt, reason)

    def _silence(self, attempt: Attempt) -> str:
        limit = self.settings.silence_s
        if attempt.stopped_s >= limit:
            return f"was stopped by a signal for {attempt.stopped_s:.0f} s (supervisor.silence_s = {limit:g}), and killed"
        name, silent_s = max(attempt.silent_s.items(), key=lambda item: item[1], default=("", 0.0))
        if silent_s < limit:
            return ""
        rank = "" if name == attempt.name else f" of {name.replace('-', ' rank ')}"
        return f"gave no heartbeat{rank} for {silent_s:.0f} s (supervisor.silence_s = {limit:g}), and was killed"

    def _late(self, state: RoleState, attempt: Attempt) -> str:
        """Returns why to kill a process that does not come up; empty while it has time. Raises RunError for a server that never came up."""
        age = self.clock - attempt.began
        limit = self.config.inference.startup_timeout_s
        if state.name not in (*PREPARING, "inference") and not attempt.statuses and age > max(FIRST_SIGN_S, limit):
            return f"gave no sign of life in its first {age:.0f} s, and was killed"
        if state.name != "inference" or attempt.ready or age <= limit:
            return ""
        late = f"is not ready after inference.startup_timeout_s = {limit:g} s; it was doing: {describe(attempt.status)}"
        if not state.came_up:
            self.event("give_up", state.name, attempt=attempt.child.attempt, reason=late)
            raise failure(attempt.child, late)
        return late

    # Deaths -------------------------------------------------------------------------------------------------------------

    def _ended(self, state: RoleState, attempt: Attempt) -> None:
        """Handles the end of a process: a good end, a fault that ends the run, or a death."""
        self._read_statuses(state, attempt)
        child, code = attempt.child, attempt.child.exit_code
        if state.name == "trainer" and code and code > 0:
            code = self._rank_code() or code
        self.children.kill_tree(child)
        if code == 0 and state.name != "inference":
            state.attempt, state.done = None, True
            self._start_followers(state)
            if state.name == "orchestrator" and (trainer := self.states.get("trainer")) and trainer.is_down:
                self._wake("orchestrator")  # it mistook a trainer that died at the very end for one that had finished
        elif code in (WRONG_SETTINGS, GIVE_UP) or (state.name in PREPARING and code and code > 0):
            said = f", saying: {words}" if (words := last_words(child.log)) else ""
            self.event("give_up", state.name, attempt=child.attempt, exit=code, reason=f"{child.ending()}{said}")
            raise self._verdict(state, child)
        else:
            self._died(state, attempt, child.ending(), code)

    def _rank_code(self) -> int | None:
        """Returns the exit code of the rank that failed: torchrun's agent always exits with 1."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.run_dir.exit_code("trainer").read_text())
        return None

    def _verdict(self, state: RoleState, child: Child) -> RunError:
        if state.name not in PREPARING:
            return failure(child, child.ending())
        lines = last_lines(child.log)  # the last line says all
        return RunError(f"{lines[-1] if lines else f'the {state.name}: ' + child.ending()}\n  the whole log: {child.log}")

    def _died(self, state: RoleState, attempt: Attempt, reason: str, code: int | None = None) -> None:
        """Records a death and schedules the restart. Raises RunError if there is none."""
        child = attempt.child
        seconds, words = round(self.clock - attempt.began, 1), last_words(child.log)
        death = Death(time.time(), child.attempt, reason, attempt.doing, attempt.training_step, error_line(child.log))
        state.deaths.append(death)
        more = {"seconds": seconds, "said": words[:500], **attempt.last_phase}
        self.event("death", state.name, attempt=child.attempt, exit=code, reason=reason, **more)
        state.end_attempt(self.clock)
        state.streak = 0 if attempt.progressed else state.streak + 1
        self._forget_statuses(state)
        state.death_times.append(self.clock)
        if state.name == "trainer" and self.quarantine.repeats(death):
            raise self._no_poison(child, death)
        said = ""
        if (not state.came_up and code not in (-signal.SIGKILL, DAMAGED)) or is_useless(state, code):
            state.failed_starts += 1
            said = f", saying: {words.rstrip('.')}" if words else ""
        delay = self.restarts.delay_s(state.streak, state.death_times)
        if delay is None or state.failed_starts >= MAX_FAILED_STARTS:
            raise self._surrender(state, child, reason, said)
        state.start_at = self.clock + delay
        when = f"in {delay:g} s" if delay else "now"
        self.say(f"  {state.name} {reason}, {death.doing}{said}; it starts again {when} (log: {child.log})")
        if state.name == "trainer":
            self._wake("orchestrator")  # for the batches that are trained again, and the versions that are published again
            self._quarantine(death)
        if code == DAMAGED:
            self._repair()

    def _quarantine(self, death: Death) -> None:
        """Reports a batch that this death puts into quarantine. Raises RunError if the batches cannot be the cause."""
        if not (path := self.quarantine.note_death(death)):
            return
        step, often, settings = self.quarantine.step, self.settings.quarantine_after, "supervisor.quarantine_after"
        self.event("quarantine", "trainer", step=step, file=str(path), reason=death.reason, deaths=often)
        self.say(
            f"warning: the trainer died {often} times in a row ({settings}) in step {step}: its batch {self.run_dir.batch(step)} is "
            f"quarantined, and version {step} will equal version {step - 1}; see {path}"
        )
        if len(self.quarantine.in_a_row) >= MAX_QUARANTINED:
            steps = ", ".join(map(str, self.quarantine.in_a_row))
            reason = f"batches {steps} were quarantined with no good step between: the fault is elsewhere"
            self.event("give_up", "trainer", reason=reason)
            raise RunError(f"{reason}.\n{self.summary()}\n  the logs: {self.run_dir.logs}")

    def _no_poison(self, child: Child, death: Death) -> RunError:
        """Returns the error of a run whose trainer dies of the same error with different batches."""
        first, last = self.quarantine.in_a_row[0], self.quarantine.in_a_row[-1]
        reason = f"the same error in step {death.training_step} as in step {last}, whose batch was quarantined: no batch is the cause"
        self.event("give_up", "trainer", attempt=child.attempt, reason=reason)
        remedy = f"fix the cause, then continue before the skipped batch: --resume {first - 1}"
        return RunError(f"{reason}; {remedy}\n{failure(child, death.reason)}", resume_at=first - 1)

    def _surrender(self, state: RoleState, child: Child, reason: str, said: str) -> RunError:
        """Returns the error after too many deaths: which process died how often, when and how."""
        most, window_s = self.settings.max_restarts, self.settings.window_s
        limit = f"{most} restarts within {window_s:g} s are the limit (supervisor.max_restarts, window_s)"
        if state.failed_starts >= MAX_FAILED_STARTS:
            never = "has not sampled one token" if state.came_up else "never came up"
            limit = f"{never}: attempt {child.attempt} {reason}, too{said}"
        self.event("give_up", state.name, attempt=child.attempt, reason=limit)
        if state.failed_starts >= MAX_FAILED_STARTS:
            return failure(child, limit)
        if not most:
            return failure(child, f"{reason}{said}")
        return RunError(f"{state.name} died once more: {limit}.\n{self.summary()}\n{failure(child, reason)}")

    def forget(self) -> None:
        """Removes the statuses of processes that `rl` has ended, so that none looks alive."""
        for state in self.states.values():
            self._forget_statuses(state)

    def summary(self) -> str:
        """Returns the deaths of every process, the newest of them in full."""
        lines = []
        for state in self.states.values():
            if state.deaths:
                shown = state.deaths[-SHOWN_DEATHS:]
                last = f", the last {len(shown)}" if len(shown) < len(state.deaths) else ""
                often = "once" if len(state.deaths) == 1 else f"{len(state.deaths)} times"
                lines += [f"  {state.name} died {often}{last}:", *(f"    {death}" for death in shown)]
        return "\n".join(lines)

    def _forget_statuses(self, state: RoleState) -> None:
        """Removes its status files, so that nobody connects to the address of a dead process."""
        directory = self.run_dir.status(state.name).parent
        for path in [self.run_dir.status(state.name), *(directory.glob("trainer-*.json") if state.name == "trainer" else [])]:
            archive_status(path, self.run_dir.spans)

    def _wake(self, name: str) -> None:
        """Schedules another start of a process that had ended and is needed again."""
        if (state := self.states.get(name)) and state.done:
            state.done, state.start_at = False, self.clock

    def _repair(self) -> None:
        """Stops the processes that use damaged files, moves these files away, and restarts the processes."""
        from rl.launch.repair import repair

        for name in ("orchestrator", "trainer"):
            if not (state := self.states.get(name)):
                continue
            if state.attempt:
                self.children.end(state.attempt.child)
                state.end_attempt(self.clock)
                self._forget_statuses(state)
                state.start_at = self.clock
            self._wake(name)
        lines = repair(self.run_dir, logged=self.config.sft is None)
        self.event("repair", "rl", lines=lines)
        for line in lines or ["repair found nothing damaged"]:
            self.say(f"  {line}")

    def _check_stall(self) -> None:
        """Warns when nothing moves, with a diagnosis of what everything waits for. It only warns: each wait has its own deadline."""
        attempts = [state.attempt for state in self.states.values() if state.attempt]
        counters = {name: (status.progress, status.batch) for attempt in attempts for name, status in attempt.statuses.items()}
        now, stall_s = (counters, self.num_lines), self.settings.stall_s
        if now != self.moved:
            self.moved, self.moved_at = now, self.clock
        elif self.clock - self.moved_at >= stall_s and not PREPARING.keys() & self.states.keys():
            self.moved_at = self.clock
            if not (self.diagnosis and self.diagnosis.is_alive()):
                self.diagnosis = Thread(target=self._diagnose, name="diagnosis", daemon=True)
                self.diagnosis.start()
        while not self.found.empty():
            found = self.found.get()
            self.event("stall", "rl", reason=found.bottleneck, seconds=stall_s)
            text = f"warning: no token, rollout, batch or step for {stall_s:g} s (supervisor.stall_s): {found.bottleneck}"
            self.say("\n".join([text, *(f"  {line}" for line in found.lines)]))

    def _diagnose(self) -> None:
        """Finds out what everything waits for. Runs in a thread: it reads all metrics, and may watch heartbeats of other hosts for 10 s."""
        from rl.diagnosis.waits import diagnose

        self.found.put(diagnose(self.run_dir, self.config))


def is_useless(state: RoleState, code: int | None) -> bool:
    """Returns whether a server has ended with an error without having sampled a token in any attempt."""
    return state.name == "inference" and not state.progressed and code is not None and code > 0 and code != DAMAGED
