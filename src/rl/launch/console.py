"""The console output of a running run. It only reads the run directory: metrics.jsonl, status/ and
rollouts/.

On a terminal, lines that fit its width scroll above a progress bar. Elsewhere (a log file, a pipe)
there are only lines, with all columns, and phases of processes are printed when they change.
Control characters in the output are always escaped.
"""

import math
import os
import re
import statistics
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, TextIO

from rl.config.plan import plan
from rl.config.run import RLConfig
from rl.diagnosis.environments import length_texts, step_texts
from rl.diagnosis.rollouts import heading, messages_text, num_prompt_messages, read_rollouts
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metrics import NEWEST_BYTES, PASS, merge_lines, read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, describe, read_status
from rl.system.terminal import Lines, clip, digits, span, visible
from rl.wire.parity import RUN_LIMITS, parity_warning


class Column(NamedTuple):
    """A metric in the table of steps. If there is no room for all, those with the lowest ranks
    are shown."""

    heading: str
    source: str
    metric: str
    width: int
    spec: str
    """Format specification of its value."""
    rank: int
    """0: not shown."""
    sft_rank: int
    """Rank in supervised fine-tuning, where only the trainer reports."""


COLUMNS = (
    Column("reward", "orchestrator", "reward/mean", 7, ".3f", 1, 0),
    Column("eval", "eval", "newest", 7, ".3f", 2, 0),
    Column("loss", "trainer", "loss/mean", 9, ".4f", 10, 1),
    Column("valid", "trainer", "validation/loss", 9, ".4f", 0, 2),
    Column("entropy", "trainer", "entropy/mean", 8, ".3f", 8, 8),
    Column("mismatch", "trainer", "mismatch_kl/mean", 9, ".1e", 7, 0),
    Column("grad", "trainer", "optim/grad_norm", 7, ".3g", 6, 5),
    Column("lr", "trainer", "optim/lr", 8, ".1e", 0, 7),
    Column("epoch", "trainer", "epoch", 6, ".2f", 0, 6),
    Column("lag", "orchestrator", "lag/mean", 5, ".2f", 5, 0),
    Column("lag kl", "trainer", "lag_kl/mean", 8, ".1e", 11, 0),
    Column("tok/s", "trainer", "perf/tokens_per_s", 7, ".0f", 9, 9),
    Column("time", "trainer", "time/step", 7, ".1f", 3, 3),
    Column("left", "console", "left", 7, "", 4, 4),
)
"""`eval` is the newest mean reward of the first configured evaluation, `left` the time until the
last step."""
WAITS = ("time/wait_for_batch", "time/publish_weights", "time/checkpoint")
"""Parts of a step of which the longest is shown; the first one is what faster inference would
save."""
STEP_WIDTH, NOTES_WIDTH = 6, 20
"""Characters of the step's number, and those reserved for the longest wait."""
SCREEN = 50
"""Lines after which the heading is repeated if there is no terminal with a height."""
MOST_FOR_CHECKPOINTS = 1 / 20
"""Share of the time spent on checkpoints above which the user is warned."""
PACE_STEPS = 10
"""Number of newest steps whose median time gives the estimate of the time left."""
Line = dict[str, Any]


def intro_lines(config: RLConfig) -> list[str]:
    """Describes the run: model, data, sizes and directory."""
    root, settings = os.path.relpath(config.run_dir.root), config.orchestrator
    where = f"in {config.run_dir.root if root.startswith('..') else root}"
    steps = f"{config.max_steps} step{'s' * (config.max_steps > 1)}"
    if config.sft:
        length = f"{config.sft.epochs:g} epochs" if config.sft.epochs else steps
        return [
            f"{config.name}: {config.model.name}, supervised fine-tuning on {config.sft.dataset}",
            f"  {length} of {config.sft.batch_size} examples a step, {where}",
        ]
    labels = ", ".join(env.label for env in settings.environment)
    data = config.recorded.rollouts if config.recorded else labels
    lines = [
        f"{config.name}: {config.model.name} on {data}",
        f"  {steps} of {batch_text(config)}, max_lag {config.max_lag}, {where}",
    ]
    if len(settings.eval) > 1:
        first, number = settings.eval[0].label, len(settings.eval)
        lines.append(f"  column eval: {first}, the first of {number} evaluations")
    return lines


def batch_text(config: RLConfig) -> str:
    """Describes the number of rollouts in a batch, which has whole groups."""
    settings = config.orchestrator
    batch_size = settings.batch_size
    if config.recorded:
        return f"{batch_size} rollouts or a few more (whole tasks)"
    sizes = {env.group_size or settings.group_size for env in settings.environment}
    rounded = f"; batch_size = {batch_size} is rounded up to whole groups"
    if len(sizes) > 1:
        listed = ", ".join(map(str, sorted(sizes)))
        return f"{batch_size} rollouts or a few more (groups of {listed}{rounded})"
    size = max(sizes, default=settings.group_size)
    groups = -(-batch_size // size)
    rounded = rounded if groups * size > batch_size else ""
    return f"{groups * size} rollouts ({groups} group{'s' * (groups > 1)} of {size}{rounded})"


def fit_columns(config: RLConfig, width: int | None) -> list[Column]:
    """Returns the columns of a run, of which those of the highest rank have no room in a line of
    `width` characters."""
    ranks = {
        column: rank
        for column in COLUMNS
        if (rank := column.sft_rank if config.kind == "sft" else column.rank)
    }
    room = math.inf if width is None else width - STEP_WIDTH - NOTES_WIDTH
    while ranks and sum(column.width + 1 for column in ranks) > room:
        del ranks[max(ranks, key=lambda column: ranks[column])]
    return list(ranks)


def number(value: float | str | None, spec: str) -> str:
    """Formats a value; `-` for None (not measured, or not finite)."""
    return "-" if value is None else format(value, spec)


def cell(lines: dict[str, Line], column: Column) -> str:
    """Formats the value of a column after a space; one that is too wide with fewer digits."""
    value = lines[column.source].get(column.metric)
    text = number(value, column.spec)
    if len(text) > column.width and isinstance(value, float):
        text = f"{value:.{max(1, column.width - 6)}g}"
    return f"{text:>{column.width + 1}}"


def step_notes(orchestrator: Line, trainer: Line, batch_size: int) -> list[str]:
    """Returns notes on a step: its longest wait, a short batch, rewards and failures of its
    environments."""
    seconds, longest = max((trainer.get(metric) or 0.0, metric) for metric in WAITS)
    notes = [f"{seconds:.1f} {longest.removeprefix('time/')}"] if seconds >= 0.05 else []
    if missing := orchestrator.get("rollouts/missing"):
        notes.append(f"short: {batch_size - missing:g} of {batch_size}")
    return notes + step_texts(orchestrator)


def packed(texts: list[str], width: int | None, indent: int = 0) -> list[str]:
    """Packs the texts into lines, as many in each as fit into `width`; lines after the first are
    indented."""
    lines: list[str] = []
    for text in texts:
        if lines and (width is None or len(lines[-1]) + 2 + len(text) <= width):
            lines[-1] += f"  {text}"
        else:
            lines.append(clip(" " * indent + text, width) if lines and width else text)
    return lines


def eval_text(step: int, line: Line) -> str:
    """Formats an evaluation: `eval at version 10: gsm8k 0.412 (pass@4 0.600)`."""
    texts = []
    for key, value in line.items():
        if match := re.fullmatch("eval/(.*)/reward_mean", key):
            label = match[1]
            passed = ", ".join(
                f"{name.rpartition('/')[2]} {number(rate, '.3f')}"
                for name, rate in line.items()
                if name.startswith(f"eval/{label}/pass@") and not name.endswith("_stderr")
            )
            errored = line.get(f"eval/{label}/errored")
            texts.append(
                f"{label} {number(value, '.3f')}{f' ({passed})' if passed else ''}"
                f"{f', {errored:.0%} failed' if errored else ''}"
            )
    return f"  eval at version {step}: {', '.join(texts)}"


def rollout_text(rollout: Line) -> str:
    """Formats one rollout, shortened."""
    messages = messages_text(rollout["messages"], num_prompt_messages(rollout), is_short=True)
    text = f"{heading(rollout)}\n{messages}"
    return f"  --- a rollout of {text}\n---".replace("\n", "\n  ")


def processes_of(config: RLConfig) -> list[str]:
    """Returns the processes whose phases are shown; on a cluster one inference server for each
    machine that serves."""
    if config.kind == "sft":
        return ["data", "trainer"]
    division = plan(config)
    servers = ["inference"] if division.is_one_machine else division.server_names
    return [*servers, "orchestrator", "trainer"]


def read_statuses(run_dir: RunDir, names: Iterable[str]) -> dict[str, RoleStatus]:
    """Returns the statuses of processes; for a trainer without one that of its launcher, which
    says for which machines it waits."""
    statuses = {name: read_status(run_dir.status(name)) for name in names}
    launcher = read_status(run_dir.status("trainer-launcher"))
    statuses["trainer"] = statuses.get("trainer") or launcher
    return {name: status for name, status in statuses.items() if status}


def alike(statuses: dict[str, RoleStatus]) -> dict[str, RoleStatus]:
    """Returns the statuses, those of servers that do the same as one, with the newest change:
    `inference-node2, 3`."""
    names: dict[object, list[str]] = {}
    for name, status in statuses.items():
        is_server = name.startswith("inference-node")
        names.setdefault((status.phase, status.step) if is_server else name, []).append(name)
    groups = sorted(names.values(), key=lambda group: not group[0].startswith("inference-node"))
    return {
        ", ".join([first, *(name.removeprefix("inference-node") for name in others)]): max(
            (statuses[name] for name in (first, *others)), key=lambda status: status.since or 0.0
        )
        for first, *others in groups
    }


def phase_text(name: str, status: RoleStatus, now: float) -> str:
    """Describes what a process does and for how long: `trainer: waiting for batch 3 (12 s)`."""
    seconds = now - status.since if status.since else 0.0
    return f"{name}: {describe(status)}" + (f" ({seconds:.0f} s)" if seconds >= 1 else "")


class Console:
    """Prints news at every `update`. Lines from before a resume are not printed again."""

    def __init__(self, config: RLConfig, run_dir: RunDir, out: TextIO | None = None):
        self.config, self.run_dir, self.out = config, run_dir, out or sys.stdout
        self.sources = {"orchestrator", "trainer"} & {*config.kind.roles}
        self.processes, self.max_steps = processes_of(config), config.max_steps
        labels = [entry.label for entry in config.orchestrator.eval]
        self.eval_metric = f"eval/{labels[0]}/reward_mean" if labels else ""
        """Metric of the column `eval`. It shows one evaluation: intervals differ, so a mean of
        several would depend on which ones ran."""
        self.evals: dict[int, float] = {}
        """Version -> its value in the column `eval`, from the newest one in the table on."""
        for (step, _), line in read_metrics(run_dir.metrics, "eval").items():
            self._note_eval(step, line)
        self.lines = read_metrics(run_dir.metrics, last_bytes=NEWEST_BYTES)
        """Lines of the steps that are not printed yet."""
        self.shown = max((step for step, _ in self.lines if self._complete(step)), default=0)
        """Newest step that was printed, or that existed before a resume."""
        self.paces: deque[float] = deque(maxlen=PACE_STEPS)
        """Seconds of the newest steps, but not of the first one, which includes the start of all
        processes."""
        for step, source in sorted(self.lines):
            if source == "trainer" and step <= self.shown:
                self._note_pace(step)
        self._forget()
        self.phases: dict[str, Phase | None] = {}
        """Process -> phase that was last printed."""
        self.headed: list[Column] = []
        """Columns of the heading that was last printed."""
        self.lines_since = 0
        """Number of lines printed since that heading."""
        self.lines_out = Lines(self.out)
        self.explained = set[str]()
        """What was explained, which is done once."""
        self.bar = ProgressBar(self.out) if self.out.isatty() else None

    @property
    def width(self) -> int | None:
        """Characters of a line; None without a terminal."""
        return self.bar.console.width if self.bar else None

    def update(self, new_lines: list[Line]) -> None:
        """Prints newly completed steps and evals, and shows what the processes do."""
        steps = [line for line in new_lines if line["source"] != "eval"]
        merge_lines(self.lines, [line for line in steps if line["step"] > self.shown])
        statuses = read_statuses(self.run_dir, self.processes)
        ends = [status.max_steps for status in statuses.values() if status.max_steps]
        self.max_steps = min(ends, default=self.max_steps)
        for line in new_lines:
            if line["source"] == "eval":
                text = eval_text(line["step"], line)
                self._say_folded(text)
                if "pass@" in text:
                    self._explain(PASS, f"  {PASS}")
                self._note_eval(line["step"], line)
            if text := parity_warning(line, RUN_LIMITS[self.config.model.dtype]):
                if self.config.truncates(sys.maxsize, replayed=False):
                    text += "; sampling is truncated, which the trainer does not know of"
                self.say(f"warning: step {line['step']}: {text}")
            self._warn_of_checkpoints(line)
        for step in sorted({step for step, _ in self.lines if self._complete(step)}):
            self._show_step(step)
            self._forget()
        if self.bar:
            self.bar.show(self.shown, self.max_steps, self._left(), alike(statuses))
        elif not self.headed:
            for name, status in statuses.items():
                # not when only the step or detail changes
                if status.phase != self.phases.get(name):
                    self.say(f"  {name}: {describe(status)}")
                    self.phases[name] = status.phase

    def _warn_of_checkpoints(self, line: Line) -> None:
        """Warns once if checkpoints at the user's interval in steps take a large share of the
        time."""
        interval = self.config.trainer.checkpoint.interval
        fraction = line.get("time/checkpoint_fraction", 0.0)
        if interval and fraction > MOST_FOR_CHECKPOINTS and "checkpoints" not in self.explained:
            self.explained.add("checkpoints")
            cost = digits(line.get("time/checkpoint_cost", 0.0))
            self.say(
                f"warning: step {line['step']}: checkpoints are being written {fraction:.0%} of "
                f"the time ({cost} s each): trainer.checkpoint.interval = {interval} is obeyed; a "
                "larger one, or none (trainer.checkpoint.interval_s), costs less"
            )

    def introduce(self) -> None:
        for line in intro_lines(self.config):
            self._say_folded(line)

    def say(self, text: str) -> None:
        """Prints above the bar."""
        text = visible(text)
        if encoding := getattr(self.out, "encoding", None):
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        width = self.width or len(text) + 1
        self.lines_since += sum(max(1, -(-len(line) // width)) for line in text.split("\n"))
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self.lines_out.say(text)

    def _say_folded(self, line: str) -> None:
        """Prints a line of words that may be wider than the terminal."""
        wrapper = textwrap.TextWrapper(self.width or len(line) + 1, subsequent_indent="  ")
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        self.say(wrapper.fill(line))

    def _explain(self, what: str, text: str) -> None:
        """Prints an explanation once."""
        if what not in self.explained:
            self.explained.add(what)
            self._say_folded(text)

    def close(self) -> None:
        if self.bar:
            self.bar.live.stop()
            self.bar = None

    def _note_eval(self, step: int, line: Line) -> None:
        if self.eval_metric in line:
            self.evals[step] = line[self.eval_metric]

    def _forget(self) -> None:
        """Drops what no later step needs: a run may have a million."""
        newest = max((step for step in self.evals if step <= self.shown), default=0)
        self.evals = {step: value for step, value in self.evals.items() if step >= newest}
        self.lines = {key: line for key, line in self.lines.items() if key[0] > self.shown}

    def _complete(self, step: int) -> bool:
        return all((step, source) in self.lines for source in self.sources)

    def _show_step(self, step: int) -> None:
        columns = fit_columns(self.config, self.width)
        screen = self.bar.console.height - 3 if self.bar else SCREEN
        if columns != self.headed or self.lines_since >= screen:
            names = "".join(f"{column.heading:>{column.width + 1}}" for column in columns)
            self.say(f"{'step':>{STEP_WIDTH}}{names}  of that waiting")
            self.headed, self.lines_since = columns, 0
        orchestrator, trainer = (
            self.lines.get((step, "orchestrator"), {}),
            self.lines[step, "trainer"],
        )
        self.shown = step
        self._note_pace(step)
        newest = max((version for version in self.evals if version <= step), default=None)
        lines = {
            "orchestrator": orchestrator,
            "trainer": trainer,
            "eval": {"newest": self.evals.get(newest)},
            "console": {"left": self._left()},
        }
        row = f"{step:>{STEP_WIDTH}}" + "".join(cell(lines, column) for column in columns)
        settings, long = self.config.orchestrator, length_texts(self.config, orchestrator)
        notes = step_notes(orchestrator, trainer, settings.batch_size)
        notes += [note for note, _ in long.values()]
        self.say("\n".join(packed([row, *notes], self.width, STEP_WIDTH + 2)))
        for metric in sorted(long):
            self._explain(metric, f"  step {step}: {long[metric][1]} ({metric})")
        if orchestrator.get("rollouts/missing"):
            self._explain(
                "short batch",
                f"  step {step} trained a short batch: too few of the "
                f"{orchestrator.get('rollouts/finished', 0):g} rollouts that finished since the "
                "previous batch are in groups that can be trained; no more than "
                f"orchestrator.max_refill = {settings.max_refill} batches' worth are begun for "
                f"each batch that may be sampled by now (max_lag = {self.config.max_lag})",
            )
        every = settings.show_rollout_every
        if every and (step == 1 or step % every == 0) and (rollout := self._example(step)):
            self.say(rollout_text({"step": step} | rollout))

    def _note_pace(self, step: int) -> None:
        if step > 1 and (seconds := self.lines[step, "trainer"].get("time/step")) is not None:
            self.paces.append(seconds)

    def _left(self) -> str | None:
        """Estimates the time until the last step by the pace; None at the last step, and before
        there is an estimate."""
        left = self.max_steps - self.shown
        return span(statistics.median(self.paces) * left) if self.paces and left > 0 else None

    def _example(self, step: int) -> Line | None:
        """Returns the first rollout that the step trained on, or else the first one."""
        path, first = self.run_dir.rollouts(step), None
        try:
            for rollout in read_rollouts(path) if path.exists() else ():
                if rollout.get("trained"):
                    return rollout
                first = first or rollout
        except CorruptFileError as error:
            self.say(f"warning: {error}")
        return first


class ProgressBar:
    """Shows rollouts of the batch being filled, and what the processes do. Only `show` redraws
    it: it needs no thread."""

    def __init__(self, out: TextIO):
        from rich.console import Console as RichConsole
        from rich.live import Live

        self.console = RichConsole(file=out)
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.live.start()

    def show(
        self, step: int, max_steps: int, left: str | None, statuses: dict[str, RoleStatus]
    ) -> None:
        """Redraws the bar on one line if all fits, or else with the processes on lines below."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table
        from rich.text import Text

        played, width = statuses.get("orchestrator", RoleStatus()), self.console.width - 1
        done, size, text = step, max_steps, f"step {step}/{max_steps}"
        if 0 < (played.batch or 0) <= max_steps and played.batch_size:
            done, size = played.batch_done or 0, played.batch_size
            text += f", batch {played.batch} {done}/{size}"
        text = clip(f"{text}, {left} left" if left else text, width)
        bar = min(24, width - len(text) - 1)
        first = Table.grid(padding=(0, 1))
        cells = [Text(text), *([Bar(total=size, completed=done, width=bar)] if bar >= 4 else [])]
        now = time.time()
        doing = [visible(phase_text(name, status, now)) for name, status in statuses.items()]
        below = [Text(clip(line, width), no_wrap=True) for line in packed(doing, width)]
        if len(line := "  ".join(doing)) <= width - len(text) - bar - 2:
            cells.append(Text(line))
            below = []
        first.add_row(*cells)
        self.live.update(Group(first, *below), refresh=True)
