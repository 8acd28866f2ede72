"""metrics.jsonl as TensorBoard's event files, in `tensorboard/` of the run. They follow from metrics.jsonl, so each start writes them anew,
and no step is in them twice."""

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

from rl.run_dir.metrics import ALWAYS
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError

PACKAGE = "tensorboardX"


class TensorboardLog:
    """A tracker, see rl.launch.trackers."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]):
        """Raises RunError without the package."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise RunError(f"tensorboard: needs a package that is not installed: `uv pip install {PACKAGE}`, or the extra `tensorboard`")
        from tensorboardX import SummaryWriter

        self.say, self.folder = say, run_dir.tensorboard
        self.writer: Any = None
        """None once a write has failed: then nothing is written any more."""
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.writer = SummaryWriter(str(self.folder), flush_secs=2)
        except OSError as error:
            self._give_up(error)

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Writes the values of these lines at their steps and times."""
        if self.writer is None:
            return
        try:
            for line in lines:
                for name, value in line.items():
                    if name not in ALWAYS and value is not None:
                        self.writer.add_scalar(name, value, line["step"], line.get("time"))
        except OSError as error:
            self._give_up(error)

    def close(self, exit_code: int) -> None:
        """Writes what is still in memory."""
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.writer = None
        self.say(f"warning: {self.folder} cannot be written ({error.strerror or error}): TensorBoard gets no more numbers, the run goes on")
