"""Sends metrics.jsonl and some rollouts to Weights & Biases. A failure is only a warning: the
run's files are the source of truth."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from rl.config.command_line import without_none
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import TRAINED, messages_text, num_prompt_messages, read_rollouts
from rl.run_dir.files import CorruptFileError, write_file
from rl.run_dir.paths import RunDir
from rl.run_dir.status import read_json
from rl.system.credentials import redact
from rl.system.terminal import cut_middle

TABLE = "rollouts"
"""Name of the table, and key in wandb.json of the step whose rollouts were sent last."""
START_S, END_S = 20.0, 60.0
"""Seconds that W&B has to answer at the start, and to take what is left at the end; by itself it
would wait for ever."""
TABLE_S = 300.0
"""Seconds between two tables."""
FIELDS = (
    "step",
    "env",
    "task",
    "group_id",
    "rollout_id",
    "reward",
    "advantage",
    "outcome",
    "num_tokens",
)
MOST_CHARACTERS, MOST_LINES = 4000, 200
"""Limits of a conversation in the table."""


class Sent(msgspec.Struct):
    """The content of wandb.json: the id of the W&B run, and the newest step sent of each stream."""

    id: str = ""
    sent: dict[str, int] = {}


class WandbLog:
    """Sends each step of each stream once, even across resumes: wandb.json in the run directory has
    the W&B run's id and the steps sent.

    The table has the first rollouts of the newest step.
    """

    def __init__(self, config: RLConfig, run_dir: RunDir):
        import wandb

        assert config.wandb is not None
        self.config, self.settings, self.path, self.run_dir = (
            config,
            config.wandb,
            run_dir.wandb,
            run_dir,
        )
        self.table_at = time.monotonic()
        """Time at which the last table was sent, or at which this start began."""
        # of a damaged file: then a new W&B run gets all lines
        state = read_json(self.path, Sent) or Sent()
        self.id, self.sent = state.id or uuid.uuid4().hex[:12], state.sent
        # faults of wandb's server, its process and its input
        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)

    def start(self) -> None:
        import wandb

        self.run: Any = wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            name=self.settings.name or os.environ.get("WANDB_NAME") or self.config.name,
            group=self.settings.group,
            tags=self.settings.tags or None,
            notes=self.settings.notes,
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

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Sends the lines of steps that have not been sent yet."""
        new = [line for line in lines if line["step"] > self.sent.get(stream_of(line), -1)]
        if not new:
            return
        progress = dict(self.sent)
        for line in new:
            self.run.log(
                {
                    key: value
                    for key, value in line.items()
                    if key not in ("time", "source") and value is not None
                }
            )
            stream = stream_of(line)
            progress[stream] = max(progress.get(stream, -1), line["step"])
        self.sent = progress
        if time.monotonic() - self.table_at > TABLE_S:
            self._send_table()
        self._save()

    def _send_table(self) -> None:
        """Sends rollouts of the newest step unless they were sent already."""
        import wandb

        self.table_at, step = time.monotonic(), self.sent.get("orchestrator", 0)
        if step <= self.sent.get(TABLE, 0) or not self.settings.rollouts:
            return
        rows: list[Any] = list(islice(table_rows(self.run_dir, step), self.settings.rollouts))
        if rows:
            self.run.log(
                {TABLE: wandb.Table([*FIELDS, "fate", "conversation"], rows), "step": step}
            )
            self.sent[TABLE] = step

    def close(self, exit_code: int) -> None:
        """Finishes the W&B run after everything is sent."""
        self._send_table()
        self._save()
        self.run.finish(exit_code=exit_code)

    def _save(self) -> None:
        write_file(self.path, msgspec.json.encode(Sent(self.id, self.sent)))

    def fault(self, error: Exception) -> str:
        reason = f"{type(error).__name__}: {redact(str(error))}"
        later = (
            f"`wandb sync {self.run_dir.root / 'wandb' / 'latest-run'}` sends what it has not got"
        )
        return (
            f"Weights & Biases failed and gets no more metrics, the run continues: {reason}; "
            f"{later}"
        )


def stream_of(line: dict[str, Any]) -> str:
    """Returns the stream of a line, in which steps rise: its source, or one of several
    evaluations, each of which has a line for a step."""
    return next(
        ("/".join(key.split("/")[:2]) for key in line if key.startswith("eval/")), line["source"]
    )


def table_rows(run_dir: RunDir, step: int) -> Iterator[list[Any]]:
    """Yields the rollouts of a step as rows of FIELDS, fate and conversation, with secrets
    redacted."""
    with contextlib.suppress(FileNotFoundError, CorruptFileError):
        for row in read_rollouts(run_dir.rollouts(step)):
            text = cut_middle(
                redact(messages_text(row["messages"], num_prompt_messages(row))),
                MOST_CHARACTERS,
                MOST_LINES,
            )
            yield [*(row.get(name) for name in FIELDS), row.get("why") or TRAINED, text]
