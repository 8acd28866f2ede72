"""The detection of batches that kill the trainer."""

import json
import time
from pathlib import Path
from typing import Any

from rl.launch.role_state import Death
from rl.run_dir.files import write_file
from rl.run_dir.paths import RunDir


class Quarantine:
    """Finds a batch that repeatedly kills the trainer, and marks it to be skipped."""

    def __init__(self, run_dir: RunDir, patience: int):
        self.run_dir, self.patience = run_dir, patience
        self.step, self.deaths = 0, list[Death]()
        self.in_a_row = list[int]()
        """Quarantined steps without a good step since the first of them."""
        self.error = ""
        """The error with which the trainer ended in the newest of them."""

    def note_steps(self, lines: list[dict[str, Any]]) -> None:
        """Processes new lines of the trainer's metrics: a step that was completed did not kill
        the trainer."""
        for line in lines:
            if line["step"] >= self.step:
                self.deaths = []
            if self.in_a_row and line["step"] > self.in_a_row[-1] and not line.get("quarantined"):
                self.in_a_row = []

    def repeats(self, death: Death) -> bool:
        """Returns whether a death has the same error for which the previous batch was
        quarantined: then no batch is the cause."""
        return bool(
            self.in_a_row
            and death.error == self.error != ""
            and death.training_step not in (None, self.in_a_row[-1])
        )

    def note_death(self, death: Death) -> Path | None:
        """Counts deaths in the same step, ignoring those outside of training. Returns the marker
        if one was written."""
        if death.training_step is None:
            return None
        if death.training_step != self.step:
            self.step, self.deaths = death.training_step, []
        self.deaths.append(death)
        if len(self.deaths) < self.patience:
            return None
        path = self.run_dir.quarantined(self.step)
        record = {
            "step": self.step,
            "why": death.reason,
            "deaths": [str(death) for death in self.deaths],
            "time": round(time.time(), 3),
        }
        write_file(path, json.dumps(record, indent=2).encode() + b"\n")
        self.in_a_row.append(self.step)
        self.deaths, self.error = [], death.error
        return path
