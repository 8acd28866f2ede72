"""Keeps the processes of a run alive: starts a dead one again, kills a silent one, and knows when to give up.

    exit -> death -> (quarantine, repair) -> start after a back-off;   no heartbeat -> kill -> death;   no progress -> a diagnosis

A death costs the process itself and what it had started; the others wait for it. Everything that befalls them is a line in
`events.jsonl`, see rl/run_dir/events.py. What counts here is the time in which `rl` itself could poll: a stopped `rl` or a machine that
slept makes nobody late.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.role_state import Death, Quarantine, RoleState, failure
from rl.launch.roles import PREPARING, Role
from rl.run_dir.events import Event, EventKind, append_event
from rl.run_dir.logs import error_line, last_lines, last_words, trim_logs
from rl.run_dir.paths import RunDir
from rl.run_dir.status import bury, describe, read_status
from rl.system.children import Child, RestartPolicy
from rl.system.errors import DAMAGED, GIVE_UP, WRONG_SETTINGS, RunError

LONGEST_POLL_S = 1.0
"""A poll that comes later counts as one after so long, seconds."""
SLOW_POLL_S = 2.0
"""Seconds between polls of what is cheap, but not that cheap: the process table."""
TRIM_EVERY_S = 10.0
"""Seconds between looks at the sizes of the logs."""
FIRST_SIGN_S = 300.0
"""A process that has no status file by then, and by inference.startup_timeout_s, is started again: its imports come before it."""
MAX_QUARANTINED = 3
"""So many batches in a row that kill the trainer: it is not the batches."""
MAX_FAILED_STARTS = 2
"""What never came up once is not a crash: the same fault would end every attempt. A SIGKILL, which comes from outside, does not count.
Nor is a server that comes up and ends with an error before it has sampled one token, in every attempt: its model, settings or device."""
SHOWN_DEATHS = 5
AFTER_S = 30.0
"""A role that starts after another one waits no longer for that; after a server for as long as that may take, for they share a GPU."""


class Supervisor:
    """The processes of a run. `poll` does all: it is called several times a second, and raises RunError when the run cannot go on."""

    def __init__(self, config: RLConfig, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.config, self.settings, self.run_dir, self.children, self.say = config, config.supervisor, run_dir, children, say
        self.states: dict[str, RoleState] = {}
        self.clock, self.polled, self.slow_at, self.trim_at = 0.0, time.monotonic(), 0.0, 0.0
        limits = self.settings.max_restarts, self.settings.window_s
        self.restarts = RestartPolicy(self.settings.backoff_s, self.settings.backoff_limit_s, *limits)
        self.quarantine = Quarantine(run_dir, config.supervisor.quarantine_after)
        self.moved_at, self.num_lines, self.moved = 0.0, 0, None
        """When anything last moved, and the counters by which that shows."""
        self.event("start", "rl", pid=os.getpid())

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of those before."""
        self.states = {role.name: RoleState(role, start_at=self.clock) for role in roles}
        self.moved_at = self.clock
        for state in self.states.values():
            if state.role.after in self.states:
                state.start_at += self.config.inference.startup_timeout_s if state.role.after == "inference" else AFTER_S
            else:
                self._start(state)

    @property
    def finished(self) -> bool:
        """Whether everything has come to its end but inference, which has none of its own."""
        return all(state.done for state in self.states.values() if state.name != "inference")

    def poll(self, lines: list[dict[str, Any]] | None = None) -> None:
        """Checks every process and acts; `lines` are new in metrics.jsonl."""
        now = time.monotonic()
        gap, self.polled = min(now - self.polled, LONGEST_POLL_S), now
        self.clock += gap
        self._take_in(lines or [])
        slow_s = self.clock - self.slow_at if self.clock - self.slow_at >= SLOW_POLL_S else 0.0
        for state in list(self.states.values()):
            if state.child and state.child.exit_code is not None:
                self._ended(state, state.child)
            elif state.child:
                self._watch(state, state.child, gap, slow_s)
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
        if role.name == "trainer":
            self.run_dir.exit_code("trainer").unlink(missing_ok=True)
        # Only after an attempt that came up, and not twice without progress: what a copy has inherited must not hold the run up.
        warm = (state.died is not None and state.streak <= (1 if state.ready else 0)) if role.leaves_copy else None
        state.child = self.children.start(role.name, role.command, role.env, self.run_dir.logs, role.cores, warm)
        state.began, state.ready, state.progressed, state.stopped_s = self.clock, False, False, 0.0
        state.statuses, state.silent_s, state.warned = {}, {}, 0
        if state.died is not None:
            self.event("restart", state.name, attempt=state.child.attempt, seconds=round(self.clock - state.died, 1))
        elif state.name not in PREPARING:
            self.event("start", state.name, attempt=state.child.attempt)

    def _start_followers(self, state: RoleState) -> None:
        """Lets those start that were to start after this one, which is up, or has come to its end."""
        for other in self.states.values():
            if other.role.after == state.name and not other.child and other.died is None and not other.done:
                other.start_at = self.clock

    def _take_in(self, lines: list[dict[str, Any]]) -> None:
        """Notes what the processes have got done since the last poll."""
        for line in lines:
            if state := self.states.get("orchestrator" if line["source"] == "eval" else line["source"]):
                state.progressed = True
        self.quarantine.note_steps([line for line in lines if line["source"] == "trainer"])
        self.num_lines += len(lines)

    def _read_statuses(self, state: RoleState, gap: float) -> None:
        """Reads its heartbeats, and counts for how long each has been the same."""
        names = [state.name]
        if state.name == "trainer":
            names += sorted(path.stem for path in self.run_dir.status(state.name).parent.glob("trainer-*.json"))
        before, state.statuses = state.statuses, {}
        for name in names:
            if status := read_status(self.run_dir.status(name)) or before.get(name):
                same = name in before and status.heartbeat == before[name].heartbeat
                state.statuses[name] = status
                state.silent_s[name] = state.silent_s.get(name, 0.0) + gap if same else 0.0
        state.progressed = state.progressed or any(status.progress for status in state.statuses.values())
        state.ever_progressed = state.ever_progressed or state.progressed
        state.was_ready = state.was_ready or state.is_up()
        for warning in state.status.warnings[state.warned :]:
            state.warned += 1
            self.event("warning", state.name, env=warning.env, reason=warning.text)
            self.say(f"warning: {warning.text}")

    def _watch(self, state: RoleState, child: Child, gap: float, slow_s: float) -> None:
        """Kills a process that is silent, or that does not come up."""
        self._read_statuses(state, gap)
        if not state.ready and state.is_up():
            state.ready = True
            self._start_followers(state)
            seconds = round(self.clock - (state.began if state.died is None else state.died), 1)
            self.event("ready", state.name, attempt=child.attempt, seconds=seconds)
            if state.died is not None:
                self.say(f"  {state.name} is back after {seconds:.1f} s ({describe(state.status)})")
        if slow_s:
            # An orchestrator's workers are its own to watch, and an environment may stop what it likes.
            stopped = self.children.stopped(child, whole_tree=state.name != "orchestrator")
            state.stopped_s = state.stopped_s + slow_s if stopped else 0.0
        if reason := self._silence(state) or self._late(state, child):
            self.event("silent", state.name, attempt=child.attempt, reason=reason, **last_phase(state))
            if left := self.children.kill_tree(child):
                reason += f"; {left} do not end, not even by SIGKILL: stuck in the kernel, as by a file system that hangs"
            self._died(state, child, reason)

    def _silence(self, state: RoleState) -> str:
        limit = self.settings.silence_s
        if state.stopped_s >= limit:
            return f"was stopped by a signal for {state.stopped_s:.0f} s (supervisor.silence_s = {limit:g}), and killed"
        name, silent_s = max(state.silent_s.items(), key=lambda item: item[1], default=("", 0.0))
        if silent_s < limit:
            return ""
        rank = "" if name == state.name else f" of {name.replace('-', ' rank ')}"
        return f"gave no heartbeat{rank} for {silent_s:.0f} s (supervisor.silence_s = {limit:g}), and was killed"

    def _late(self, state: RoleState, child: Child) -> str:
        """Why a process that does not come up is to be killed; empty while it has time. Raises RunError for a server that never came up."""
        age = self.clock - state.began
        limit = self.config.inference.startup_timeout_s
        if state.name not in (*PREPARING, "inference") and not state.statuses and age > max(FIRST_SIGN_S, limit):
            return f"gave no sign of life in its first {age:.0f} s, and was killed"
        if state.name != "inference" or state.ready or age <= limit:
            return ""
        late = f"is not ready after inference.startup_timeout_s = {limit:g} s; it was doing: {describe(state.status)}"
        if not state.was_ready:
            self.event("give_up", state.name, attempt=child.attempt, reason=late)
            raise failure(child, late)
        return late

    # Deaths -------------------------------------------------------------------------------------------------------------

    def _ended(self, state: RoleState, child: Child) -> None:
        """A good end, a diagnosis that ends the run, or a death."""
        self._read_statuses(state, 0.0)
        code = child.exit_code
        if state.name == "trainer" and code and code > 0:
            code = self._rank_code() or code
        self.children.kill_tree(child)
        if code == 0 and state.name != "inference":
            state.child, state.done = None, True
            self._start_followers(state)
            if state.name == "orchestrator" and (trainer := self.states.get("trainer")) and trainer.is_down:
                self._wake("orchestrator")  # it has taken a trainer that died at the very end for one that had ended
        elif code in (WRONG_SETTINGS, GIVE_UP) or (state.name in PREPARING and code and code > 0):
            said = f", saying: {words}" if (words := last_words(child.log)) else ""
            self.event("give_up", state.name, attempt=child.attempt, exit=code, reason=f"{child.ending()}{said}")
            raise self._verdict(state, child)
        else:
            self._died(state, child, child.ending(), code)

    def _rank_code(self) -> int | None:
        """The exit code of the rank that failed: torchrun's agent ends with 1 whatever that was."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.run_dir.exit_code("trainer").read_text())
        return None

    def _verdict(self, state: RoleState, child: Child) -> RunError:
        if state.name not in PREPARING:
            return failure(child, child.ending())
        lines = last_lines(child.log)  # one line about the model, and all that there is to say
        return RunError(f"{lines[-1] if lines else f'the {state.name}: ' + child.ending()}\n  the whole log: {child.log}")

    def _died(self, state: RoleState, child: Child, reason: str, code: int | None = None) -> None:
        """Records a death, and sets when the process is started again. Raises RunError where that is never."""
        seconds, words = round(self.clock - state.began, 1), last_words(child.log)
        death = Death(time.time(), child.attempt, reason, state.doing, state.training_step, error_line(child.log))
        state.deaths.append(death)
        more = {"seconds": seconds, "said": words[:500], **last_phase(state)}
        self.event("death", state.name, attempt=child.attempt, exit=code, reason=reason, **more)
        state.child, state.died = None, self.clock
        state.streak = 0 if state.progressed else state.streak + 1
        self._forget_statuses(state)
        state.recent.append(self.clock)
        if state.name == "trainer" and self.quarantine.repeats(death):
            raise self._no_poison(child, death)
        said = ""
        if (not state.was_ready and code not in (-signal.SIGKILL, DAMAGED)) or is_useless(state, code):
            state.failed_starts += 1
            said = f", saying: {words.rstrip('.')}" if words else ""
        delay = self.restarts.delay_s(state.streak, state.recent)
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
        """Reports the batch that this death was one too many of. Raises RunError when it cannot be the batches."""
        if not (path := self.quarantine.note_death(death)):
            return
        step, often, settings = self.quarantine.step, self.settings.quarantine_after, "supervisor.quarantine_after"
        self.event("quarantine", "trainer", step=step, file=str(path), reason=death.reason, deaths=often)
        self.say(
            f"warning: the trainer died {often} times in a row ({settings}) in step {step}: its batch {self.run_dir.batch(step)} is "
            f"quarantined, and version {step} will equal version {step - 1}; {path} says more"
        )
        if len(self.quarantine.in_a_row) >= MAX_QUARANTINED:
            steps = ", ".join(map(str, self.quarantine.in_a_row))
            reason = f"batches {steps} were quarantined with no good step between: the fault is elsewhere"
            self.event("give_up", "trainer", reason=reason)
            raise RunError(f"{reason}.\n{self.summary()}\n  the logs: {self.run_dir.logs}")

    def _no_poison(self, child: Child, death: Death) -> RunError:
        """The end of a run whose trainer dies of the same error with different batches."""
        first, last = self.quarantine.in_a_row[0], self.quarantine.in_a_row[-1]
        reason = f"the same error in step {death.training_step} as in step {last}, whose batch was quarantined: no batch is the cause"
        self.event("give_up", "trainer", attempt=child.attempt, reason=reason)
        remedy = f"mend the cause, then go on before the batch that was skipped: --resume {first - 1}"
        return RunError(f"{reason}; {remedy}\n{failure(child, death.reason)}", resume_at=first - 1)

    def _surrender(self, state: RoleState, child: Child, reason: str, said: str) -> RunError:
        """The end after too many deaths: who died how often, when, how."""
        most, window_s = self.settings.max_restarts, self.settings.window_s
        limit = f"{most} restarts within {window_s:g} s are the limit (supervisor.max_restarts, window_s)"
        if state.failed_starts >= MAX_FAILED_STARTS:
            never = "has not sampled one token" if state.was_ready else "never came up"
            limit = f"{never}: attempt {child.attempt} {reason}, too{said}"
        self.event("give_up", state.name, attempt=child.attempt, reason=limit)
        if state.failed_starts >= MAX_FAILED_STARTS:
            return failure(child, limit)
        if not most:
            return failure(child, f"{reason}{said}")
        return RunError(f"{state.name} died once more: {limit}.\n{self.summary()}\n{failure(child, reason)}")

    def forget(self) -> None:
        """Of processes that `rl` has ended nothing stays that looks like a live one's."""
        for state in self.states.values():
            self._forget_statuses(state)

    def summary(self) -> str:
        """Every process's deaths, the newest of them in full."""
        lines = []
        for state in self.states.values():
            if state.deaths:
                shown = state.deaths[-SHOWN_DEATHS:]
                last = f", the last {len(shown)}" if len(shown) < len(state.deaths) else ""
                often = "once" if len(state.deaths) == 1 else f"{len(state.deaths)} times"
                lines += [f"  {state.name} died {often}{last}:", *(f"    {death}" for death in shown)]
        return "\n".join(lines)

    def _forget_statuses(self, state: RoleState) -> None:
        """So that nobody asks at the address of a dead process."""
        directory = self.run_dir.status(state.name).parent
        for path in [self.run_dir.status(state.name), *(directory.glob("trainer-*.json") if state.name == "trainer" else [])]:
            bury(path, self.run_dir.spans)

    def _wake(self, name: str) -> None:
        """A process that had come to its end is needed once more."""
        if (state := self.states.get(name)) and state.done:
            state.done, state.start_at = False, self.clock

    def _repair(self) -> None:
        """Stops those who read and write the damaged files, has these put away, and lets both start again."""
        from rl.launch.repair import repair

        for name in ("orchestrator", "trainer"):
            if not (state := self.states.get(name)):
                continue
            if state.child:
                self.children.end(state.child)
                state.child, state.died = None, self.clock
                self._forget_statuses(state)
                state.start_at = self.clock
            self._wake(name)
        lines = repair(self.run_dir, logged=self.config.sft is None)
        self.event("repair", "rl", lines=lines)
        for line in lines or ["repair found nothing damaged"]:
            self.say(f"  {line}")

    def _check_stall(self) -> None:
        """Warns when nothing moves, and of what everything waits for. It only warns: the deadlines of the waits act."""
        counters = {name: (status.progress, status.batch) for state in self.states.values() for name, status in state.statuses.items()}
        now, stall_s = (counters, self.num_lines), self.settings.stall_s
        if now != self.moved:
            self.moved, self.moved_at = now, self.clock
        elif self.clock - self.moved_at >= stall_s and not PREPARING.keys() & self.states.keys():
            from rl.diagnosis.waits import diagnose

            self.moved_at = self.clock
            found = diagnose(self.run_dir, self.config)
            self.event("stall", "rl", reason=found.bottleneck, seconds=stall_s)
            text = f"warning: no token, rollout, batch or step for {stall_s:g} s (supervisor.stall_s): {found.bottleneck}"
            self.say("\n".join([text, *(f"  {line}" for line in found.lines)]))


def is_useless(state: RoleState, code: int | None) -> bool:
    """Whether a server has ended with an error, and has not sampled one token in any attempt."""
    return state.name == "inference" and not state.ever_progressed and code is not None and code > 0 and code != DAMAGED


def last_phase(state: RoleState) -> dict[str, Any]:
    """What a process was doing, as fields of an event."""
    return {"phase": state.status.phase, "step": state.status.step, "doing": state.doing}
