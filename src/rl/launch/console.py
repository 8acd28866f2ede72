"""What the user sees while a run goes on. A reader of the run directory like any other: metrics.jsonl, status/ and rollouts/.

On a terminal lines scroll above a progress bar; elsewhere (a log file, a pipe) there are lines only, and what is waited for is printed
when it changes.
"""

import json
import sys
import time
from typing import Any, TextIO

from rl.config.run import RLConfig
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metrics import environment_rewards, merge_lines, read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, describe, read_status
from rl.wire.agreement import RUN_LIMITS, Agreement
from rl.wire.batch_file import check_rollouts

PROCESSES = ("inference", "orchestrator", "trainer")
SFT_PROCESSES = ("data", "trainer")
COLUMNS = (  # heading, source, metric, width, format
    ("reward", "orchestrator", "reward/mean", 7, ".3f"),
    ("eval", "eval", "newest", 7, ".3f"),
    ("loss", "trainer", "loss/mean", 9, ".4f"),
    ("entropy", "trainer", "entropy/mean", 8, ".3f"),
    ("mismatch", "trainer", "mismatch_kl/mean", 9, ".1e"),
    ("grad", "trainer", "optim/grad_norm", 7, ".3g"),
    ("lag", "orchestrator", "lag/mean", 5, ".2f"),
    ("tok/s", "trainer", "perf/tokens_per_s", 7, ".0f"),
    ("time", "trainer", "time/step", 7, ".1f"),
)
SFT_COLUMNS = (
    ("loss", "trainer", "loss/mean", 9, ".4f"),
    ("valid", "trainer", "validation/loss", 9, ".4f"),
    ("entropy", "trainer", "entropy/mean", 8, ".3f"),
    ("grad", "trainer", "optim/grad_norm", 7, ".3g"),
    ("lr", "trainer", "optim/lr", 8, ".1e"),
    ("epoch", "trainer", "epoch", 6, ".2f"),
    ("tok/s", "trainer", "perf/tokens_per_s", 7, ".0f"),
    ("time", "trainer", "time/step", 7, ".1f"),
)
"""Of supervised fine-tuning, which nothing but the trainer reports."""
WAITS = ("time/wait_for_batch", "time/publish_weights", "time/checkpoint")
"""Of these parts of a step the longest is shown: first, what a faster machine on the other side would save."""
Line = dict[str, Any]
Columns = tuple[tuple[str, str, str, int, str], ...]


def number(value: float | None, spec: str) -> str:
    """A value as printed; `-` where there is none (not measured, or not finite)."""
    return "-" if value is None else format(value, spec)


def header(columns: Columns = COLUMNS) -> str:
    names = "".join(f"{name:>{width + 1}}" for name, _, _, width, _ in columns)
    return f"{'step':>6}{names}  of that waiting"


def newest_eval(lines: dict[tuple[int, str], Line], step: int) -> float | None:
    """Mean over the evaluations of the newest version that was evaluated until `step`."""
    versions = [version for version, source in lines if source == "eval" and version <= step]
    rewards = [value for key, value in lines[max(versions), "eval"].items() if key.endswith("/reward_mean")] if versions else []
    return sum(rewards) / len(rewards) if rewards else None


def step_line(step: int, orchestrator: Line, trainer: Line, evaluated: float | None = None, columns: Columns = COLUMNS) -> str:
    """One line of the table, about a step that all sides have reported; `evaluated` is the newest eval's reward."""
    lines = {"orchestrator": orchestrator, "trainer": trainer, "eval": {"newest": evaluated}}
    cells = "".join(f"{number(lines[source].get(metric), spec):>{width + 1}}" for _, source, metric, width, spec in columns)
    longest = max(WAITS, key=lambda metric: trainer.get(metric) or 0.0)
    seconds = trainer.get(longest) or 0.0
    waiting = f"  {seconds:.1f} {longest.removeprefix('time/')}" if seconds >= 0.05 else ""
    rewards = environment_rewards(orchestrator)
    each = "".join(f"  {env} {reward:.2f}" for env, reward in rewards.items()) if len(rewards) > 1 else ""
    return f"{step:>6}{cells}{waiting}{each}"


def eval_text(step: int, line: Line) -> str:
    """An evaluation's numbers: `eval at version 10: gsm8k 0.412 (pass@4 0.600)`."""
    parts = []
    for key, value in line.items():
        if key.startswith("eval/") and key.endswith("/reward_mean"):
            label = key.removeprefix("eval/").removesuffix("/reward_mean")
            passed = {name.rsplit("/", 1)[1]: rate for name, rate in line.items() if name.startswith(f"eval/{label}/pass@")}
            more = ", ".join(f"{name} {number(rate, '.3f')}" for name, rate in passed.items() if not name.endswith("_stderr"))
            parts.append(f"{label} {number(value, '.3f')}" + (f" ({more})" if more else ""))
    return f"  eval at version {step}: {', '.join(parts)}"


def rollout_text(step: int, rollout: Line) -> str:
    """One rollout in full."""
    reward, advantage = number(rollout.get("reward"), ".3f"), number(rollout.get("advantage"), "+.3f")
    place = f"{rollout['env']}, group {rollout['group_id']}, rollout {rollout['rollout_id']}"
    lines = [f"  --- a rollout of step {step} ({place}): reward {reward}, advantage {advantage}, stop: {rollout.get('stop')}"]
    for message in rollout.get("messages", []):
        content = message.get("content")
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        if message.get("tool_calls"):
            text += json.dumps(message["tool_calls"])
        lines.append(f"  {message['role']}: " + text.replace("\n", "\n      "))
    return "\n".join([*lines, "  ---"])


def phase_text(name: str, status: RoleStatus, now: float) -> str:
    """What a process does and for how long: `trainer: waiting for batch 3 (12 s)`."""
    seconds = now - status.since if status.since else 0.0
    return f"{name}: {describe(status)}" + (f" ({seconds:.0f} s)" if seconds >= 1 else "")


class Console:
    """Prints what is new at every `update`. Lines that were there before a resume are not printed again."""

    def __init__(self, config: RLConfig, run_dir: RunDir, out: TextIO | None = None):
        self.config, self.run_dir, self.out = config, run_dir, out or sys.stdout
        self.sources = {"trainer"} if config.sft else {"orchestrator", "trainer"}
        self.columns, self.processes = (SFT_COLUMNS, SFT_PROCESSES) if config.sft else (COLUMNS, PROCESSES)
        self.limit = RUN_LIMITS[config.model.dtype]
        self.lines = read_metrics(run_dir.metrics)
        self.shown = {step for step, _ in self.lines if self._complete(step)}
        self.phases: dict[str, Phase | None] = {}
        """Of each process the phase that was printed last."""
        self.printed_steps = 0
        self.bar = ProgressBar(self.out, config.max_steps) if self.out.isatty() else None

    def update(self, new_lines: list[Line]) -> None:
        """Prints steps and evals that are complete now, and shows what the processes do."""
        merge_lines(self.lines, new_lines)
        for line in new_lines:
            if line["source"] == "eval":
                self.say(eval_text(line["step"], line))
            if line.get("parity/agrees") == 0.0:
                found = Agreement(int(line["parity/tokens"]), line["parity/mean"], line["parity/max"], line["parity/kl"], 0.0)
                self.say(f"warning: step {line['step']}: {found.complaint(self.limit)}")
        for step in sorted({line["step"] for line in new_lines} - self.shown):
            if self._complete(step):
                self._show_step(step)
        statuses = {name: status for name in self.processes if (status := read_status(self.run_dir.status(name)))}
        if self.bar:
            self.bar.show(max(self.shown, default=0), statuses)
        elif not self.printed_steps:
            self._say_new_phases(statuses)

    def say(self, text: str) -> None:
        """Prints above the bar."""
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.out, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self.bar:
            self.bar.progress.stop()
            self.bar = None

    def _complete(self, step: int) -> bool:
        return {(step, source) for source in self.sources} <= set(self.lines)

    def _show_step(self, step: int) -> None:
        if not self.printed_steps:
            self.say(header(self.columns))
        orchestrator, trainer = self.lines.get((step, "orchestrator"), {}), self.lines[step, "trainer"]
        self.say(step_line(step, orchestrator, trainer, newest_eval(self.lines, step), self.columns))
        self.shown.add(step)
        self.printed_steps += 1
        every = self.config.orchestrator.show_rollout_every
        if every and (step == 1 or step % every == 0) and (rollout := self._example(step)):
            self.say(rollout_text(step, rollout))

    def _example(self, step: int) -> Line | None:
        """The first rollout that the step trained on, else the first one."""
        path = self.run_dir.rollouts(step)
        if not path.exists():
            return None
        try:
            check_rollouts(path)
        except CorruptFileError as error:
            self.say(f"warning: {error}")
            return None
        rollouts = [json.loads(line) for line in path.read_bytes().splitlines()]
        return next((rollout for rollout in rollouts if rollout.get("trained")), rollouts[0] if rollouts else None)

    def _say_new_phases(self, statuses: dict[str, RoleStatus]) -> None:
        """Prints what a process does when it has entered another phase; a step or a detail alone is no news."""
        for name, status in statuses.items():
            if status.phase != self.phases.get(name):
                self.say(f"  {name}: {describe(status)}")
                self.phases[name] = status.phase


class ProgressBar:
    """Rollouts of the batch that is filling, and what the processes do. Redrawn by `show` alone: no thread beside the supervision."""

    def __init__(self, out: TextIO, max_steps: int):
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        self.max_steps = max_steps
        self.console = RichConsole(file=out)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[doing]}"))
        self.progress = Progress(*columns, console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
        self.task = self.progress.add_task("starting", total=1, doing="")
        self.progress.start()

    def show(self, step: int, statuses: dict[str, RoleStatus]) -> None:
        """Redraws."""
        orchestrator, trainer = statuses.get("orchestrator", RoleStatus()), statuses.get("trainer", RoleStatus())
        max_steps = trainer.max_steps or self.max_steps  # epochs are known to the trainer as steps
        done, size, batch = step, max_steps, ""
        if orchestrator.batch is not None and orchestrator.batch_done is not None and orchestrator.batch_size:
            done, size = orchestrator.batch_done, orchestrator.batch_size
            batch = f", batch {orchestrator.batch} {done}/{size}"
        doing = "  ".join(phase_text(name, status, time.time()) for name, status in statuses.items())
        self.progress.update(self.task, description=f"step {step}/{max_steps}{batch}", completed=done, total=size, doing=doing)
        self.progress.refresh()
