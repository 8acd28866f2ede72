"""Keeps the processes of a run on this machine alive: starts them, kills silent ones, and starts
dead ones again.

    exit -> death -> start after a back-off;   no heartbeat -> kill -> death

A death affects only the process and its descendants; the others wait for it. What a death means for
the whole run is decided by the supervisor (launch/supervisor.py), but that a process has given up
or keeps dying. Workers of environments are restarted by the orchestrator
(orchestrator/workers/pool.py), not here. The keeper's clock only counts time in which `rl` could
poll: if `rl` is stopped or the machine sleeps, no process is late.
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
from rl.run_dir.lease import check_fence
from rl.run_dir.logs import error_line, killed_rank, last_lines, last_words, trim_logs
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import Event, EventKind, append_event
from rl.run_dir.status import Staleness, archive_status, describe, read_status
from rl.system.children import Child, RestartPolicy
from rl.system.errors import DAMAGED, GIVE_UP, KILLED, RESTART, WRONG_SETTINGS, RunError
from rl.system.linux import pid_scope

LONGEST_POLL_S = 1.0
"""Seconds between polls count at most this much."""
SLOW_POLL_S = 2.0
"""Seconds between checks of the process table and of the sizes of logs, which are slow."""
FIRST_SIGN_S = 300.0
"""A process without a status file after this time, and after inference.startup_timeout_s, is
restarted: its imports come before it."""
MAX_FAILED_STARTS = 2
"""The run ends after this many attempts of a role that fail before they come up: the next would
fail too. A server's attempt also counts if it ends with an error before it has sampled a token: its
model, settings or device are at fault. A SIGKILL and the loss of a machine do not count."""
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
        self.settings, self.run_dir = config.supervisor, run_dir
        self.children, self.say, self.events = children, say, events or run_dir.events
        self.startup_timeout_s = config.inference.startup_timeout_s
        self.states: dict[str, RoleState] = {}
        self.clock, self.polled, self.slow_at = 0.0, time.monotonic(), 0.0
        settings = self.settings
        self.restarts = RestartPolicy(
            settings.backoff_s, settings.backoff_limit_s, settings.max_restarts, settings.window_s
        )

    def begin(self, roles: list[Role]) -> None:
        """Starts these processes, in place of the previous ones."""
        self.states = {role.name: RoleState(role, start_at=self.clock) for role in roles}
        for state in self.states.values():
            if not self._waits_for_server(state):
                with contextlib.suppress(OSError):  # if the system refuses it, `poll` tries again
                    self._start(state)

    def _waits_for_server(self, state: RoleState) -> bool:
        """Whether a role may not start, at first or again, because a server is not up. The
        server's own deadlines end this wait."""
        return state.role.after_server and any(
            server.role.serves and not (server.attempt and server.attempt.ready)
            for server in self.states.values()
        )

    @property
    def finished(self) -> bool:
        """Whether everything has ended except inference, which never ends by itself."""
        return all(state.done for state in self.states.values() if not state.role.serves)

    def poll(self) -> list[Death]:
        """Checks every process, and kills or starts it if that is due. Returns those that have
        died. Raises OSError if the system refuses a start, which the next call tries again."""
        now = time.monotonic()
        self.clock += min(now - self.polled, LONGEST_POLL_S)
        self.polled = now
        slow_s = self.clock - self.slow_at if self.clock - self.slow_at >= SLOW_POLL_S else 0.0
        refused, deaths = None, list[Death | None]()
        for state in self.states.values():
            due = self.clock >= state.start_at and not self._waits_for_server(state)
            if due and not (state.attempt or state.done):
                try:
                    self._start(state)
                except OSError as error:  # the others are watched all the same
                    refused = error
        for state in self.states.values():
            if attempt := state.attempt:
                # before its statuses are read, whose last ones may be of the moment before
                ended = attempt.child.exit_code is not None
                self._read_statuses(state, attempt, all_ranks=bool(slow_s))
                if ended:
                    deaths.append(self._handle_exit(state, attempt))
                else:
                    deaths.append(self._kill_if_silent(state, attempt, slow_s))
        if slow_s:
            self.slow_at = self.clock
            self.children.poll()
            if "orchestrator" in self.states:
                trim_logs(self.run_dir.logs.glob("worker-*.log"))
        known = [death for death in deaths if death]
        if refused and not known:
            raise refused
        return known

    def event(self, kind: EventKind, process: str, **fields: Any) -> None:
        """Appends to events.jsonl. Raises RunError if another process has taken over the run:
        what goes with the event must not happen."""
        with contextlib.suppress(OSError):  # neither a full nor a hanging disk may end the run
            check_fence(self.run_dir.lock("rl"))
        append_event(
            self.events, Event(time=round(time.time(), 3), event=kind, process=process, **fields)
        )

    # Starts ---------------------------------------------------------------------------------------

    def _start(self, state: RoleState) -> None:
        role = state.role
        # Not twice without progress: the fault may be in the state that a copy inherits.
        warm = (state.died is not None and state.streak <= 1) if role.leaves_copy else None
        if role.name == "trainer":
            self.run_dir.exit_code("trainer").unlink(missing_ok=True)
        child = self.children.start(
            role.name, role.command, role.env, self.run_dir.logs, role.cores, warm
        )
        state.attempt = Attempt(child, began=self.clock, staleness=Staleness(lambda: self.clock))
        if state.died is not None:
            seconds = round(self.clock - state.died, 1)
            self.event("restart", state.name, attempt=child.attempt, seconds=seconds)
        elif state.name not in PREPARING:
            self.event("start", state.name, attempt=child.attempt)

    def wake(self, name: str) -> None:
        """Schedules another start of a process that had ended and is needed again."""
        if (state := self.states.get(name)) and state.done:
            state.done, state.start_at = False, self.clock

    # While they run -------------------------------------------------------------------------------

    def _read_statuses(self, state: RoleState, attempt: Attempt, all_ranks: bool) -> None:
        """Reads the statuses of its processes; those of further ranks only at every slow poll,
        because a cluster has hundreds."""
        names, known = [state.name], attempt.statuses
        if state.name == "trainer" and all_ranks:
            names += sorted(path.stem for path in self.run_dir.status_dir.glob("trainer-*.json"))
            known = {name: known[name] for name in names if name in known}
        read = {name: read_status(self.run_dir.status(name)) for name in names}
        attempt.has_status = read[state.name] is not None
        attempt.statuses = known | {name: status for name, status in read.items() if status}
        progress = any(status.progress for status in attempt.statuses.values())
        attempt.progressed = attempt.progressed or progress
        state.progressed = state.progressed or attempt.progressed
        state.came_up = state.came_up or attempt.has_come_up()
        for warning in attempt.status.warnings[attempt.num_warnings :]:
            attempt.num_warnings += 1
            about = {"env": warning.env, "about": warning.about, "reason": warning.text}
            self.event("warning", state.name, **about)
            self.say(f"warning: {warning.text}")

    def _kill_if_silent(self, state: RoleState, attempt: Attempt, slow_s: float) -> Death | None:
        """Notes that a process has come up; kills one that is silent or does not come up, and
        returns its death."""
        child = attempt.child
        if not attempt.ready and attempt.has_come_up():
            attempt.ready = True
            seconds = round(self.clock - (attempt.began if state.died is None else state.died), 1)
            about = {"seconds": seconds, "prefill_tokens": attempt.status.prefill_tokens}
            self.event("ready", state.name, attempt=child.attempt, **about)
            if state.died is not None:
                doing = describe(attempt.status)
                self.say(f"  {state.name} is back after {seconds:.1f} s ({doing})")
        if slow_s:
            # The orchestrator watches its own workers, and an environment may stop processes.
            attempt.stopped = self.children.stopped(child, state.name != "orchestrator")
            attempt.stopped_s = attempt.stopped_s + slow_s if attempt.stopped else 0.0
        reason = self._silence(attempt) or self._late(state, attempt)
        if not reason:
            return None
        self.event("silent", state.name, attempt=child.attempt, reason=reason, **attempt.last_phase)
        if left := self.children.kill_tree(child):
            reason += (
                f"; {left} do not end, even after SIGKILL: stuck in the kernel, for example in a "
                "hung file system"
            )
        return self._record_death(state, attempt, reason)

    def _silence(self, attempt: Attempt) -> str:
        """Returns why to kill a process that was stopped, or whose heartbeat (or that of another
        rank) has not changed for too long."""
        limit, statuses = self.settings.silence_s, attempt.statuses
        because = f"(supervisor.silence_s = {limit:g})"
        if attempt.stopped_s >= limit:
            ranks = [
                attempt.rank(name)
                for name, status in statuses.items()
                if status.pid in attempt.stopped and status.place == pid_scope()
            ]
            which = "".join(f" ({rank})" for rank in ranks if rank)
            seconds = f"{attempt.stopped_s:.0f} s"
            return f"was stopped by a signal{which} for {seconds} {because}, and killed"
        # While a cluster changes machines, only the launcher has a status. A process that hangs at
        # its end has none: its last one is judged.
        others = {name: statuses[name] for name in statuses if name != attempt.child.name}
        judged = statuses if attempt.has_status else others or statuses
        silent_s, name = max(
            (
                (attempt.staleness.look(name, status.heartbeat), name)
                for name, status in judged.items()
            ),
            default=(0.0, ""),
        )
        if silent_s < limit:
            return ""
        rank = attempt.rank(name)
        which = f" of {rank}" if rank else ""
        return f"gave no heartbeat{which} for {silent_s:.0f} s {because}, and was killed"

    def _late(self, state: RoleState, attempt: Attempt) -> str:
        """Returns why to kill a process that does not come up; empty while it has time. Raises
        RunError for a server that never came up."""
        age, limit = self.clock - attempt.began, self.startup_timeout_s
        if not state.role.serves:
            is_mute = state.name not in PREPARING and not attempt.statuses
            if is_mute and age > max(FIRST_SIGN_S, limit):
                return f"gave no sign of life in its first {age:.0f} s, and was killed"
            return ""
        if attempt.ready or age <= limit:
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

    def _handle_exit(self, state: RoleState, attempt: Attempt) -> Death | None:
        """Handles the end of a process: a good end, or a death. Raises RunError for a fault that
        a restart does not fix."""
        child, code = attempt.child, attempt.child.exit_code
        prepares = state.name in PREPARING
        if state.name == "trainer" and code and code > 0:
            code = self._trainer_code(child.log, code)
        self.children.kill_tree(child)
        if code == 0 and not state.role.serves:
            state.attempt, state.done = None, True
            return None
        ending = child.ending()
        if code in (WRONG_SETTINGS, GIVE_UP) or (prepares and code and code > 0):
            reason = ending + saying(last_words(child.log))
            self.event("give_up", state.name, attempt=child.attempt, exit=code, reason=reason)
            if not prepares:
                raise failure(child, ending)
            lines = last_lines(child.log) or [f"the {state.name}: {ending}"]
            # the last line says all
            raise RunError(f"{lines[-1]}\n  the whole log: {child.log}")
        return self._record_death(state, attempt, ending + killed_rank(child.log), code)

    def _trainer_code(self, log: Path, code: int) -> int:
        """Returns the exit code of the rank that failed first, because torchrun's agent always
        exits with 1. Returns KILLED if SIGKILL ended a rank: the others then failed as a result."""
        told = rank_code(self.run_dir)
        if told in (None, RESTART) and (code == KILLED or "SIGKILL" in killed_rank(log)):
            return KILLED
        return told or code

    def _record_death(
        self, state: RoleState, attempt: Attempt, reason: str, code: int | None = None
    ) -> Death:
        """Records a death and schedules the restart, unless the death is the last one."""
        child, doing = attempt.child, attempt.doing
        words, error = last_words(child.log), error_line(child.log)
        death = Death(child, time.time(), reason, code, doing, attempt.training_step, error)
        state.deaths.append(death)
        self.event(
            "death",
            state.name,
            attempt=child.attempt,
            exit=code,
            reason=reason,
            seconds=round(self.clock - attempt.began, 1),
            said=words[:500],
            **attempt.last_phase,
        )
        self._forget_attempt(state)
        # A server that ends with an error in every attempt before it has sampled a token will not
        # do so in another one.
        is_error = code is not None and code > 0 and code != DAMAGED
        useless = state.role.serves and not state.progressed and is_error
        quote = ""
        if useless or (not state.came_up and code not in (-signal.SIGKILL, KILLED, DAMAGED)):
            state.failed_starts += 1
            quote = saying(words.rstrip("."))
        state.streak = 0 if attempt.progressed else state.streak + 1
        state.death_times.append(self.clock)
        delay = self.restarts.delay_s(state.streak, state.death_times)
        state.start_at = self.clock + (delay or 0.0)
        if delay is None or state.failed_starts >= MAX_FAILED_STARTS:
            death.verdict = self._surrender(state, child, reason, quote)
        else:
            when = f"in {delay:g} s" if delay else "now"
            death.again = f"{doing}{quote}; it starts again {when} (log: {child.log})"
        return death

    def _surrender(self, state: RoleState, child: Child, reason: str, quote: str) -> RunError:
        """Returns the error after too many deaths: which process died how often, when and how."""
        most, window_s = self.settings.max_restarts, self.settings.window_s
        limit = (
            f"{most} restarts within {window_s:g} s are the limit (supervisor.max_restarts, "
            "window_s)"
        )
        never_worked = state.failed_starts >= MAX_FAILED_STARTS
        if never_worked:
            never = "has not sampled one token" if state.came_up else "never came up"
            limit = f"{never}: attempt {child.attempt} {reason}, too{quote}"
        self.event("give_up", state.name, attempt=child.attempt, reason=limit)
        if never_worked or not most:
            return failure(child, limit if never_worked else f"{reason}{quote}")
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
        ranks = self.run_dir.status_dir.glob("trainer-*.json") if state.name == "trainer" else ()
        for path in [self.run_dir.status(state.name), *ranks]:
            archive_status(path, self.run_dir.spans)

    def archive_statuses(self) -> None:
        """Moves the statuses of processes that `rl` has ended out of the way, so that none looks
        alive."""
        for state in self.states.values():
            self._archive_statuses(state)


def saying(words: str) -> str:
    return f", saying: {words}" if words else ""
