"""A real run under a kill schedule, and then the promise checked.

    uv run -m tests.proofs.chaos @ CONFIG [rl's flags] --kills 20 --every 60 --seed 7 --targets trainer,engine --signals KILL,STOP,SEGV

The kills fall at random times and on random processes, by the seed. A dead `rl` is started again
with --resume, all else is its to bring back; but a further inference server (`server`, of
`--servers N`), which is started again as by hand. With the targets host-train and host-serve the
run is started by hand on two hosts, which die as a whole (chaos_hosts.py); with machine-0,
machine-1, ... and [cluster] it is a run on a cluster, whose machines die as a whole and are
replaced. At the end: exactly once, equal to `rl replay` bit for bit, no orphan,
nothing left behind, lag bounds; and a table. Exit code 1 if any of it is broken.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from rl.run_dir.metrics import MetricsReader
from rl.run_dir.paths import numbered
from tests.proofs import promises
from tests.proofs.chaos_hosts import HOSTS, HostRun, MachinesRun
from tests.proofs.chaos_run import UP_S, EndedError, Run

TARGETS = (
    "trainer",
    "rank",
    "orchestrator",
    "worker",
    "inference",
    "engine",
    "server",
    "rl",
    "guard",
    *HOSTS,
)
LOOK_S = 0.2
PATIENCE_S = 120.0
"""A kill waits so long for its target to be there."""
STOPPED_S = 8.0
"""A stopped `rl` or further server is let go on after this: nobody is above it to notice."""
NOBODYS = ("rl", "server")
ORPHAN_S = 60.0
"""What a dead `rl`, or host, left must be gone by then."""
ORPHANS_EVERY_S = 2.0


@dataclass
class Kill:
    """One signal, and what came of it."""

    at_s: float
    target: str
    signal: str
    phase: str
    pid: int
    recovered_s: float | None = None
    """Until every process was up again; None: the run ended before."""
    overlapped: bool = False
    """Another kill came before the recovery."""


@dataclass
class Report:
    """What is printed."""

    kills: list[Kill] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)


class Chaos:
    """The schedule, and the looks in between."""

    def __init__(self, run: Run, options: argparse.Namespace):
        self.run, self.options = run, options
        self.random = random.Random(options.seed)
        self.report = Report()
        self.began = time.monotonic()
        self.queue: list[str] = []
        self.open: list[Kill] = []
        self.seen: set[int] = set()
        self.segments: set[str] = set()
        self.pending_stamp = (0, 0)
        self.reader = MetricsReader(run.run_dir.metrics)
        self.step_times: dict[int, float] = {}
        self.down_s = 0.0
        self.wake_at, self.stopped = 0.0, 0
        """When a stopped `rl` or server is let go on, and its pid."""
        self.orphans_at = 0.0

    def now(self) -> float:
        return time.monotonic() - self.began

    def look(self) -> None:
        """Notes what is new; starts again what nobody else does; raises EndedError when the run
        ended by itself."""
        time.sleep(LOOK_S)
        run, now = self.run, self.now()
        self.note_pending()
        for line in self.reader.new():
            if line["source"] == "trainer":
                self.step_times.setdefault(line["step"], now)
        if self.wake_at and now > self.wake_at:
            self.wake_at = 0.0
            os.kill(self.stopped, signal.SIGCONT)
        run.revive()
        self.note_orphans(now)
        if (
            self.open
            and not self.wake_at
            and run.all_up()
            and not any(alive(kill) for kill in self.open)
        ):
            self.down_s += now - self.open[0].at_s
            for kill in self.open:
                kill.recovered_s, kill.overlapped = now - kill.at_s, len(self.open) > 1
            print(f"{now:7.0f} s  all up again after {now - self.open[0].at_s:.1f} s", flush=True)
            self.open = []
        if self.open and now - self.open[-1].at_s > UP_S:
            raise EndedError(None)

    def note_pending(self) -> None:
        """Which groups have ever been finished."""
        path = self.run.run_dir.pending
        if (
            path.exists()
            and (stamp := (path.stat().st_mtime_ns, path.stat().st_size)) != self.pending_stamp
        ):
            self.pending_stamp = stamp
            self.seen |= promises.pending_groups(path)

    def note_orphans(self, now: float) -> None:
        """What a dead `rl` leaves ends by itself: its successor does not know of it."""
        if now - self.orphans_at < ORPHANS_EVERY_S:
            return
        self.orphans_at = now
        for when, word in list(self.run.doomed):
            left = promises.told(promises.processes_with(word))
            if not left or time.monotonic() - when > ORPHAN_S:
                self.run.doomed.remove((when, word))
                self.report.broken += [
                    f"{ORPHAN_S:.0f} s after its death there is still {line}" for line in left
                ]

    def until(self, what: str, reached: Callable[[], bool], limit_s: float) -> None:
        since = self.now()
        while not reached():
            self.look()
            if self.now() - since > limit_s:
                raise TimeoutError(
                    f"waited {limit_s:.0f} s for {what}; see {self.run.output} and "
                    f"{self.run.run_dir.logs}"
                )

    def kill(self) -> None:
        """One random target gets one random signal, as soon as it is there. One that is never
        there leaves its turn to another."""
        if not self.queue:
            self.queue = self.random.sample(self.options.targets, len(self.options.targets))
        target, _, name = self.queue.pop().partition(":")
        number = getattr(signal, f"SIG{name or self.random.choice(self.options.signals)}")
        since = self.now()
        while not (found := self.run.find(target)):
            self.look()
            if self.now() - since > PATIENCE_S:
                print(f"{self.now():7.0f} s  there is no {target} to kill", flush=True)
                return
        pid, phase = found
        self.segments |= promises.shared_memory_of(promises.processes_with(self.run.word))
        os.kill(pid, number)
        if target in NOBODYS and number == signal.SIGSTOP:
            self.wake_at, self.stopped = self.now() + STOPPED_S, pid
        else:
            self.run.note_kill(target)
        kill = Kill(self.now(), target, number.name.removeprefix("SIG"), phase, pid)
        self.report.kills.append(kill)
        self.open.append(kill)
        print(
            f"{kill.at_s:7.0f} s  SIG{kill.signal:<4} to {target} ({pid}), while the run is "
            f"{phase}",
            flush=True,
        )

    def steps_done(self) -> int:
        return max(self.step_times, default=0)

    def go(self) -> None:
        """Start, undisturbed steps, kills, a few steps more, end."""
        options, run = self.options, self.run
        run.start()
        try:
            self.until(
                "the first start",
                lambda: run.all_up() and self.steps_done() >= options.undisturbed,
                UP_S,
            )
            pace = self.pace()
            first, since = self.steps_done(), self.now()
            for _ in range(options.kills):
                due = self.now() + options.every * self.random.uniform(0.5, 1.5)
                while self.now() < due:
                    self.look()
                self.kill()
            self.until("the recovery of the last kill", lambda: not self.open, UP_S)
            self.pace_under_kills(pace, first, since)
            last = self.steps_done() + options.settle
            self.until(f"step {last}", lambda: self.steps_done() >= last, UP_S)
            self.until("word on orphans", lambda: not run.doomed, 2 * ORPHAN_S)
            code = run.end()
            self.report.figures["ended"] = f"stopped by SIGTERM: {code}"
            self.report.broken += (
                []
                if code in (0, 143)
                else [f"the run ended with {code} after SIGTERM, not with 143"]
            )
        except EndedError as end:
            self.report.figures["ended"] = f"by itself: {end.code}"
            if end.code != 0:
                self.report.broken.append(
                    f"the run ended with {end.code}"
                    if end.code is not None
                    else f"no recovery within {UP_S:.0f} s"
                )
        except TimeoutError as error:
            self.report.broken.append(str(error))
        finally:
            self.end()

    def end(self) -> None:
        """Whatever happened: nothing of ours is left; what is, is noted by `check` before."""
        try:
            self.run.end()
        except TimeoutError as error:
            self.report.broken.append(str(error))
        self.note_pending()

    def pace(self) -> float:
        """Seconds a step of the undisturbed run."""
        times = [self.step_times[step] for step in sorted(self.step_times)]
        return median(b - a for a, b in itertools.pairwise(times)) if len(times) > 2 else 0.0

    def pace_under_kills(self, pace: float, first: int, since: float) -> None:
        """Effective training time, in two ways that docs/reliability.md defines."""
        wall, steps = self.now() - since, self.steps_done() - first
        repeated, repeated_s = promises.repeated_steps(self.run.run_dir)
        self.report.figures |= {
            "wall_s": wall,
            "steps": steps,
            "undisturbed_step_s": pace,
            "steps_repeated": repeated,
            "downtime_s": self.down_s,
            "effective_by_downtime": max(0.0, 1 - (self.down_s + repeated_s) / wall)
            if wall
            else None,
            "effective_by_pace": steps * pace / wall if wall and pace else None,
        }

    def check(self) -> None:
        """The promise."""
        run, report = self.run, self.report
        report.broken += promises.nothing_left(run.run_dir, run.temporary, self.segments, run.word)
        for process in promises.processes_with(run.word):
            process.kill()
        if not run.config.sft:
            broken, lost = promises.exactly_once(run.run_dir, self.seen)
            report.figures["rollouts_lost"] = lost
            report.broken += broken
            broken, mean, largest = promises.lag(run.run_dir, run.config)
            report.figures |= {"lag_mean": mean, "lag_max": largest, "groups_seen": len(self.seen)}
            report.broken += (
                broken
                + promises.every_step_trained(run.run_dir)
                + promises.numbers_once(run.run_dir)
            )
        report.figures |= events(run.run_dir.root / "events.jsonl")
        if not self.options.no_replay:
            broken, said = promises.replay_equal(
                run.run_dir, run.environment(), self.options.replay_timeout
            )
            report.figures["replay"] = said.splitlines()[-1] if said else ""
            report.broken += broken
        shutil.rmtree(run.temporary, ignore_errors=True)


def events(path: Path) -> dict[str, Any]:
    """What `rl` noted of the run, by kind; and for each process how long it took from a death
    until it worked again."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    back: dict[str, list[float]] = {}
    for line in lines:
        if line["event"] == "ready" and line["attempt"] > 1:
            back.setdefault(line["process"], []).append(line["seconds"])
    counts = dict(sorted(Counter(line["event"] for line in lines).items()))
    return {"events": counts} | {
        f"{name}_back_s": f"median {median(each):.1f}, max {max(each):.1f}"
        for name, each in sorted(back.items())
    }


def alive(kill: Kill) -> bool:
    """Whether the victim is still there. One that got SIGCONT afterwards is not meant to go."""
    return not (kill.target in NOBODYS and kill.signal == "STOP") and psutil.pid_exists(kill.pid)


def table(report: Report) -> str:
    """Markdown: kills by target and phase, recovery, figures, what is broken."""
    lines = ["| target | kills | recovery median s | recovery max s |", "|---|---|---|---|"]
    for target in [*sorted({kill.target for kill in report.kills}), "all"]:
        kills = [kill for kill in report.kills if target in (kill.target, "all")]
        times = [kill.recovered_s for kill in kills if kill.recovered_s is not None]
        shown = f"{median(times):.1f} | {max(times):.1f}" if times else "- | -"
        lines.append(f"| {target} | {len(kills)} | {shown} |")
    lines += ["", "| target | signal | while | kills |", "|---|---|---|---|"]
    for (target, name, phase), count in sorted(
        Counter((kill.target, kill.signal, kill.phase) for kill in report.kills).items()
    ):
        lines.append(f"| {target} | {name} | {phase} | {count} |")
    lines += ["", "| figure | |", "|---|---|"]
    lines += [
        f"| {name} | {f'{value:.3g}' if isinstance(value, float) else value} |"
        for name, value in report.figures.items()
    ]
    lines += ["", "every promise was kept" if not report.broken else "BROKEN:"]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in report.broken)])


def options_of(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--every",
        type=float,
        default=60.0,
        help="seconds between two kills, on average; each is between a half and one and a half",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--targets",
        default=",".join(target for target in TARGETS if target not in HOSTS),
        help=f"trainer or trainer:STOP, ...; out of {', '.join(TARGETS)}; one that is not there "
        "is passed over",
    )
    parser.add_argument(
        "--servers", type=int, default=0, help="inference servers beside the one of `rl`"
    )
    parser.add_argument("--signals", default="KILL", help="KILL, STOP, SEGV: one of these a kill")
    parser.add_argument(
        "--undisturbed",
        type=int,
        default=4,
        help="steps before the first kill: the pace to compare with",
    )
    parser.add_argument("--settle", type=int, default=2, help="steps after the last recovery")
    parser.add_argument(
        "--out", type=Path, help="folder of run, log and report; default: a new one under outputs/"
    )
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--replay-timeout", type=float, default=7200.0)
    options, rest = parser.parse_known_args(args)
    options.targets, options.signals = options.targets.split(","), options.signals.split(",")
    targets = {target.partition(":")[0] for target in options.targets}
    options.by_machines = all(target.startswith("machine-") for target in targets)
    if unknown := targets - set(TARGETS) if not options.by_machines else ():
        parser.error(f"--targets: {', '.join(sorted(unknown))} is none of {', '.join(TARGETS)}")
    options.by_hosts = not targets.isdisjoint(HOSTS)
    if options.by_hosts and (
        not targets <= set(HOSTS) or options.signals != ["KILL"] or options.servers
    ):
        parser.error(
            f"--targets: {' and '.join(HOSTS)} go with each other alone, are killed (KILL), "
            "and have no further --servers"
        )
    return options, rest


def main() -> int:
    options, rest = options_of(sys.argv[1:])
    folder = options.out or Path("outputs") / f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    flags = ["--output_dir", str(folder), "--name", "run"]
    if not any(
        word in ("--max_steps", "--steps") or word.startswith(("--max_steps=", "--steps="))
        for word in rest
    ):
        flags += ["--max_steps", "999999"]  # the schedule ends the run
    if options.by_machines:
        run = MachinesRun([*rest, *flags], folder)
    else:
        run = (
            HostRun([*rest, *flags], folder)
            if options.by_hosts
            else Run([*rest, *flags], folder, options.servers)
        )
    if (run.config.trainer.ranks or 1) == 1:
        options.targets = [target for target in options.targets if not target.startswith("rank")]
    chaos = Chaos(run, options)
    chaos.go()
    chaos.check()
    report = chaos.report
    report.figures["versions"] = max(numbered(run.run_dir.weights_dir), default=0)
    (folder / "chaos.json").write_text(
        json.dumps(asdict(report) | {"command": sys.argv[1:]}, indent=1)
    )
    (folder / "chaos.md").write_text(table(report) + "\n")
    print(table(report))
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
