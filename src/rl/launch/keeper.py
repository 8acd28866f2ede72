"""Keeps the processes of a run on this machine alive: starts them, kills silent ones, and starts
dead ones again.

    exit -> death -> start after a back-off;   no heartbeat -> kill -> death

A death affects only the process and its descendants; the others wait for it. What a death means for
the whole run is decided by the supervisor (launch/supervisor.py), which gets every death. Workers
of environments are restarted by the orchestrator (orchestrator/workers/pool.py), not here. The
keeper's clock only counts time in which `rl` could poll: if `rl` is stopped or the machine sleeps,
no process is late.
"""

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.config.run import RLConfig
from rl.launch.children import Children
from rl.launch.role_state import Attempt, Death, RoleState, failure, rank_code
from rl.launch.roles import PREPARING, Role
from rl.run_dir.events import Event, EventKind, append_event
from rl.run_dir.lease import check_fence
from rl.run_dir.logs import error_line, killed_rank, last_lines, last_words, trim_logs
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Staleness, archive_status, describe, read_status
from rl.system.children import Child, RestartPolicy
from rl.system.errors import DAMAGED, GIVE_UP, KILLED, RESTART, WRONG_SETTINGS, RunError
from rl.system.linux import pid_scope

LONGEST_POLL_S = 1.0
"""Seconds between polls count at most this much."""
SLOW_POLL_S = 2.0
"""Seconds between looks at the process table and at the sizes of logs, which cost more than the
rest."""
FIRST_SIGN_S = 300.0
"""A process without a status file after this time, and after inference.startup_timeout_s, is
restarted: its imports come before it."""
MAX_FAILED_STARTS = 2
"""The run ends after this many attempts of a role that ended before they came up, because the
same fault would end every other one. So it does for a server whose attempts end with an error
before they have sampled a token: its model, settings or device are at fault. A SIGKILL and the
loss of a machine come from outside and do not count."""
SHOWN_DEATHS = 5


class Keeper:
    """The processes of a run on this machine. Call `poll` several times a second; it raises
    RunError when one of them cannot go on."""

    def __init__(
        self,
        config: RLConfig,
        run_dir: RunDir,
        children: Children,
        say: Callable[[str], None],
        events: Path | None = None,
    ):
        """`events`: the file of its events, by default the run's."""
        self.settings, self.run_dir, self.children, self.say = (
            config.supervisor,
            run_dir,
            children,
            say,
        )
        self.events = events or run_dir.events
        self.startup_timeout_s = config.inference.startup_timeout_s
        self.states: dict[str, RoleState] = {}
        self.clock, self.polled, self.slow_at = 0.0, time.monotonic(), 0.0
        limits = self.settings.max_restarts, self.settings.window_s
        self.restarts = RestartPolicy(
            self.settings.backoff_s, self.settings.backoff_limit_s, *limits
        )

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of the previous ones."""
        self.states = {role.name: RoleState(role, start_at=self.clock) for role in roles}
        for state in self.states.values():
            if state.role.after_server:
                state.start_at += self.startup_timeout_s
            else:
                self._start(state)

    @property
    def finished(self) -> bool:
        """Whether everything has ended except inference, which never ends by itself."""
        return all(state.done for state in self.states.values() if not state.role.serves)

    def poll(self) -> list[Death]:
        """Checks every process, and kills or starts it if that is due. Returns those that have
        died."""
        now = time.monotonic()
        self.clock += min(now - self.polled, LONGEST_POLL_S)
        self.polled = now
        slow_s = self.clock - self.slow_at if self.clock - self.slow_at >= SLOW_POLL_S else 0.0
        deaths = []
        for state in self.states.values():
            if attempt := state.attempt:
                # before its statuses are read, whose last ones may be of the moment before
                ended = attempt.child.exit_code is not None
                self._read_statuses(state, attempt, all_ranks=bool(slow_s))
                if (
                    death := self._ended(state, attempt)
                    if ended
                    else self._watch(state, attempt, slow_s)
                ):
                    deaths.append(death)
            elif not state.done and self.clock >= state.start_at:
                self._start(state)
        if slow_s:
            self.slow_at = self.clock
            self.children.poll()
            if "orchestrator" in self.states:
                trim_logs(self.run_dir.logs.glob("worker-*.log"))
        return deaths

    def event(self, kind: EventKind, process: str, **fields: Any) -> None:
        """Appends to events.jsonl. Raises RunError if another process has taken over the run:
        what goes with the event must not happen."""
        with contextlib.suppress(OSError):  # as a full disk, a silent one must not end the run here
            check_fence(self.run_dir.lock("rl"))
        append_event(
            self.events, Event(time=round(time.time(), 3), event=kind, process=process, **fields)
        )

    # Starts ---------------------------------------------------------------------------------------

    def _start(self, state: RoleState) -> None:
        role = state.role
        # Not twice without progress: the fault may be in the state that a copy inherits.
        warm = (state.died is not None and state.streak <= 1) if role.leaves_copy else None
        try:
            if role.name == "trainer":
                self.run_dir.exit_code("trainer").unlink(missing_ok=True)
            child = self.children.start(
                role.name, role.command, role.env, self.run_dir.logs, role.cores, warm
            )
        except OSError as error:
            return self._not_started(state, error)
        state.attempt = Attempt(child, began=self.clock, staleness=Staleness(lambda: self.clock))
        if state.died is not None:
            self.event(
                "restart",
                state.name,
                attempt=child.attempt,
                seconds=round(self.clock - state.died, 1),
            )
        elif state.name not in PREPARING:
            self.event("start", state.name, attempt=child.attempt)
        return None

    def _not_started(self, state: RoleState, error: OSError) -> None:
        """Schedules a retry of a start that the system refused: a full process table or disk may
        pass. Raises RunError when the policy allows no more refusals and deaths."""
        reason = f"could not be started: {error.strerror or error}" + (
            f" ({error.filename})" if error.filename else ""
        )
        self.event("death", state.name, reason=reason)
        delay = self._schedule(state, progressed=False)
        if delay is None:
            self.event("give_up", state.name, reason=reason)
            raise RunError(
                f"{state.name} {reason}, {len(state.death_times)} times; make room for its "
                "files or processes, then go on"
            )
        self.say(f"warning: {state.name} {reason}; it is tried again in {delay:g} s")

    def _schedule(self, state: RoleState, progressed: bool) -> float | None:
        """Counts a death or a refused start, and schedules the next start. Returns its delay;
        None if there are to be no more."""
        state.streak = 0 if progressed else state.streak + 1
        state.death_times.append(self.clock)
        delay = self.restarts.delay_s(state.streak, state.death_times)
        state.start_at = self.clock + (delay or 0.0)
        return delay

    def wake(self, name: str) -> None:
        """Schedules another start of a process that had ended and is needed again."""
        if (state := self.states.get(name)) and state.done:
            state.done, state.start_at = False, self.clock

    # While they run -------------------------------------------------------------------------------

    def _read_statuses(self, state: RoleState, attempt: Attempt, all_ranks: bool) -> None:
        """Reads the statuses of its processes; those of further ranks only at every slow poll,
        because a cluster has hundreds."""
        names, others = [state.name], attempt.statuses
        if state.name == "trainer" and all_ranks:
            others = {}
            names += sorted(
                path.stem for path in self.run_dir.status(state.name).parent.glob("trainer-*.json")
            )
        found = {name: read_status(self.run_dir.status(name)) for name in names}
        attempt.has_status = found[state.name] is not None
        known = {name: status or attempt.statuses.get(name) for name, status in found.items()}
        attempt.statuses = others | {name: status for name, status in known.items() if status}
        attempt.progressed = attempt.progressed or any(
            status.progress for status in attempt.statuses.values()
        )
        state.progressed = state.progressed or attempt.progressed
        state.came_up = state.came_up or attempt.works()
        for warning in attempt.status.warnings[attempt.num_warnings :]:
            attempt.num_warnings += 1
            self.event(
                "warning", state.name, env=warning.env, about=warning.about, reason=warning.text
            )
            self.say(f"warning: {warning.text}")

    def _watch(self, state: RoleState, attempt: Attempt, slow_s: float) -> Death | None:
        """Notes that a process has come up; kills one that is silent or does not come up, and
        returns its death."""
        child = attempt.child
        if not attempt.ready and attempt.works():
            attempt.ready = True
            for other in self.states.values() if state.role.serves else ():
                if other.role.after_server and other.died is None:
                    other.start_at = self.clock
            seconds = round(self.clock - (attempt.began if state.died is None else state.died), 1)
            self.event("ready", state.name, attempt=child.attempt, seconds=seconds)
            if state.died is not None:
                self.say(
                    f"  {state.name} is back after {seconds:.1f} s ({describe(attempt.status)})"
                )
        if slow_s:
            # The orchestrator watches its own workers, and an environment may stop processes.
            stopped = self.children.stopped(child, whole_tree=state.name != "orchestrator")
            attempt.stopped, attempt.stopped_s = (
                stopped,
                attempt.stopped_s + slow_s if stopped else 0.0,
            )
        reason = self._silence(attempt) or self._late(state, attempt)
        if not reason:
            return None
        self.event("silent", state.name, attempt=child.attempt, reason=reason, **attempt.last_phase)
        if left := self.children.kill_tree(child):
            reason += (
                f"; {left} do not end, even after SIGKILL: stuck in the kernel, for example in a "
                "hung file system"
            )
        return self._died(state, attempt, reason)

    def _silence(self, attempt: Attempt) -> str:
        """Returns why to kill a process that was stopped, or whose heartbeat (or that of another
        rank) has not changed for too long."""
        limit = self.settings.silence_s
        if attempt.stopped_s >= limit:
            ours = [
                name
                for name, status in attempt.statuses.items()
                if status.pid in attempt.stopped and status.place == pid_scope()
            ]
            which = "".join(f" ({rank})" for name in ours if (rank := attempt.rank(name)))
            return (
                f"was stopped by a signal{which} for {attempt.stopped_s:.0f} s "
                f"(supervisor.silence_s = {limit:g}), and killed"
            )
        # Between two worlds of a cluster only the launcher has a status. A process that hangs at
        # its end has none: its last one is judged.
        judged = {
            name: status
            for name, status in attempt.statuses.items()
            if name != attempt.child.name or attempt.has_status
        }
        unchanged = [
            (attempt.staleness.look(name, status.heartbeat), name)
            for name, status in (judged or attempt.statuses).items()
        ]
        silent_s, name = max(unchanged, default=(0.0, ""))
        if silent_s < limit:
            return ""
        which = f" of {rank}" if (rank := attempt.rank(name)) else ""
        return (
            f"gave no heartbeat{which} for {silent_s:.0f} s (supervisor.silence_s = {limit:g}), "
            "and was killed"
        )

    def _late(self, state: RoleState, attempt: Attempt) -> str:
        """Returns why to kill a process that does not come up; empty while it has time. Raises
        RunError for a server that never came up."""
        age, limit = self.clock - attempt.began, self.startup_timeout_s
        if (
            not (state.name in PREPARING or state.role.serves)
            and not attempt.statuses
            and age > max(FIRST_SIGN_S, limit)
        ):
            return f"gave no sign of life in its first {age:.0f} s, and was killed"
        if not state.role.serves or attempt.ready or age <= limit:
            return ""
        late = (
            f"is not ready after inference.startup_timeout_s = {limit:g} s; it was doing: "
            f"{describe(attempt.status)}"
        )
        if not state.came_up:
            self.event("give_up", state.name, attempt=attempt.child.attempt, reason=late)
            raise failure(attempt.child, late)
        return late

    # Deaths ---------------------------------------------------------------------------------------

    def _ended(self, state: RoleState, attempt: Attempt) -> Death | None:
        """Handles the end of a process: a good end, or a death. Raises RunError for a fault that
        a restart does not fix."""
        child, code = attempt.child, attempt.child.exit_code
        if state.name == "trainer" and code and code > 0:
            code = self._trainer_code(child.log, code)
        self.children.kill_tree(child)
        if code == 0 and not state.role.serves:
            state.attempt, state.done = None, True
            return None
        if code in (WRONG_SETTINGS, GIVE_UP) or (state.name in PREPARING and code and code > 0):
            said = f", saying: {words}" if (words := last_words(child.log)) else ""
            self.event(
                "give_up",
                state.name,
                attempt=child.attempt,
                exit=code,
                reason=f"{child.ending()}{said}",
            )
            if state.name not in PREPARING:
                raise failure(child, child.ending())
            lines = last_lines(child.log)  # the last line says all
            raise RunError(
                f"{lines[-1] if lines else f'the {state.name}: ' + child.ending()}\n  the "
                f"whole log: {child.log}"
            )
        return self._died(state, attempt, child.ending() + killed_rank(child.log), code)

    def _trainer_code(self, log: Path, code: int) -> int:
        """Returns the exit code of the rank that failed first, as torchrun's agent always exits
        with 1. If it was ended from outside, the others fail because of that."""
        told = rank_code(self.run_dir)
        if told in (None, RESTART) and (code == KILLED or "SIGKILL" in killed_rank(log)):
            return KILLED
        return told or code

    def _died(
        self, state: RoleState, attempt: Attempt, reason: str, code: int | None = None
    ) -> Death:
        """Records a death and schedules the restart, unless the death is the last one."""
        child = attempt.child
        seconds, words = round(self.clock - attempt.began, 1), last_words(child.log)
        death = Death(
            child,
            time.time(),
            reason,
            code,
            attempt.doing,
            attempt.training_step,
            error_line(child.log),
        )
        state.deaths.append(death)
        more = {"seconds": seconds, "said": words[:500], **attempt.last_phase}
        self.event("death", state.name, attempt=child.attempt, exit=code, reason=reason, **more)
        self._forget_attempt(state)
        said = ""
        # A server that ends with an error in every attempt before it has sampled a token will not
        # do so in another one.
        useless = (
            state.role.serves
            and not state.progressed
            and code is not None
            and code > 0
            and code != DAMAGED
        )
        if useless or (not state.came_up and code not in (-signal.SIGKILL, KILLED, DAMAGED)):
            state.failed_starts += 1
            said = f", saying: {words.rstrip('.')}" if words else ""
        delay = self._schedule(state, attempt.progressed)
        if delay is None or state.failed_starts >= MAX_FAILED_STARTS:
            death.verdict = self._surrender(state, child, reason, said)
        else:
            death.again = (
                f"{death.doing}{said}; it starts again {f'in {delay:g} s' if delay else 'now'} "
                f"(log: {child.log})"
            )
        return death

    def _surrender(self, state: RoleState, child: Child, reason: str, said: str) -> RunError:
        """Returns the error after too many deaths: which process died how often, when and how."""
        most, window_s = self.settings.max_restarts, self.settings.window_s
        limit = (
            f"{most} restarts within {window_s:g} s are the limit (supervisor.max_restarts, "
            "window_s)"
        )
        if state.failed_starts >= MAX_FAILED_STARTS:
            never = "has not sampled one token" if state.came_up else "never came up"
            limit = f"{never}: attempt {child.attempt} {reason}, too{said}"
        self.event("give_up", state.name, attempt=child.attempt, reason=limit)
        if state.failed_starts >= MAX_FAILED_STARTS:
            return failure(child, limit)
        if not most:
            return failure(child, f"{reason}{said}")
        return RunError(
            f"{state.name} died once more: {limit}.\n{self.summary()}\n{failure(child, reason)}"
        )

    def summary(self) -> str:
        """Returns the deaths of every process, the newest of them in full."""
        lines = []
        for state in self.states.values():
            if state.deaths:
                shown = state.deaths[-SHOWN_DEATHS:]
                last = f", the last {len(shown)}" if len(shown) < len(state.deaths) else ""
                often = "once" if len(state.deaths) == 1 else f"{len(state.deaths)} times"
                lines += [
                    f"  {state.name} died {often}{last}:",
                    *(f"    {death}" for death in shown),
                ]
        return "\n".join(lines)

    # Planned ends ---------------------------------------------------------------------------------

    def end(self, name: str) -> None:
        """Ends a process if it runs; the next poll starts it again."""
        state = self.states.get(name)
        if state and state.attempt:
            self.children.end(state.attempt.child, state.role.stop_s)
            self._forget_attempt(state)
            state.start_at = self.clock

    def _forget_attempt(self, state: RoleState) -> None:
        state.attempt, state.died = None, self.clock
        self._archive_statuses(state)

    def _archive_statuses(self, state: RoleState) -> None:
        """Moves its statuses out of the way, so that nobody connects to the address of a dead
        process."""
        directory = self.run_dir.status(state.name).parent
        for path in [
            self.run_dir.status(state.name),
            *(directory.glob("trainer-*.json") if state.name == "trainer" else []),
        ]:
            archive_status(path, self.run_dir.spans)

    def archive_statuses(self) -> None:
        """Moves the statuses of processes that `rl` has ended out of the way, so that none looks
        alive."""
        for state in self.states.values():
            self._archive_statuses(state)
