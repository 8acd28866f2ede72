"""Services and files that receive a run's metrics in addition to metrics.jsonl, which remains the source of truth."""

from collections.abc import Callable
from typing import Any, Protocol

from rl.config.run import RLConfig
from rl.run_dir.paths import RunDir

Say = Callable[[str], None]


class Tracker(Protocol):
    """A service or file that receives metrics. It reports its own failures as warnings; they are never errors of the run."""

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Takes lines of metrics.jsonl. The first calls bring existing lines, some of which it may have received in an earlier start."""

    def close(self, exit_code: int) -> None:
        """Closes it after everything is sent."""


def trackers(config: RLConfig, run_dir: RunDir, say: Say) -> list[Tracker]:
    """Returns the trackers that the configuration requests. Raises RunError if one is not installed."""
    found: list[Tracker] = []
    if config.wandb:
        from rl.launch.wandb_log import WandbLog

        found.append(WandbLog(config, run_dir, say))
    if config.tensorboard:
        from rl.launch.tensorboard_log import TensorboardLog

        found.append(TensorboardLog(run_dir, say))
    return found
