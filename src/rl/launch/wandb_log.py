"""Sends metrics.jsonl and some rollouts to Weights & Biases. A failure is only a warning: the run's files are the source of truth."""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from rl.config.command_line import without_none
from rl.config.run import RLConfig
from rl.diagnosis.rollouts import TRAINED, messages_text, num_prompt_messages, read_rollouts
from rl.run_dir.files import CorruptFileError, write_file
from rl.run_dir.paths import RunDir
from rl.system.credentials import redact
from rl.system.terminal import cut_middle

TABLE = "rollouts"
"""Name of the table, and key in wandb.json of the step whose rollouts were sent last."""
TABLE_S = 300.0
"""Seconds between two tables."""
FIELDS = ("step", "env", "task", "group_id", "rollout_id", "reward", "advantage", "outcome", "num_tokens")
MOST_CHARACTERS, MOST_LINES = 4000, 200
"""Limits of a conversation in the table."""


class WandbLog:
    """Sends each step of each source once, even across resumes: wandb.json in the run directory has the W&B run's id and the steps sent.

    The table has the first rollouts of the newest step.
    """

    def __init__(self, config: RLConfig, run_dir: RunDir, say: Callable[[str], None]):
        import wandb

        assert config.wandb is not None
        self.path, self.say, self.run_dir, self.num_rollouts = run_dir.wandb, say, run_dir, config.wandb.rollouts
        self.table_at = time.monotonic()
        """Time at which the last table was sent, or at which this start began."""
        state = self._read()
        self.id: str = state.get("id") or uuid.uuid4().hex[:12]
        self.sent: dict[str, int] = state.get("sent", {})
        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)  # faults of wandb's server, its process and its input
        self.run: Any = None
        """None after W&B has failed: then nothing more is sent."""
        settings = config.wandb
        try:
            self.run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name or config.name,
                group=settings.group,
                tags=settings.tags or None,
                notes=settings.notes,
                id=self.id,
                resume="allow",
                dir=run_dir.root,
                config=without_none(config),
            )
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")  # evals come later than the step they belong to
            self._save()
        except self.failures as error:
            self._give_up(error)

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Sends the lines of steps that have not been sent yet."""
        progress = dict(self.sent)
        new = [line for line in lines if line["step"] > self.sent.get(line["source"], -1)]
        if not new or self.run is None:
            return
        try:
            for line in new:
                self.run.log({key: value for key, value in line.items() if key not in ("time", "source") and value is not None})
                progress[line["source"]] = max(progress.get(line["source"], -1), line["step"])
            self.sent = progress
            if time.monotonic() - self.table_at > TABLE_S:
                self._send_table()
            self._save()
        except self.failures as error:
            self._give_up(error)

    def _send_table(self) -> None:
        """Sends rollouts of the newest step unless they were sent already."""
        import wandb

        self.table_at, step = time.monotonic(), self.sent.get("orchestrator", 0)
        if step <= self.sent.get(TABLE, 0) or not self.num_rollouts:
            return
        rows: list[Any] = list(islice(table_rows(self.run_dir, step), self.num_rollouts))
        if rows:
            self.run.log({TABLE: wandb.Table([*FIELDS, "fate", "conversation"], rows), "step": step})
            self.sent[TABLE] = step

    def close(self, exit_code: int) -> None:
        """Finishes the W&B run after everything is sent."""
        if self.run is not None:
            try:
                self._send_table()
                self._save()
                self.run.finish(exit_code=exit_code)
            except self.failures as error:
                self._give_up(error)

    def _read(self) -> dict[str, Any]:
        """Reads wandb.json; empty if it is missing or damaged: then a new W&B run gets all lines."""
        try:
            state = json.loads(self.path.read_bytes())
            return {"id": str(state["id"]), "sent": {str(source): int(step) for source, step in state["sent"].items()}}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self) -> None:
        write_file(self.path, json.dumps({"id": self.id, "sent": self.sent}).encode())

    def _give_up(self, error: BaseException) -> None:
        self.run = None
        reason = f"{type(error).__name__}: {redact(str(error))}"
        self.say(f"warning: Weights & Biases failed and gets no more metrics, the run continues: {reason}")


def table_rows(run_dir: RunDir, step: int) -> Iterator[list[Any]]:
    """Yields the rollouts of a step as rows of FIELDS, fate and conversation, with secrets redacted."""
    with contextlib.suppress(FileNotFoundError, CorruptFileError):
        for row in read_rollouts(run_dir.rollouts(step)):
            text = cut_middle(redact(messages_text(row["messages"], num_prompt_messages(row))), MOST_CHARACTERS, MOST_LINES)
            yield [*(row.get(name) for name in FIELDS), row.get("why") or TRAINED, text]
