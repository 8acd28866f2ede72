"""Writes metrics.jsonl as TensorBoard event files in `tensorboard/` of the run. Each start
rewrites them from metrics.jsonl, and no step of a metric is in them twice: of a step that was
trained again after a crash they have the first values."""

import importlib.util
import shutil
from typing import Any

from rl.run_dir.metrics import ALWAYS
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError

PACKAGE = "tensorboardX"


class TensorboardLog:
    """The event files of a run."""

    failures = (OSError,)

    def __init__(self, run_dir: RunDir):
        """Raises RunError without the package."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise RunError(
                "tensorboard: needs a package that is not installed: `uv pip install "
                f"{PACKAGE}`, or the extra `tensorboard`"
            )
        self.folder = run_dir.tensorboard

    def start(self) -> None:
        # Not SummaryWriter: a full disk kills its thread, and then every write waits for that
        # thread forever.
        from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.writer = EventsWriter(str(self.folder / "events"))
        self.sent: dict[str, int] = {}
        """The last step of each metric."""

    def send(self, lines: list[dict[str, Any]]) -> None:
        """Writes the values of these lines at their steps and times, but for steps that a metric
        already has."""
        # made by protobuf at import
        from tensorboardX.proto.event_pb2 import Event  # ty: ignore[missing-module-member]
        from tensorboardX.proto.summary_pb2 import Summary  # ty: ignore[missing-module-member]

        for line in lines:
            step, given = (
                line["step"],
                {
                    key: value
                    for key, value in line.items()
                    if key not in ALWAYS and value is not None
                },
            )
            new = {key: value for key, value in given.items() if step > self.sent.get(key, -1)}
            self.sent |= dict.fromkeys(new, step)
            values = [Summary.Value(tag=key, simple_value=value) for key, value in new.items()]
            self.writer.write_event(
                Event(wall_time=line.get("time"), step=step, summary=Summary(value=values))
            )
        self.writer.flush()

    def close(self, exit_code: int) -> None:
        self.writer.close()

    def fault(self, error: Exception) -> str:
        return f"TensorBoard gets no more data, the run continues: {error}"
