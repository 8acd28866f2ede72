"""Keeps the processes of a run alive: starts a dead one again, kills a silent one, and knows when to give up.

    exit -> death -> (quarantine, repair) -> start after a back-off;   no heartbeat -> kill -> death;   no progress -> a diagnosis

A death costs the process itself and what it had started; the others wait for it. Everything that befalls them is a line in
`events.jsonl`: {"time", "event", "process", "attempt", "exit", "reason", "seconds", ...} with `event` one of start, death, restart,
ready, silent, stall, quarantine, repair, give_up. What counts here is the time in which `rl` itself could look: a stopped `rl` or a
machine that slept makes nobody late.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from rl.config import RLConfig
from rl.lives import Death, Life, Poison, Role, failure
from rl.prepare import RunError
from rl.processes import DAMAGED, GIVE_UP, Child, Children, last_lines
from rl.run_dir import RunDir
from rl.status import read_status

LONGEST_LOOK_S = 1.0
"""A look that comes later counts as one after so long."""
DEEP_LOOK_S = 2.0
"""Between looks at what is cheap, but not that cheap: the process table, the newest batch."""
FIRST_SIGN_S = 300.0
"""A process that has no status file by then, and by inference.startup_timeout_s, is started again: its imports come before it."""
MAX_QUARANTINED = 3
"""So many batches in a row that kill the trainer: it is not the batches."""
SHOWN_DEATHS = 5
WRONG_SETTINGS = 2


class Supervisor:
    """The processes of a run. `look` does all: it is called several times a second, and raises RunError when the run cannot go on."""

    def __init__(self, config: RLConfig, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.config, self.settings, self.run_dir, self.children, self.say = config, config.supervisor, run_dir, children, say
        self.lives: dict[str, Life] = {}
        self.clock, self.looked, self.deep_at = 0.0, time.monotonic(), 0.0
        self.poison = Poison(run_dir, config.supervisor.quarantine_after)
        self.stall = Stall(self)
        self.event("start", "rl", pid=os.getpid())

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of those before."""
        self.lives = {role.name: Life(role, start_at=self.clock) for role in roles}
        self.stall.since = self.clock
        for life in self.lives.values():
            self._start(life)

    @property
    def finished(self) -> bool:
        """A server has no end of its own; everything else has come to its."""
        return all(life.done for life in self.lives.values() if life.name != "inference")

    def look(self, lines: list[dict[str, Any]] | None = None) -> None:
        """One look at everything; `lines` are new in metrics.jsonl."""
        now = time.monotonic()
        gap, self.looked = min(now - self.looked, LONGEST_LOOK_S), now
        self.clock += gap
        self._take_in(lines or [])
        deep_s = self.clock - self.deep_at if self.clock - self.deep_at >= DEEP_LOOK_S else 0.0
        for life in list(self.lives.values()):
            if life.child and life.child.exit_code is not None:
                self._ended(life, life.child)
            elif life.child:
                self._watch(life, life.child, gap, deep_s)
            elif not life.done and self.clock >= life.start_at:
                self._start(life)
        if deep_s:
            self.deep_at = self.clock
            self.children.look()
            self.stall.look()

    def event(self, event: str, process: str, **more: Any) -> None:
        """Appends to events.jsonl. An account for others: a full disk must not end the run through it."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, "process": process, **more}, default=str)
        with contextlib.suppress(OSError):
            fd = os.open(self.run_dir.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, line.encode() + b"\n")
            finally:
                os.close(fd)

    # Starts -------------------------------------------------------------------------------------------------------------

    def _start(self, life: Life) -> None:
        role = life.role
        if role.name == "trainer":
            self.run_dir.exit_code("trainer").unlink(missing_ok=True)
        # Only after an attempt that came up, and not twice without progress: what a copy has inherited must not hold the run up.
        warm = (life.died is not None and life.streak <= (1 if life.ready else 0)) if role.leaves_copy else None
        life.child = self.children.start(role.name, role.command, role.env, self.run_dir.logs, role.cores, warm)
        life.began, life.ready, life.progressed, life.stopped_s = self.clock, False, False, 0.0
        life.statuses, life.silent_s = {}, {}
        if life.died is not None:
            self.event("restart", life.name, attempt=life.child.attempt, seconds=round(self.clock - life.died, 1))

    def _take_in(self, lines: list[dict[str, Any]]) -> None:
        """What the processes have got done since the last look."""
        for line in lines:
            if life := self.lives.get("orchestrator" if line["source"] == "eval" else line["source"]):
                life.progressed = True
        self.poison.note_steps([line for line in lines if line["source"] == "trainer"])
        self.stall.num_lines += len(lines)

    def _read_statuses(self, life: Life, gap: float) -> None:
        """Reads its heartbeats, and counts for how long each has been the same."""
        names = [life.name]
        if life.name == "trainer":
            names += sorted(path.stem for path in self.run_dir.status(life.name).parent.glob("trainer-*.json"))
        before, life.statuses = life.statuses, {}
        for name in names:
            if status := read_status(self.run_dir.status(name)) or before.get(name):
                same = name in before and status.get("heartbeat") == before[name].get("heartbeat")
                life.statuses[name] = status
                life.silent_s[name] = life.silent_s.get(name, 0.0) + gap if same else 0.0
        life.progressed = life.progressed or any(status.get("progress") for status in life.statuses.values())

    def _watch(self, life: Life, child: Child, gap: float, deep_s: float) -> None:
        """Kills a process that is silent, or that does not come up."""
        self._read_statuses(life, gap)
        if not life.ready and life.is_up():
            life.ready = life.was_ready = True
            seconds = round(self.clock - (life.began if life.died is None else life.died), 1)
            self.event("ready", life.name, attempt=child.attempt, seconds=seconds)
            if life.died is not None:
                self.say(f"  {life.name} is back after {seconds:.1f} s ({life.doing})")
        if deep_s:
            # An orchestrator's workers are its own to watch, and an environment may stop what it likes.
            stopped = self.children.stopped(child, whole_tree=life.name != "orchestrator")
            life.stopped_s = life.stopped_s + deep_s if stopped else 0.0
        if reason := self._silence(life) or self._late(life, child):
            self.event("silent", life.name, attempt=child.attempt, reason=reason, doing=life.doing)
            if left := self.children.bury(child):
                reason += f"; {left} do not end, not even by SIGKILL: stuck in the kernel, as by a file system that hangs"
            self._died(life, child, reason)

    def _silence(self, life: Life) -> str:
        limit = self.settings.silence_s
        if life.stopped_s >= limit:
            return f"was stopped by a signal for {life.stopped_s:.0f} s (supervisor.silence_s = {limit:g}), and killed"
        name, silent_s = max(life.silent_s.items(), key=lambda item: item[1], default=("", 0.0))
        if silent_s < limit:
            return ""
        who = "" if name == life.name else f" of {name.replace('-', ' rank ')}"
        return f"gave no heartbeat{who} for {silent_s:.0f} s (supervisor.silence_s = {limit:g}), and was killed"

    def _late(self, life: Life, child: Child) -> str:
        """What is said of a process that does not come up; it ends the run where that is for want of patience with a slow start."""
        age = self.clock - life.began
        limit = self.config.inference.startup_timeout_s
        if life.name not in ("model", "inference") and not life.statuses and age > max(FIRST_SIGN_S, limit):
            return f"gave no sign of life in its first {age:.0f} s, and was killed"
        if life.name != "inference" or life.ready or age <= limit:
            return ""
        doing = life.status.get("doing", "nothing that it told")
        late = f"is not ready after inference.startup_timeout_s = {limit:g} s; it was doing: {doing}"
        if not life.was_ready:
            self.event("give_up", life.name, attempt=child.attempt, reason=late)
            raise failure(child, late)
        return late

    # Deaths -------------------------------------------------------------------------------------------------------------

    def _ended(self, life: Life, child: Child) -> None:
        """A good end, a diagnosis that ends the run, or a death."""
        self._read_statuses(life, 0.0)
        code = child.exit_code
        if life.name == "trainer" and code and code > 0:
            code = self._told_code() or code
        self.children.bury(child)
        if code == 0 and life.name != "inference":
            life.child, life.done = None, True
        elif code in (WRONG_SETTINGS, GIVE_UP) or (life.name == "model" and code and code > 0):
            self.event("give_up", life.name, attempt=child.attempt, exit=code, reason=child.ending())
            raise self._verdict(life, child)
        else:
            self._died(life, child, child.ending(), code)

    def _told_code(self) -> int | None:
        """What a rank said it ends with: torchrun's agent ends with 1 whatever that was."""
        with contextlib.suppress(OSError, ValueError):
            return int(self.run_dir.exit_code("trainer").read_text())
        return None

    def _verdict(self, life: Life, child: Child) -> RunError:
        if life.name != "model":
            return failure(child, child.ending())
        said = last_lines(child.log)  # one line about the model or the data, and all that there is to say
        return RunError(f"{said[-1] if said else 'the model: ' + child.ending()}\n  the whole log: {child.log}")

    def _died(self, life: Life, child: Child, reason: str, code: int | None = None) -> None:
        """Records a death, and sets when the process is started again. Raises RunError where that is never."""
        seconds = round(self.clock - life.began, 1)
        life.deaths.append(Death(time.time(), child.attempt, reason, life.doing))
        last = next((line for line in reversed(last_lines(child.log)) if line.strip()), "")
        more = {"seconds": seconds, "doing": life.doing, "step": life.status.get("step"), "said": last[:500]}
        self.event("death", life.name, attempt=child.attempt, exit=code, reason=reason, **more)
        life.child, life.died = None, self.clock
        life.streak = 0 if life.progressed else life.streak + 1
        self._forget_statuses(life)
        life.recent.append(self.clock)
        while self.clock - life.recent[0] > self.settings.window_s:
            life.recent.popleft()
        if len(life.recent) > self.settings.max_restarts:
            raise self._surrender(life, child, reason)
        delay = min(self.settings.backoff_limit_s, self.settings.backoff_s * 2 ** max(0, life.streak - 1))
        life.start_at = self.clock + delay
        self.say(f"  {life.name} {reason}, {life.doing}; it starts again in {delay:g} s (log: {child.log})")
        if life.name == "trainer":
            self._wake("orchestrator")  # for the batches that are trained again, and the versions that are published again
            self._quarantine(life.deaths[-1])
        if code == DAMAGED:
            self._repair()

    def _quarantine(self, death: Death) -> None:
        """Says so when that death was one too many of the same batch. Raises RunError when it cannot be the batches."""
        if not (path := self.poison.note_death(death)):
            return
        step, often, settings = self.poison.step, self.settings.quarantine_after, "supervisor.quarantine_after"
        self.event("quarantine", "trainer", step=step, file=str(path), reason=death.reason, deaths=often)
        self.say(
            f"warning: the trainer died {often} times in a row ({settings}) in step {step}: its batch {self.run_dir.batch(step)} is "
            f"quarantined, and version {step} will equal version {step - 1}; {path} says more"
        )
        if len(self.poison.in_a_row) >= MAX_QUARANTINED:
            reason = (
                f"batches {', '.join(map(str, self.poison.in_a_row))} were quarantined with no good step between: the fault is elsewhere"
            )
            self.event("give_up", "trainer", reason=reason)
            raise RunError(f"{reason}.\n{self.summary()}\n  the logs: {self.run_dir.logs}")

    def _surrender(self, life: Life, child: Child, reason: str) -> RunError:
        """The end after too many deaths: who died how often, when, how."""
        most, window_s = self.settings.max_restarts, self.settings.window_s
        limit = f"{most} restarts within {window_s:g} s are the limit (supervisor.max_restarts, window_s)"
        self.event("give_up", life.name, attempt=child.attempt, reason=limit)
        if not most:
            return failure(child, reason)
        return RunError(f"{life.name} died once more: {limit}.\n{self.summary()}\n{failure(child, reason)}")

    def summary(self) -> str:
        """Every process's deaths, the newest of them in full."""
        lines = []
        for life in self.lives.values():
            if life.deaths:
                shown = life.deaths[-SHOWN_DEATHS:]
                last = f", the last {len(shown)}" if len(shown) < len(life.deaths) else ""
                often = "once" if len(life.deaths) == 1 else f"{len(life.deaths)} times"
                lines += [f"  {life.name} died {often}{last}:", *(f"    {death}" for death in shown)]
        return "\n".join(lines)

    def _forget_statuses(self, life: Life) -> None:
        """So that nobody asks at the address of a dead process."""
        directory = self.run_dir.status(life.name).parent
        for path in [self.run_dir.status(life.name), *(directory.glob("trainer-*.json") if life.name == "trainer" else [])]:
            path.unlink(missing_ok=True)

    def _wake(self, name: str) -> None:
        """A process that had come to its end is needed once more."""
        if (life := self.lives.get(name)) and life.done:
            life.done, life.start_at = False, self.clock

    def _repair(self) -> None:
        """Stops those who read and write the damaged files, has these put away, and lets both start again."""
        from rl.repair import repair

        for name in ("orchestrator", "trainer"):
            if not (life := self.lives.get(name)):
                continue
            if life.child:
                self.children.end(life.child)
                life.child, life.died = None, self.clock
                self._forget_statuses(life)
                life.start_at = self.clock
            self._wake(name)
        lines = repair(self.run_dir, logged=self.config.sft is None)
        self.event("repair", "rl", lines=lines)
        for line in lines or ["repair found nothing damaged"]:
            self.say(f"  {line}")


class Stall:
    """Says so when nothing moves, and what everything waits for. It only tells: the deadlines of the waits act."""

    def __init__(self, supervisor: Supervisor):
        self.supervisor = supervisor
        self.since, self.num_lines = 0.0, 0
        self.seen: object = None

    def look(self) -> None:
        supervisor = self.supervisor
        counters = sorted((name, s.get("progress")) for life in supervisor.lives.values() for name, s in life.statuses.items())
        now = (counters, supervisor.run_dir.newest_batch(), self.num_lines)
        stall_s = supervisor.settings.stall_s
        if now != self.seen:
            self.seen, self.since = now, supervisor.clock
        elif supervisor.clock - self.since >= stall_s and "model" not in supervisor.lives:
            from rl.diagnosis import diagnose

            self.since = supervisor.clock
            found = diagnose(supervisor.run_dir, supervisor.config)
            supervisor.event("stall", "rl", reason=found.bottleneck, seconds=stall_s)
            text = f"warning: no token, rollout, batch or step for {stall_s:g} s (supervisor.stall_s): {found.bottleneck}"
            supervisor.say("\n".join([text, *(f"  {line}" for line in found.lines)]))
