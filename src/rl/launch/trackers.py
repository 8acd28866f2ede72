"""Sends metrics.jsonl, and to Weights & Biases some rollouts, to trackers. A failure is only a
warning: the run's files are the source of truth."""

import contextlib
import importlib.util
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from rl.config.fields import without_none
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import TRAINED, messages_text, num_prompt_messages, read_rollouts
from rl.run_dir.files import CorruptFileError, write_file
from rl.run_dir.metrics import ALWAYS
from rl.run_dir.paths import RunDir
from rl.run_dir.status import read_json
from rl.system.credentials import redact
from rl.system.errors import RunError
from rl.system.terminal import cut_middle

TABLE = "rollouts"
"""Name of the table, and key in wandb.json of the step whose rollouts were sent last."""
START_S, END_S = 20.0, 60.0
"""Seconds that W&B has to answer at the start, and to take what is left at the end; by itself it
would wait for ever."""
TABLE_S = 300.0
"""Seconds between two tables."""
COLUMNS = "step env task group_id rollout_id reward advantage outcome num_tokens"
FIELDS = COLUMNS.split()
MOST_CHARACTERS, MOST_LINES = 4000, 200
"""Limits of a conversation in the table."""
PACKAGE = "tensorboardX"
FIRST_TIME = 1e9
"""Lower than any time, and higher than any step."""
Line = dict[str, Any]


def values_of(line: Line) -> Line:
    """Returns the metrics of a line that were measured."""
    return {key: value for key, value in line.items() if key not in ALWAYS and value is not None}


class Sent(msgspec.Struct):
    """The content of wandb.json: the id of the W&B run, and the newest `order_of` sent of each
    stream."""

    id: str = ""
    sent: dict[str, float] = {}


class WandbLog:
    """Sends each step of each stream once, and each line of totals, even across resumes: wandb.json
    in the run directory has the W&B run's id and what was sent.

    The table has the first rollouts of the newest step.
    """

    def __init__(self, config: RLConfig, run_dir: RunDir):
        import wandb

        assert config.wandb is not None
        self.config, self.settings, self.run_dir = config, config.wandb, run_dir
        self.table_at = time.monotonic()
        """Time at which the last table was sent, or at which this start began."""
        # of a damaged file: then a new W&B run gets all lines
        state = read_json(run_dir.wandb, Sent) or Sent()
        self.id, self.sent = state.id or uuid.uuid4().hex[:12], state.sent
        if self.sent.get("rl", FIRST_TIME) < FIRST_TIME:  # an older version's: a step
            self.sent["rl"] = time.time()
        # faults of wandb's server, its process and its input
        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)

    def start(self) -> None:
        import wandb

        settings = self.settings
        self.run: Any = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or os.environ.get("WANDB_NAME") or self.config.name,
            group=settings.group,
            tags=settings.tags or None,
            notes=settings.notes,
            id=self.id,
            resume="allow",
            dir=self.run_dir.root,
            config=without_none(self.config),
            settings=wandb.Settings(
                init_timeout=START_S, finish_timeout=END_S, finish_timeout_raises=True
            ),
        )
        self.run.define_metric("step")
        # evals come later than the step they belong to
        self.run.define_metric("*", step_metric="step")
        self._save()

    def send(self, lines: list[Line]) -> None:
        """Sends the lines that have not been sent yet."""
        progress = dict(self.sent)
        new = [line for line in lines if order_of(line) > self.sent.get(stream_of(line), -1)]
        for line in new:
            self.run.log(values_of(line) | {"step": line["step"]})
            stream = stream_of(line)
            progress[stream] = max(progress.get(stream, -1), order_of(line))
        self.sent = progress
        if new:
            if time.monotonic() - self.table_at > TABLE_S:
                self._send_table()
            self._save()

    def _send_table(self) -> None:
        """Sends rollouts of the newest step unless they were sent already."""
        import wandb

        self.table_at = time.monotonic()
        step = int(self.sent.get("orchestrator", 0))
        if step <= self.sent.get(TABLE, 0):
            return
        rows: list[Any] = list(islice(table_rows(self.run_dir, step), self.settings.rollouts))
        if rows:
            table = wandb.Table([*FIELDS, "fate", "conversation"], rows)
            self.run.log({TABLE: table, "step": step})
            self.sent[TABLE] = step

    def close(self, exit_code: int) -> None:
        """Finishes the W&B run after everything is sent."""
        self._send_table()
        self._save()
        self.run.finish(exit_code=exit_code)

    def _save(self) -> None:
        write_file(self.run_dir.wandb, msgspec.json.encode(Sent(self.id, self.sent)))

    def fault(self, error: Exception) -> str:
        return (
            "Weights & Biases failed and gets no more metrics, the run continues: "
            f"{type(error).__name__}: {redact(str(error))}; `wandb sync "
            f"{self.run_dir.root}/wandb/latest-run` sends what it has not got"
        )


def stream_of(line: Line) -> str:
    """Returns the stream of a line, in which steps rise: its source, or one of several
    evaluations, each of which has a line for a step."""
    return next(
        ("/".join(key.split("/")[:2]) for key in line if key.startswith("eval/")), line["source"]
    )


def order_of(line: Line) -> float:
    """Returns what rises from line to line of a stream: the step, or of the totals of `rl`, which
    writes a last line after the last step, the time."""
    return line.get("time", 0.0) if line["source"] == "rl" else line["step"]


def table_rows(run_dir: RunDir, step: int) -> Iterator[list[Any]]:
    """Yields the rollouts of a step as rows of FIELDS, fate and conversation, with secrets
    redacted."""
    with contextlib.suppress(FileNotFoundError, CorruptFileError):
        for row in read_rollouts(run_dir.rollouts(step)):
            text = redact(messages_text(row["messages"], num_prompt_messages(row)))
            fate = row.get("why") or TRAINED
            yield [*map(row.get, FIELDS), fate, cut_middle(text, MOST_CHARACTERS, MOST_LINES)]


class TensorboardLog:
    """Writes event files in `tensorboard/` of the run. Each start rewrites them from
    metrics.jsonl. Of a step that was trained again after a crash they have the first values alone,
    but every total."""

    failures = (OSError,)

    def __init__(self, run_dir: RunDir):
        """Raises RunError without the package."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise RunError(
                "tensorboard: needs a package that is not installed: `uv pip install "
                f"{PACKAGE}`, or the extra `tensorboard`"
            )
        self.folder = run_dir.tensorboard
        self.sent: dict[str, float] = {}
        """The last `order_of` of each metric."""

    def start(self) -> None:
        # Not SummaryWriter: a full disk kills its thread, and then every write waits for that
        # thread forever.
        from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.writer = EventsWriter(str(self.folder / "events"))

    def send(self, lines: list[Line]) -> None:
        """Writes the values of these lines at their steps and times, but for what a metric already
        has."""
        # made by protobuf at import
        from tensorboardX.proto.event_pb2 import Event  # ty: ignore[missing-module-member]
        from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]

        for line in lines:
            values, order = values_of(line), order_of(line)
            new = [key for key in values if order > self.sent.get(key, -1)]
            self.sent |= dict.fromkeys(new, order)
            summary = Summary(
                value=[Summary.Value(tag=key, simple_value=values[key]) for key in new]
            )
            self.writer.write_event(
                Event(wall_time=line.get("time"), step=line["step"], summary=summary)
            )
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        self.writer.close()

    def fault(self, error: Exception) -> str:
        return f"TensorBoard gets no more data, the run continues: {error}"


class Trackers:
    """What receives the lines of metrics.jsonl in addition. One that fails is reported and gets
    no more."""

    def __init__(self, config: RLConfig, run_dir: RunDir, say: Callable[[str], None]):
        """Raises RunError if a package is not installed."""
        self.say = say
        self.left: list[Any] = []
        if config.prometheus:  # first: its port may be taken
            from rl.launch.scrape import Scrape

            self.left.append(Scrape(config, run_dir, say))
        if config.wandb:
            self.left.append(WandbLog(config, run_dir))
        if config.tensorboard:
            self.left.append(TensorboardLog(run_dir))
        self._each("start")

    def send(self, lines: list[Line]) -> None:
        """Sends lines; at first existing ones, some of which a tracker may have received in an
        earlier start."""
        if lines:
            self._each("send", lines)

    def close(self, exit_code: int) -> None:
        self._each("close", exit_code)

    def _each(self, method: str, *arguments: Any) -> None:
        for tracker in [*self.left]:
            try:
                getattr(tracker, method)(*arguments)
            except tracker.failures as error:
                self.left.remove(tracker)
                self.say(f"warning: {tracker.fault(error)}")
