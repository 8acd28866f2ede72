"""The console output of a running run. It only reads the run directory: metrics.jsonl, status/ and
rollouts/.

On a terminal, lines that fit its width scroll above a progress bar. Elsewhere (a log file, a pipe)
there are only lines, with all columns, and phases of processes are printed when they change.
Control characters in the output are always escaped.
"""

import os
import statistics
import sys
import textwrap
import time
from collections import deque
from typing import Any, NamedTuple, TextIO

from rl.config.run import RLConfig
from rl.diagnosis.environments import length_texts, step_texts
from rl.diagnosis.rollouts import heading, messages_text, num_prompt_messages, read_rollouts
from rl.launch.phases import alike, phase_text, processes_of, read_statuses
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metric_names import PASS
from rl.run_dir.metrics import NEWEST_BYTES, merge_lines, read_metrics
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RoleStatus, describe
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
Columns = tuple[Column, ...]


def intro_lines(config: RLConfig) -> list[str]:
    """Describes the run: model, data, sizes and directory."""
    root = os.path.relpath(config.run_dir.root)
    where = f"in {config.run_dir.root if root.startswith('..') else root}"
    if config.sft:
        length = (
            f"{config.sft.epochs:g} epochs" if config.sft.epochs else f"{config.max_steps} steps"
        )
        what = f"{config.model.name}, supervised fine-tuning on {config.sft.dataset}"
        return [
            f"{config.name}: {what}",
            f"  {length} of {config.sft.batch_size} examples a step, {where}",
        ]
    envs = (
        config.recorded.rollouts
        if config.recorded
        else ", ".join(env.label for env in config.orchestrator.environment)
    )
    length = (
        f"{config.max_steps} step{'s' * (config.max_steps > 1)} of {batch_text(config)}, max_lag "
        f"{config.max_lag}"
    )
    evals = [entry.label for entry in config.orchestrator.eval]
    shown = (
        [f"  column eval: {evals[0]}, the first of {len(evals)} evaluations"]
        if len(evals) > 1
        else []
    )
    return [f"{config.name}: {config.model.name} on {envs}", f"  {length}, {where}", *shown]


def batch_text(config: RLConfig) -> str:
    """Describes the number of rollouts in a batch, which has whole groups."""
    settings = config.orchestrator
    if config.recorded:
        return f"{settings.batch_size} rollouts or a few more (whole tasks)"
    sizes = {env.group_size or settings.group_size for env in settings.environment} or {
        settings.group_size
    }
    rounded = f"batch_size = {settings.batch_size} is rounded up to whole groups"
    if len(sizes) == 1:
        (size,) = sizes
        groups = -(-settings.batch_size // size)
        more = f"; {rounded}" if groups * size > settings.batch_size else ""
        return f"{groups * size} rollouts ({groups} group{'s' * (groups > 1)} of {size}{more})"
    return (
        f"{settings.batch_size} rollouts or a few more (groups of "
        f"{', '.join(map(str, sorted(sizes)))}; {rounded})"
    )


def columns_of(config: RLConfig) -> Columns:
    """Returns the columns of a run, with their ranks in it."""
    ranked = (
        column._replace(rank=column.sft_rank if config.sft else column.rank) for column in COLUMNS
    )
    return tuple(column for column in ranked if column.rank)


def fit_columns(columns: Columns, width: int | None) -> Columns:
    """Returns the columns of lowest rank that fit into a line of `width` characters; all of them
    without a width."""
    if width is None:
        return columns
    by_rank, room = (
        sorted(columns, key=lambda column: column.rank),
        width - STEP_WIDTH - NOTES_WIDTH,
    )
    while by_rank and sum(column.width + 1 for column in by_rank) > room:
        by_rank.pop()
    return tuple(column for column in columns if column in by_rank)


def number(value: float | str | None, spec: str) -> str:
    """Formats a value; `-` for None (not measured, or not finite)."""
    return "-" if value is None else format(value, spec)


def header(columns: Columns) -> str:
    names = "".join(f"{column.heading:>{column.width + 1}}" for column in columns)
    return f"{'step':>6}{names}  of that waiting"


def step_line(step: int, lines: dict[str, Line], columns: Columns) -> str:
    """Formats a line of the table, for a step that all sources have reported; `lines` are its
    values by source."""
    return f"{step:>{STEP_WIDTH}}" + "".join(cell(lines, column) for column in columns)


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
    longest = max(WAITS, key=lambda metric: trainer.get(metric) or 0.0)
    seconds = trainer.get(longest) or 0.0
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
    parts = []
    for key, value in line.items():
        if key.startswith("eval/") and key.endswith("/reward_mean"):
            label = key.removeprefix("eval/").removesuffix("/reward_mean")
            passed = {
                name.rsplit("/", 1)[1]: rate
                for name, rate in line.items()
                if name.startswith(f"eval/{label}/pass@")
            }
            more = ", ".join(
                f"{name} {number(rate, '.3f')}"
                for name, rate in passed.items()
                if not name.endswith("_stderr")
            )
            failed = (
                f", {errored:.0%} failed" if (errored := line.get(f"eval/{label}/errored")) else ""
            )
            parts.append(
                f"{label} {number(value, '.3f')}" + (f" ({more})" if more else "") + failed
            )
    return f"  eval at version {step}: {', '.join(parts)}"


def rollout_text(rollout: Line) -> str:
    """Formats one rollout, shortened."""
    messages = messages_text(rollout["messages"], num_prompt_messages(rollout), is_short=True)
    text = f"{heading(rollout)}\n{messages}"
    return f"  --- a rollout of {text}\n---".replace("\n", "\n  ")


class Console:
    """Prints news at every `update`. Lines from before a resume are not printed again."""

    def __init__(self, config: RLConfig, run_dir: RunDir, out: TextIO | None = None):
        self.config, self.run_dir, self.out = config, run_dir, out or sys.stdout
        self.sources = {"trainer"} if config.sft else {"orchestrator", "trainer"}
        self.columns, self.processes = columns_of(config), processes_of(config)
        self.limit = RUN_LIMITS[config.model.dtype]
        self.eval_metric = next(
            (f"eval/{entry.label}/reward_mean" for entry in config.orchestrator.eval), ""
        )
        """Metric of the column `eval`. It shows one evaluation: intervals differ, so a mean of
        several would depend on which ones ran."""
        evaluated = read_metrics(run_dir.metrics, "eval")
        self.evals = {
            step: line[self.eval_metric]
            for (step, _), line in evaluated.items()
            if self.eval_metric in line
        }
        """Version -> its value in the column `eval`, from the newest one in the table on."""
        self.lines = read_metrics(run_dir.metrics, last_bytes=NEWEST_BYTES)
        """Lines of the steps that are not printed yet."""
        self.shown = max((step for step, _ in self.lines if self._complete(step)), default=0)
        """Newest step that was printed, or that existed before a resume."""
        self.paces: deque[float] = deque(maxlen=PACE_STEPS)
        """Seconds of the newest steps, but not of the first one, which includes the start of all
        processes."""
        for step in sorted(
            step for step, source in self.lines if source == "trainer" and step <= self.shown
        ):
            self._note_pace(step)
        self._forget()
        self.max_steps = config.max_steps
        self.phases: dict[str, Phase | None] = {}
        """Process -> phase that was last printed."""
        self.headed: Columns = ()
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
        merge_lines(
            self.lines,
            [line for line in new_lines if line["step"] > self.shown and line["source"] != "eval"],
        )
        statuses = read_statuses(self.run_dir, self.processes)
        self.max_steps = min(
            (one.max_steps for one in statuses.values() if one.max_steps), default=self.max_steps
        )
        for line in new_lines:
            if line["source"] == "eval":
                self._say_folded(text := eval_text(line["step"], line))
                if "pass@" in text and PASS not in self.explained:
                    self._say_folded(f"  {PASS}")
                    self.explained.add(PASS)
                self.evals |= (
                    {line["step"]: line[self.eval_metric]} if self.eval_metric in line else {}
                )
            if text := parity_warning(line, self.limit):
                self.say(f"warning: step {line['step']}: {text}")
            self._warn_of_checkpoints(line)
        for step in sorted({step for step, _ in self.lines if self._complete(step)}):
            self._show_step(step)
            self._forget()
        if self.bar:
            self.bar.show(self.shown, self.max_steps, self._left(), alike(statuses))
        elif not self.headed:
            self._say_new_phases(statuses)

    def _warn_of_checkpoints(self, line: Line) -> None:
        """Warns once if checkpoints at the user's interval in steps take a large share of the
        time."""
        interval, fraction = (
            self.config.trainer.checkpoint.interval,
            line.get("time/checkpoint_fraction", 0.0),
        )
        cost = line.get("time/checkpoint_cost", 0.0)
        if interval is None or fraction <= MOST_FOR_CHECKPOINTS or "checkpoints" in self.explained:
            return
        self.explained.add("checkpoints")
        self.say(
            f"warning: step {line['step']}: checkpoints are being written {fraction:.0%} of "
            f"the time ({digits(cost)} s "
            f"each): trainer.checkpoint.interval = {interval} is obeyed; a larger one, or "
            "none (trainer.checkpoint.interval_s), costs less"
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
        width = self.width or len(line) + 1
        self.say(
            "\n".join(
                textwrap.wrap(
                    line,
                    width,
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
        )

    def close(self) -> None:
        if self.bar:
            self.bar.live.stop()
            self.bar = None

    def _forget(self) -> None:
        """Drops what no later step needs: a run may have a million."""
        newest = max((step for step in self.evals if step <= self.shown), default=0)
        self.evals = {step: value for step, value in self.evals.items() if step >= newest}
        self.lines = {key: line for key, line in self.lines.items() if key[0] > self.shown}

    def _complete(self, step: int) -> bool:
        return all((step, source) in self.lines for source in self.sources)

    def _show_step(self, step: int) -> None:
        columns, screen = (
            fit_columns(self.columns, self.width),
            self.bar.console.height - 3 if self.bar else SCREEN,
        )
        if columns != self.headed or self.lines_since >= screen:
            self.say(header(columns))
            self.headed, self.lines_since = columns, 0
        orchestrator, trainer = (
            self.lines.get((step, "orchestrator"), {}),
            self.lines[step, "trainer"],
        )
        self.shown = step
        self._note_pace(step)
        newest = max((at for at in self.evals if at <= step), default=None)
        own = {"eval": {"newest": self.evals.get(newest)}, "console": {"left": self._left()}}
        row = step_line(step, {"orchestrator": orchestrator, "trainer": trainer, **own}, columns)
        long = length_texts(self.config, orchestrator)
        notes = [
            *step_notes(orchestrator, trainer, self.config.orchestrator.batch_size),
            *(note for note, _ in long.values()),
        ]
        self.say("\n".join(packed([row, *notes], self.width, STEP_WIDTH + 2)))
        for metric in sorted(long.keys() - self.explained):
            self._say_folded(f"  step {step}: {long[metric][1]} ({metric})")
        self.explained |= long.keys()
        if orchestrator.get("rollouts/missing") and "short batch" not in self.explained:
            self._explain_short_batch(step, orchestrator)
        every = self.config.orchestrator.show_rollout_every
        if every and (step == 1 or step % every == 0) and (rollout := self._example(step)):
            self.say(rollout_text({"step": step} | rollout))

    def _explain_short_batch(self, step: int, line: Line) -> None:
        """Explains once why a batch is smaller than configured."""
        self.explained.add("short batch")
        limit, played = self.config.orchestrator.max_refill, line.get("rollouts/finished", 0)
        self._say_folded(
            f"  step {step} trained a short batch: too few of the {played:g} rollouts that "
            "finished since the previous batch are in groups "
            f"that can be trained; no more than orchestrator.max_refill = {limit} batches' "
            "worth are begun for each batch that may be "
            f"sampled by now (max_lag = {self.config.max_lag})"
        )

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

    def _say_new_phases(self, statuses: dict[str, RoleStatus]) -> None:
        """Prints what a process does when it enters another phase, but not when only the step or
        detail changes."""
        for name, status in statuses.items():
            if status.phase != self.phases.get(name):
                self.say(f"  {name}: {describe(status)}")
                self.phases[name] = status.phase


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

        orchestrator, width = statuses.get("orchestrator", RoleStatus()), self.console.width
        done, size, batch = step, max_steps, ""
        if (
            0 < (orchestrator.batch or 0) <= max_steps
            and orchestrator.batch_done is not None
            and orchestrator.batch_size
        ):
            done, size = orchestrator.batch_done, orchestrator.batch_size
            batch = f", batch {orchestrator.batch} {done}/{size}"
        text = clip(
            f"step {step}/{max_steps}{batch}" + (f", {left} left" if left else ""), width - 1
        )
        bar = min(24, width - len(text) - 2)
        first = Table.grid(padding=(0, 1))
        cells = [Text(text), *([Bar(total=size, completed=done, width=bar)] if bar >= 4 else [])]
        doing = [
            visible(phase_text(name, status, time.time())) for name, status in statuses.items()
        ]
        if len(line := "  ".join(doing)) <= width - len(text) - bar - 3:
            first.add_row(*cells, Text(line))
            self.live.update(first, refresh=True)
        else:
            first.add_row(*cells)
            below = [Text(clip(line, width - 1), no_wrap=True) for line in packed(doing, width - 1)]
            self.live.update(Group(first, *below), refresh=True)
