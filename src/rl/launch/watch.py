"""Follows a run from its directory alone, from any machine that sees it: console, events and the
diagnosis of a stall. Only reads."""

import time
from collections.abc import Callable

from rl.config.run import RLConfig
from rl.diagnosis.state import SILENT_S, machine_changes, read_machines
from rl.diagnosis.waits import diagnose
from rl.launch.children import Children
from rl.launch.console import Console
from rl.run_dir.lease import LEASE_S, LockOwner, lease_path, newest_lease
from rl.run_dir.metrics import MetricsReader
from rl.run_dir.nodes import Nodes
from rl.run_dir.paths import RunDir
from rl.run_dir.spans import Event, EventsReader
from rl.run_dir.status import Staleness, read_json
from rl.system.children import Stopped

POLL_S = 0.5
LOOK_S = 2.0
"""Seconds between looks at the machines of a run."""
ASK_S = 30.0
"""Seconds between looks at the queue of a run that nobody leads."""
CODES = {"ended": 0, "stopped": 130, "died": 1}
"""Exit code by the state of a run that nobody leads."""
IsQueued = Callable[[], bool | None]


class Life:
    """Whether a run goes on. One on a cluster may come back, so it is waited for as long as that
    is possible."""

    def __init__(
        self,
        run_dir: RunDir,
        config: RLConfig,
        waits: bool = False,
        is_queued: IsQueued | None = None,
    ):
        """`waits`: whether a run that is over is about to be started again. `is_queued`: whether
        its engine has jobs of the run, queued or running; None if nobody can tell."""
        self.run_dir, self.config, self.cluster = run_dir, config, config.cluster
        self.waits, self.is_queued = waits, is_queued or (lambda: None)
        self.nodes, self.signs, self.ask_at = Nodes(run_dir), Staleness(), 0.0
        self.over_before = self.nodes.over() if config.cluster else None
        self.waiting = ""
        """What a run is waited for that has no machines now; else empty."""

    def is_led(self) -> bool:
        """Returns whether some process holds the role `rl`: by its process if that can be seen
        from here, else by its lease."""
        lock = self.run_dir.lock("rl")
        path = lease_path(lock, newest_lease(lock)) if lock.parent.is_dir() else lock
        owner = read_json(path, LockOwner)
        lives = owner.lives() if owner else False
        if lives is None:
            return self.signs.look("rl", (path.name, path.stat().st_mtime_ns)) < LEASE_S
        return lives

    def has_machines(self) -> bool:
        """Returns whether any machine gives signs of life, or somebody leads the run."""
        silent_s = [
            self.signs.look(f"machine {index}", machine.heartbeat)
            for index, machine in self.nodes.statuses().items()
        ]
        return min(silent_s, default=LEASE_S) < LEASE_S or self.is_led()

    def end(self) -> tuple[int, str] | None:
        """Returns exit code and last words of a run that is over; None while it goes on."""
        if self.cluster:
            over = self.nodes.over()
            if over and not (over == self.over_before and (self.is_led() or self.waits)):
                return over.exit_code, over.text or diagnose(self.run_dir, self.config).bottleneck
            why = self.abandoned()
            text = (
                f"{why}: {self.run_dir.logs} has what its machines said last; resume with: rl @ "
                f"{self.run_dir.config} --resume"
            )
            return (1, text) if why else None
        if self.is_led():
            return None
        diagnosis = diagnose(self.run_dir, self.config)
        if diagnosis.state == "live":  # its `rl` is about to exit
            return None
        return CODES[diagnosis.state], diagnosis.bottleneck

    def abandoned(self) -> str:
        """Returns why a run without machines does not come back; empty if it may: while its
        engine has jobs of it or had some ASK_S ago, as last words need a moment to arrive; where
        no engine tells that, for cluster.join_timeout_s after the last sign of life that this
        process has seen."""
        assert self.cluster is not None
        if self.has_machines():
            self.waiting = ""
        elif time.monotonic() >= self.ask_at:
            self.ask_at, queued = time.monotonic() + ASK_S, self.is_queued()
            absent = "no machine of the run is there: waiting for"
            limit_s = self.cluster.join_timeout_s
            limit = f"cluster.join_timeout_s = {limit_s:g} s"
            unchanged_s = 0.0 if queued is None else self.signs.look("queue", queued)
            if queued:
                self.waiting = f"{absent} its jobs, {self.nodes.jobs()}"
            elif queued is not None:
                gone = "the run has no jobs in the queue any more"
                return gone if unchanged_s >= ASK_S else ""
            elif self.last_sign_s() >= limit_s:
                return f"no machine has given a sign of life for {limit}"
            else:
                self.waiting = f"{absent} one up to {limit} after the last sign of life seen here"
        return ""

    def last_sign_s(self) -> float:
        """Returns the seconds for which this process has seen no machine write its status, and
        nobody prepare the run. Times of files are only compared with each other: the disk's
        clock may be another one."""
        paths = [path for path in (self.nodes.folder, self.run_dir.config) if path.exists()]
        return self.signs.look("files", [path.stat().st_mtime_ns for path in paths])


class Watch:
    """What a reader sees of a run."""

    def __init__(self, run_dir: RunDir, config: RLConfig, life: Life):
        self.run_dir, self.config, self.life = run_dir, config, life
        self.console = Console(config, run_dir)
        self.metrics, self.events = MetricsReader(run_dir.metrics), EventsReader(run_dir.events)
        self.moves, self.heartbeats = Staleness(), Staleness()
        self.num_events, self.settled_at = 0, time.monotonic() + SILENT_S
        self.machines: dict[int, str] = {}
        """What was said last of each machine."""
        self.waiting = ""
        """What the run was last said to be waited for."""

    def show(self) -> None:
        lines, events = self.metrics.new(), self.events.new()
        self.num_events += len(events)
        self.console.update(lines)
        for event in events:
            if text := event_text(event):
                self.console.say(text)
        quiet_s = self.moves.look(
            "moves", (self.metrics.offset, self.num_events, self.life.waiting)
        )
        if quiet_s >= self.config.supervisor.stall_s and not self.life.waiting:
            self.moves = Staleness()
            self.console.say(
                f"nothing new for {quiet_s:.0f} s: {diagnose(self.run_dir, self.config).bottleneck}"
            )

    def look(self) -> tuple[int, str] | None:
        """Shows what became of the machines. Returns exit code and last words of a run that is
        over; None while it goes on."""
        machines = read_machines(self.run_dir, self.config, self.heartbeats, time.time())
        # then clocks that differ are known
        if time.monotonic() >= self.settled_at:
            for text in machine_changes(self.machines, machines):
                self.console.say(text)
        end = self.life.end()
        if self.life.waiting and self.life.waiting != self.waiting:
            self.console.say(self.life.waiting)
        self.waiting = self.life.waiting
        return end


def watch(
    run_dir: RunDir,
    config: RLConfig,
    children: Children | None = None,
    waits: bool = False,
    is_queued: IsQueued | None = None,
) -> int:
    """Follows a run until it is over, and returns its exit code. Ctrl-C ends only this: then it
    returns 0.

    `children` has the handler of signals; None in a thread, which gets none. `waits` and
    `is_queued`: see Life.
    """
    seen = Watch(run_dir, config, Life(run_dir, config, waits, is_queued))
    try:
        return follow(seen)
    except Stopped:
        if children:
            children.stop_caught()
        seen.console.close()
        print(
            f"detached; the run goes on. `rl watch {run_dir.root}` shows it again, `rl stop "
            f"{run_dir.root}` ends it",
            flush=True,
        )
        return 0
    finally:
        seen.console.close()


def follow(seen: Watch) -> int:
    """Shows what is new until the run is over. Returns its exit code."""
    seen.events.skip()
    seen.metrics.skip()
    seen.console.introduce()
    look_at = 0.0
    while True:
        seen.show()
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_S
            if end := seen.look():
                code, text = end
                seen.show()
                if text:
                    seen.console.say(text)
                return code
        time.sleep(POLL_S)


TEXTS = {
    "ready": "  {0.process} is up after {0.seconds:g} s",
    "silent": "  {0.process} {0.reason}",
    "warning": "warning: {0.reason}",
    "stall": "warning: nothing moves: {0.reason}",
    "quarantine": "warning: batch {0.step} is quarantined: {0.file}",
    "give_up": "  {0.process} is given up: {0.reason}",
    "stop": "stopped by {0.reason}",
    "end": "{0.reason}",
}


def event_text(event: Event) -> str:
    """Describes an event for people; empty for those that the console shows in other ways."""
    if event.event == "start":
        return "rl has started" if event.process == "rl" else ""
    if event.event == "death":
        quote = f", saying: {event.said}" if event.said else ""
        return f"  {event.process} {event.reason}, {event.doing or 'not started'}{quote}"
    if event.event == "repair":
        return "\n".join(f"  repaired: {text}" for text in event.lines)
    if event.event == "ready" and event.seconds is None:
        return ""
    return TEXTS.get(event.event, "").format(event)
