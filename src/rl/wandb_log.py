"""Weights & Biases as one more reader of metrics.jsonl. Its failure is a warning: the files are the truth."""

import json
import uuid
from typing import Any

from rl.cli import without_none
from rl.config import RLConfig
from rl.credentials import redact
from rl.files import write_file
from rl.run_dir import RunDir


class WandbLog:
    """Sends every step of every source once, also over resumes: wandb.json in the run directory has the run's id and how far it got."""

    def __init__(self, config: RLConfig, run_dir: RunDir):
        import wandb

        assert config.wandb is not None
        self.path = run_dir.root / "wandb.json"
        state = self._read()
        self.id: str = state.get("id") or uuid.uuid4().hex[:12]
        self.sent: dict[str, int] = state.get("sent", {})
        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)  # what wandb raises for its server, its process and its input
        self.run: Any = None
        self.trouble: str | None = None
        """Why nothing is sent any more; the caller says it once."""
        settings = config.wandb
        try:
            self.run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name or config.name,
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
        """Sends lines that are further than what this run there has."""
        progress = dict(self.sent)
        new = [line for line in lines if line["step"] > self.sent.get(line["source"], -1)]
        if not new or self.run is None:
            return
        try:
            for line in new:
                self.run.log({key: value for key, value in line.items() if key not in ("time", "source") and value is not None})
                progress[line["source"]] = max(progress.get(line["source"], -1), line["step"])
            self.sent = progress
            self._save()
        except self.failures as error:
            self._give_up(error)

    def close(self, exit_code: int) -> None:
        """Waits until everything is sent."""
        if self.run is not None:
            try:
                self.run.finish(exit_code=exit_code)
            except self.failures as error:
                self._give_up(error)

    def _read(self) -> dict[str, Any]:
        """What is known there. Of a damaged file nothing: then it is a new run there, with all numbers."""
        try:
            state = json.loads(self.path.read_bytes())
            return {"id": str(state["id"]), "sent": {str(source): int(step) for source, step in state["sent"].items()}}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self) -> None:
        write_file(self.path, json.dumps({"id": self.id, "sent": self.sent}).encode())

    def _give_up(self, error: BaseException) -> None:
        self.run = None
        self.trouble = f"Weights & Biases failed and gets no more numbers, the run goes on: {type(error).__name__}: {redact(str(error))}"
