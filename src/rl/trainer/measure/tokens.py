"""The values that a step computes at each trained token, in the order of the batch's samples: kept
on the device until the step ends, and written while the next step trains."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from rl.config.trainer import TokenLogConfig
from rl.run_dir import spans
from rl.run_dir.lease import check_fence
from rl.run_dir.numbers import CLIPPED, LATER, MASKED, SUFFIX, write_token_log
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import Phase
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.loss.common import LossTerms
from rl.trainer.model.head import Scores
from rl.trainer.parallel.world import World
from rl.trainer.store.single_task_thread import SingleTaskThread

COLUMNS = {
    "trainer_logprobs": torch.float32,
    "entropies": torch.float16,
    "flags": torch.uint8,
    "reference_logprobs": torch.float32,
}
"""The columns of rl.run_dir.numbers, and their types there."""
DISK_S = 600.0
"""Seconds allowed for writing a file of a few megabytes."""


class TokenColumns:
    """Values of a batch's n loss tokens, [1 + COLUMNS, n] float32: whether a token is in this
    rank's micro batches, and the columns; 0 for tokens that are not."""

    def __init__(self, num_tokens: int, device: torch.device, has_reference: bool) -> None:
        self.has_reference = has_reference
        self.values = torch.zeros(1 + len(COLUMNS), num_tokens, device=device)

    @torch.no_grad()
    def add(self, batch: MicroBatch, scores: Scores, terms: LossTerms) -> None:
        """Records the tokens of a micro batch. For tokens recorded in an earlier epoch, records
        only whether they now have no gradient.

        Never waits for the device.
        """
        ones, flags = torch.ones_like(terms.ratio), CLIPPED * terms.clipped + MASKED * terms.masked
        reference = torch.zeros_like(ones)
        if batch.reference_logprobs is not None:
            reference = batch.reference_logprobs
        columns = [ones, scores.logprobs, scores.entropies, flags.float(), reference]
        old = self.values[:, batch.token_index]
        old[3] += LATER * terms.without_gradient * (old[3] < LATER)
        new = torch.where(old[0] > 0, old, torch.stack(columns))
        self.values.index_copy_(1, batch.token_index, new)

    def columns(self, world: World) -> dict[str, np.ndarray] | None:
        """Returns the columns of rl.run_dir.numbers on rank 0, None on the others. Every rank
        calls this: each has some tokens."""
        values = world.reduce(self.values, dist.ReduceOp.SUM)
        if not world.is_main:
            return None
        # copies, which another thread can use
        columns = {
            name: row.to(dtype, copy=True).numpy()
            for row, (name, dtype) in zip(values[1:].cpu(), COLUMNS.items(), strict=True)
        }
        if not self.has_reference:
            del columns["reference_logprobs"]
        return columns


class TokenFiles:
    """The thread that writes the token logs, one at a time, and deletes old ones. Only rank 0's
    instance does any work."""

    def __init__(
        self,
        run_dir: RunDir,
        config: TokenLogConfig,
        enter: Callable[[Phase, int], None] = lambda *_: None,
    ) -> None:
        """`enter`: as Status.enter; called when writing has failed, so that the last status does
        not say "training": readers would blame the batch."""
        self.run_dir, self.max_bytes = run_dir, config.max_gib * 2**30
        self.sizes: dict[int, int] = {}
        """Bytes of the files by step, oldest first; empty before the directory has been listed."""
        self.thread = SingleTaskThread()
        self.thread.on_error = lambda: enter(Phase.WRITING_TOKEN_LOG, self.newest_started)
        self.newest_started = 0
        """The newest step whose log was started."""

    def start(self, step: int, columns: dict[str, np.ndarray] | None) -> None:
        """Starts to write the log of a step; `columns` is None on all ranks but 0. Waits for:
        the previous log."""
        self.finish()
        if columns is not None:
            self.newest_started = step
            self.thread.start(self._write, step, columns)

    def _write(self, step: int, columns: dict[str, np.ndarray]) -> None:
        fence = partial(check_fence, self.run_dir.lock("trainer"))
        with spans.span("write_token_log", "token_files", step):
            size = write_token_log(self.run_dir.tokens(step), columns, fence)
        self.sizes = self.sizes or {
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
