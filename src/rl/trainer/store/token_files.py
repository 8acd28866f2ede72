"""The thread that writes a step's token log while the next step trains, and deletes old logs."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from rl.config.trainer import TokenLogConfig
from rl.run_dir import spans
from rl.run_dir.lease import check_fence
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import Phase
from rl.run_dir.token_log import SUFFIX, write_token_log
from rl.trainer.store.single_task_thread import SingleTaskThread

DISK_S = 600.0
"""Seconds allowed for writing a file of a few megabytes."""
GIB = 1 << 30


class TokenFiles:
    """Writes at most one file at a time. Only rank 0's instance does any work."""

    def __init__(
        self,
        run_dir: RunDir,
        config: TokenLogConfig,
        enter: Callable[[Phase, int], None] = lambda *_: None,
    ):
        """`enter`: as Status.enter; called when writing has failed, so that the last status does
        not say "training": readers would blame the batch."""
        self.run_dir, self.max_bytes = run_dir, config.max_gib * GIB
        self.sizes: dict[int, int] | None = None
        """Bytes of the files by step, oldest first; None before the directory has been listed."""
        self.thread = SingleTaskThread()
        self.thread.on_error = lambda: enter(Phase.WRITING_TOKEN_LOG, self.newest_started)
        self.newest_started = 0
        """The newest step whose log was started."""

    def start(self, step: int, columns: Mapping[str, np.ndarray] | None) -> None:
        """Starts to write the log of a step; `columns` is None on all ranks but 0. Waits for:
        the previous log."""
        self.finish()
        if columns is not None:
            self.newest_started = step
            self.thread.start(self._write, step, columns)

    def _write(self, step: int, columns: Mapping[str, np.ndarray]) -> None:
        with spans.span("write_token_log", "token_files", step):
            size = write_token_log(
                self.run_dir.tokens(step),
                columns,
                partial(check_fence, self.run_dir.lock("trainer")),
            )
        if self.sizes is None:
            self.sizes = {
                number: path.stat().st_size
                for number, path in numbered(self.run_dir.tokens_dir, SUFFIX).items()
            }
        self.sizes[step] = size
        while len(self.sizes) > 1 and sum(self.sizes.values()) > self.max_bytes:
            oldest = next(iter(self.sizes))
            del self.sizes[oldest]
            self.run_dir.tokens(oldest).unlink(missing_ok=True)

    def finish(self) -> None:
        """Waits until the file in progress is written, and raises the thread's error."""
        self.thread.result(
            f"a token log to be written to {self.run_dir.tokens_dir}: does that disk answer?",
            DISK_S,
        )
