"""A run from its configuration to its report. Beside it are two processes without which it goes on:
the browser page (`--view`), and one that draws curves.png.
"""

import contextlib
import errno
import json
import math
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl.config.command_line import CommandLine, from_toml
from rl.config.run import RLConfig
from rl.config.trainer import CheckpointConfig
from rl.diagnosis.disk import disk_estimate
from rl.diagnosis.rewards import reward_summary
from rl.diagnosis.run_outcome import early_end, nothing_trained
from rl.diagnosis.state import RunState
from rl.homes.resolve import Homes, homes_of, record
from rl.homes.resolve import entries as environments
from rl.launch import devices, roles
from rl.launch.children import Children
from rl.launch.prepare import Prepared, prepare
from rl.launch.roles import Role
from rl.launch.supervisor import Supervisor
from rl.launch.trackers import Trackers
from rl.run_dir.access_token import PAGE_VARIABLE, link, page_secret
from rl.run_dir.lease import LEASE_S, check_fence, lost_to
from rl.run_dir.logs import last_lines, newest_log
from rl.run_dir.metrics import Merger, MetricsReader, sources_dir
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import RunEnd, read_json
from rl.system.children import PYTHON, STOP_DEADLINE_S, Child, Stopped
from rl.system.errors import GIVE_UP, LASTING, RunError, system_error
from rl.system.linux import bind, shared_memory_fault
from rl.system.machine import machine
from rl.system.sandbox import fault as sandbox_fault
from rl.system.terminal import discard_output, say

LINK = re.compile(r"(http://\S+/) (\w+)$", re.M)
"""Matches the address and the number of a link in the page's log."""


class Beside:
    """A process that ends with the run, and whose end is no more than a warning. `poll` never
    waits."""

    def __init__(
        self,
        run_dir: RunDir,
        children: Children,
        say: Callable[[str], None],
        loss: str,
        name: str,
        *words: str,
        **env: str,
    ):
        """`loss`: what the user is told when it ends early. `words`: its module and arguments."""
        self.children, self.say, self.loss = children, say, loss
        command = [*PYTHON, "-m", *words]
        self.child: Child | None = children.start(name, command, env, run_dir.logs)

    def poll(self) -> None:
        """Reports an early end."""
        if self.child and self.child.exit_code is not None:
            self.say(
                f"warning: {self.loss} (exit code {self.child.exit_code}, log: {self.child.log})"
            )
            self.children.kill_tree(self.child)
            self.child = None

    def close(self) -> None:
        """Deletes the log of a process that ended with the run."""
        if self.child:
            self.child.log.unlink(missing_ok=True)
            self.child = None


class Page(Beside):
    """`rl view` on the run. Prints each link that admits a browser."""

    def __init__(self, run_dir: RunDir, children: Children, say: Callable[[str], None]):
        self.secret, self.told = page_secret(run_dir.status_dir), ""
        loss, root = "the page of --view has ended, the run continues", str(run_dir.root)
        words, env = ("rl.main", "view", root, "--beside"), {PAGE_VARIABLE: self.secret}
        super().__init__(run_dir, children, say, loss, "view", *words, **env)

    def poll(self) -> None:
        """Prints a new link, or that the page has ended."""
        links = LINK.findall("\n".join(last_lines(self.child.log))) if self.child else []
        if links and self.told != (newest := link(self.secret, *links[-1])):
            self.say(
                f"view      {newest}"
                + ("  (a browser has used the link before)" if self.told else "")
            )
            self.told = newest
        super().poll()


def start_curves(
    run_dir: RunDir, title: str, children: Children, say: Callable[[str], None]
) -> Beside:
    """Starts the process that keeps curves.png up to date, see rl.launch.curves.main."""
    loss = (
        f"{run_dir.curves} is out of date: drawing it failed; it is drawn again when the run ends"
    )
    words = "rl.launch.curves", str(run_dir.root), title
    return Beside(run_dir, children, say, loss, "curves", *words)


POLL_S = 0.2
EXIT_S = 2.0
"""Seconds in which a trainer ends whose cluster.grace_s is over: it does so by itself."""
CURVES_AFTER_S = 60.0
"""Seconds after which curves.png is kept up to date; a shorter run draws it at its end."""


def manifest_lines(manifest: dict[str, Any]) -> list[str]:
    """Describes the data of supervised fine-tuning."""
    lines = []
    for name, note in (("train", ""), ("validation", " (validation)")):
        if data := manifest.get(name):
            lines.append(
                f"data      {data['dataset']}{note}: {data['rows']:,} rows -> "
                f"{data['examples']:,} examples, {data['tokens']:,} tokens, "
                f"{data['trained_tokens']:,} trained"
                + "".join(f"; {number:,} {what}" for what, number in data["left_out"].items())
            )
    return lines + [f"warning: {text}" for text in manifest["warnings"]]


class RunLoop:
    """The loop of `rl`: supervises the children and shows the run's metrics until the run is
    over."""

    def __init__(self, config: RLConfig, prepared: Prepared, children: Children, view: bool):
        from rl.launch.console import Console
        from rl.launch.meter import Meter

        self.config, self.run_dir, self.children = config, prepared.run_dir, children
        self.check_fence = partial(check_fence, self.run_dir.lock("rl"))
        self.merger = Merger(self.run_dir.metrics, self.check_fence)
        self.merger.merge()
        self.console = Console(config, self.run_dir)
        self.say = self.console.say
        self.supervisor = Supervisor(config, self.run_dir, children, self.say)
        self.reader = MetricsReader(self.run_dir.metrics)
        self.unshown: list[dict[str, Any]] = []
        """Lines that were read, but not shown because the disk did not answer."""
        self.not_merged = False
        """Whether the user was warned that metrics.jsonl cannot be written."""
        self.console.introduce()
        for note in prepared.notes:
            self.say(note)
        self.cleaned = self.run_dir.cleaned if self.run_dir.cleaned.exists() else None
        """The previous run, until it is deleted."""
        self.trackers = Trackers(config, self.run_dir, self.say)
        self.meter = Meter(config, self.run_dir)
        # the console has already read the newest of these itself
        while self.trackers.left and (old_lines := self.reader.new()):
            self.trackers.send(old_lines)
        self.reader.skip()
        self.beside: list[Beside] = []
        if view:
            self.beside.append(Page(self.run_dir, children, self.say))
        self.curves_at = time.monotonic() + CURVES_AFTER_S
        """Time from which curves.png is drawn."""

    def until_finished(self, processes: list[Role]) -> None:
        """Starts processes and keeps them alive until they have ended well. Raises RunError if they
        cannot, and Stopped after `rl stop`.

        A disk that does not answer may do so again. Raises OSError if it does not for LEASE_S, or
        for an error that does not pass.
        """
        self.supervisor.begin(processes)
        failed_at = math.inf
        while not self.supervisor.keeper.finished:
            try:
                self._poll()
                failed_at = math.inf
            except OSError as error:
                now = time.monotonic()
                if error.errno in (errno.EPIPE, *LASTING) or now - failed_at >= LEASE_S:
                    raise
                if failed_at == math.inf:
                    failed_at = now
                    self.say(
                        f"warning: {system_error(error)}; this is tried again for {LEASE_S:.0f} s"
                    )
            time.sleep(POLL_S)

    def _poll(self) -> None:
        # here alone: `rl stop` repeats it until this process has ended
        if self.run_dir.stop_request.exists():
            self.run_dir.stop_request.unlink(missing_ok=True)
            raise Stopped(signal.SIGINT)
        self.supervisor.poll(self.show())

    def show(self) -> list[dict[str, Any]]:
        """Merges, shows, sends and returns new metrics. Raises RunError if another `rl` has
        taken over."""
        try:
            self.merger.merge()
        except OSError as error:
            if not self.not_merged:
                self.say(
                    f"warning: {error}; until it can be written, the metrics are kept in "
                    f"{sources_dir(self.run_dir.metrics)}"
                )
            self.not_merged = True
        self.unshown += self.reader.new()
        if self.unshown:
            self.check_fence()  # trackers, and the picture, have one writer, too
        lines, self.unshown = self.unshown, []
        self.console.update(lines)
        if time.monotonic() >= self.curves_at:
            self.curves_at = math.inf
            title = self.config.name
            self.beside += [start_curves(self.run_dir, title, self.children, self.say)]
        for process in self.beside:
            process.poll()
        if self.cleaned and self.run_dir.anything_made():
            threading.Thread(target=shutil.rmtree, args=(self.cleaned, True)).start()
            self.cleaned = None
        self.trackers.send(lines)
        self.meter.note(lines)
        return lines

    def tell_disk(self) -> None:
        """Prints the disk space that the run will use. The model's folder is the path in the log
        of the process that found it."""
        words = last_lines(newest_log(self.run_dir.logs, "model"))
        folders = [Path(line) for line in words if line.startswith("/") and Path(line).is_dir()]
        for line in disk_estimate(self.config, folders[0]) if folders else []:
            self.say(line)

    def tell_end(self) -> None:
        """Prints why the run ended before its last step, if it did."""
        end = read_json(self.run_dir.run_end, RunEnd) if self.config.kind.has_rollouts else None
        if end and (text := early_end(end, self.run_dir.newest_batch(), self.config.max_steps)):
            self.supervisor.event("end", "rl", reason=text)
            doubt = f"; `rl show {self.run_dir.root}` shows the rollouts"
            self.say(f"warning: {text}{doubt}" if end.kind == "doubtful" else text)

    def close(self, exit_code: int) -> None:
        """Prints the last lines and the report, and closes the trackers."""
        from rl.launch.curves import final_report
        from rl.run_dir.numbers import Numbers

        while self.beside:
            self.beside.pop().close()
        self.curves_at = math.inf
        # a disk that does not answer must not keep the report away
        with contextlib.suppress(OSError):
            self.show()
            self.meter.write()
            self.show()
        self.console.close()
        final_report(Numbers.read(self.run_dir.metrics), self.run_dir, self.config.name, self.say)
        self.trackers.close(exit_code)


@dataclass(frozen=True)
class Placement:
    """Where the processes of a run are started."""

    roles: Callable[[RunDir], list[Role]]
    """Returns the processes that `rl` itself starts."""
    notes: list[str] = field(default_factory=list)
    """Lines for the console."""
    stop_s: float = STOP_DEADLINE_S
    """Seconds that the processes have for their end."""


def on_this_machine(config: RLConfig) -> Placement:
    """Divides this machine between all processes. Raises ConfigError for settings that it cannot
    satisfy."""
    box = machine()
    warning, division = devices.check_build(config, box), devices.split(config, box)
    grace_s = config.cluster.grace_s + EXIT_S if config.cluster else 0.0
    note = warning or devices.unused(config, division, box)
    return Placement(
        lambda run_dir: roles.roles(config, run_dir, division),
        [note] if note else [],
        max(STOP_DEADLINE_S, grace_s),
    )


def run(
    config: RLConfig,
    prepared: Prepared,
    placement: Placement,
    children: Children,
    again: str,
    view: bool = False,
) -> int:
    """Runs everything from the prepared directory to the report. Returns the exit code."""
    from rl.run_dir.numbers import Numbers

    run_dir = prepared.run_dir
    loop = RunLoop(config, prepared, children, view)
    code, why = 0, ""
    try:
        # Find or download the model before anything needs it, in a separate process, which may load
        # torch and can be stopped.
        # The same for the data of supervised fine-tuning, so that its faults are reported before
        # anything else starts.
        for name in roles.preparing(config):
            loop.until_finished([Role(name, roles.command(name, run_dir, 1), {})])
        length = from_toml(run_dir.config).model.max_model_len
        if length < config.model.max_model_len:
            loop.say(f"model.max_model_len = {length}: the longest sequence of this model")
        if not config.is_remote:
            loop.tell_disk()
        if config.kind == "sft":
            for line in manifest_lines(json.loads((run_dir.data / "manifest.json").read_bytes())):
                loop.say(line)
        loop.until_finished(placement.roles(run_dir))
        if fault := nothing_trained(Numbers.read(run_dir.metrics)):
            raise RunError(fault, resume_at=0)
        loop.tell_end()
    except Stopped as stop:
        children.stop_caught()
        code, why = 128 + stop.signum, f"{stop}: stopping (once more kills at once)"
    except RunError as error:
        code, why = 1, f"rl: {error}"
        again += "" if error.resume_at is None else f" {error.resume_at}"
    except BrokenPipeError:
        code = discard_output()
    except OSError as error:
        code, why = 1, f"rl: {system_error(error)}"
    finally:
        loop.console.close()
    lost = lost_to(run_dir.lock("rl")) if code else ""
    if lost:
        code, why = GIVE_UP, f"rl: {lost}"
    elif code > 128:
        loop.supervisor.event("stop", "rl", reason=signal.Signals(code - 128).name)
    if why:
        say(why)  # it may quote logs, which may contain model output
    stuck = children.stop(placement.stop_s)
    if code > 1 and not stuck and not lost:
        loop.supervisor.keeper.archive_statuses()
    if stuck:
        say(f"rl: these processes do not end, even after SIGKILL: {stuck}")
    if lost:  # the directory belongs to the other `rl`, which goes on
        return code
    loop.close(code)
    if code == 1 and not run_dir.anything_made():
        say("nothing was made yet: a start with other settings reuses the directory")
        if loop.cleaned:
            say(
                f"the run that was there before --clean is in {loop.cleaned}: move it "
                "elsewhere to continue it"
            )
    elif code:
        saved, done = max(numbers(run_dir.checkpoints), default=0), loop.console.shown
        if code > 128 and saved < done:
            steps = f"{saved + 1} to {done}" if saved + 1 < done else f"step {done}"
            say(f"no checkpoint after step {saved}: a resume trains {steps} again")
        say(f"resume with: {again}")
    return code


def resume_command(args: list[str], program: str = "rl") -> str:
    """Returns the same command with --resume."""
    kept, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word == "--resume" and rest and rest[0].isdigit():
            rest.pop(0)
        elif word not in ("--resume", "--clean"):
            kept.append(word)
    return shlex.join([*program.split(), *kept, "--resume"])


def home_lines(homes: Homes) -> list[str]:
    """Returns a line for each home that environments are played in."""
    by_home: dict[str, list[str]] = {}
    for name, home in homes.items():
        if home.version:
            by_home.setdefault(home.summary, []).append(name)
    return [
        f"environment{'s' * (len(names) > 1)} {', '.join(names)}: {text}"
        for text, names in by_home.items()
    ]


def check_ports(config: RLConfig) -> None:
    """Raises RunError if another process has a port of the run's processes on this machine, or
    if it has no such address."""
    sections = {
        "inference": config.inference if config.starts_inference else None,
        "orchestrator": config.orchestrator if config.kind.has_rollouts else None,
        "serve": config.serve,
        "prometheus": config.prometheus,
    }
    for name, section in sections.items():
        if section and config.cluster is None:
            bind(section.host, section.port, f"{name}.port").close()


def check_launch(config: RLConfig) -> None:
    """Raises RunError if `rl` cannot run this configuration on this machine."""
    if config.kind == "serve":
        raise RunError(
            "this is the configuration of a server of the Tinker API: start it with `rl "
            f"serve --name {config.name}`"
        )
    if config.batches_from == "fake":
        raise RunError(
            "trainer.data.fake measures the trainer alone; start it as `trainer` with the "
            "same files and flags"
        )
    if problem := shared_memory_fault():
        raise RunError(problem)
    check_ports(config)
    sandboxed = {
        entry.label for entry in environments(config).values() if entry.isolation == "sandbox"
    }
    if sandboxed and (problem := sandbox_fault()):
        raise RunError(
            f'environment {", ".join(sorted(sandboxed))}, isolation = "sandbox": {problem}'
        )


def launch(
    config: RLConfig,
    line: CommandLine,
    children: Children,
    again: str,
    place: Callable[[RLConfig], Placement] = on_this_machine,
) -> int:
    """Runs a configuration and returns the exit code. `place` decides what is started where.
    Raises RunError, OSError and Stopped."""
    check_launch(config)
    config = config.with_absolute_paths()
    homes = homes_of(config, say, recorded=line.resume is not None) if config.plays else {}
    placement = place(config)
    prepared = prepare(config, resume=line.resume, clean="clean" in line.switches)
    if prepared.why_over:
        prepared.lease.close()
        print(f"{prepared.run_dir.root}: {prepared.why_over}", flush=True)
        return 0
    record(config, homes)
    prepared.notes += [*placement.notes, *home_lines(homes)]
    # now: a signal in the middle of NumPy's import would leave it broken for the final report
    import rl.launch.curves  # noqa: F401

    code = run(config, prepared, placement, children, again, "view" in line.switches)
    prepared.lease.close()
    if code == 0 and "quick" in line.switches:
        if config.trainer.checkpoint == CheckpointConfig():  # else somebody wants them
            shutil.rmtree(prepared.run_dir.checkpoints, ignore_errors=True)
        print(f"verdict   {reward_summary(RunState(prepared.run_dir, config))}", flush=True)
    return code
