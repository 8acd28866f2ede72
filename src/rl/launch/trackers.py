"""Services and files beside metrics.jsonl that get a run's numbers: each reads the same lines. The files of the run are the truth."""

from collections.abc import Callable
from typing import Any, Protocol

from rl.config.run import RLConfig
from rl.run_dir.paths import RunDir

Say = Callable[[str], None]


class Tracker(Protocol):
    """One of them. A failure within it is a warning that it says itself, never an error of the run."""

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Takes lines of metrics.jsonl. The first calls bring those that were there before, of which it may know some already."""

    def close(self, exit_code: int) -> None:
        """Ends it, when everything is sent."""


def trackers(config: RLConfig, run_dir: RunDir, say: Say) -> list[Tracker]:
    """Those that the configuration asks for. Raises RunError for one that is not installed."""
    found: list[Tracker] = []
    if config.wandb:
        from rl.launch.wandb_log import WandbLog

        found.append(WandbLog(config, run_dir, say))
    if config.tensorboard:
        from rl.launch.tensorboard_log import TensorboardLog

        found.append(TensorboardLog(run_dir, say))
    return found
