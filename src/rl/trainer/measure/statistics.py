"""What a step computes at its tokens: metrics over all ranks and by environment, and the token log.

Metrics are made of sums, maxima and a histogram: no tokens are gathered. The values at each trained
token, in the order of the batch's samples, are kept on the device until the step ends, and written
while the next step trains.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.trainer import TokenLogConfig
from rl.run_dir import spans
from rl.run_dir.lease import check_fence
from rl.run_dir.numbers import CLIPPED, FIRST, LATER, MASKED, SUFFIX, write_token_log
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import Phase
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.loss.common import MAX_LOG_RATIO, LossTerms
from rl.trainer.measure.parity import ParitySums
from rl.trainer.model.head import Scores
from rl.trainer.parallel.world import World
from rl.trainer.store.threads import SingleTaskThread
from rl.wire.messages import TrainBatch

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
    def add(
        self, batch: MicroBatch, scores: Scores, terms: LossTerms, is_first_update: bool
    ) -> None:
        """Records the tokens of a micro batch. For tokens recorded in an earlier epoch, records
        only whether they now have no gradient.

        Never waits for the device.
        """
        ones = torch.ones_like(terms.ratio)
        flags = FIRST * is_first_update + CLIPPED * terms.clipped + MASKED * terms.masked
        reference = torch.zeros_like(ones)
        if batch.reference_logprobs is not None:
            reference = batch.reference_logprobs
        columns = [ones, scores.trainer_logprobs, scores.entropies, flags.float(), reference]
        old = self.values[:, batch.token_index]
        old[3] += LATER * terms.without_gradient * (old[3] % FIRST < LATER)
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


FINEST = 1e-4
"""Up to about this |log r| bins have equal widths; beyond it their width grows with |log r|."""
SCALE = math.asinh(MAX_LOG_RATIO / FINEST)
BINS = 1025
"""An odd number, so that log r = 0 is the middle of a bin."""
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
MEANS = (
    "entropy/{}mean",
    "mismatch_kl/{}mean",
    "lag_kl/{}mean",
    "ratio/{}mean",
    "reference_kl/{}mean",
    "update_kl/{}mean",
    "masked_fraction/{}",
)
"""Metrics that are means over the tokens that have the value; `{}` is an environment's name with
a slash, or empty."""


class Statistics:
    """Sums over the loss tokens of this rank's micro batches, one row for each of the batch's E
    environments."""

    def __init__(
        self, batch: TrainBatch, device: torch.device, tokens: TokenColumns | None = None
    ) -> None:
        """`tokens`: collects the values of each token; None if they are not kept."""
        self.envs, self.tokens = batch.envs, tokens
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        widths = [len(MEANS), len(MEANS), BINS]
        self.table = torch.zeros(len(self.envs), sum(widths), dtype=torch.float64, device=device)
        """[E, values]: the three parts below."""
        self.sums, self.counts, self.bins = self.table.split(widths, 1)
        """The sums of the values in MEANS, the number of tokens that have the value, and the
        number of tokens in each bin of log r."""
        self.kl_max = torch.zeros((), dtype=torch.float32, device=device)
        self.parity = ParitySums(device)
        """Agreement on the tokens that were sampled by exactly the version being trained."""

    @torch.no_grad()
    def add(
        self,
        batch: MicroBatch,
        loss: Tensor,
        scores: Scores,
        terms: LossTerms,
        is_first_update: bool = True,
    ) -> None:
        """Adds a micro batch: its loss, and the values of its N tokens, each to the row of its
        environment.

        Never waits for the device: sums are read once per step.

        `is_first_update`: no optimizer step of this batch has run yet. The policy before that step
        is compared with the sampler. Later steps add to the comparison only if its
        log-probabilities were kept.
        """
        self.loss += loss
        if not len(terms.ratio):
            return
        if self.tokens:
            self.tokens.add(batch, scores, terms, is_first_update)
        nothing, log_ratio = torch.full_like(terms.ratio, math.nan), terms.ratio.log()
        kl = terms.kl if is_first_update or terms.update_kl is not None else nothing
        lag_zero_kl = torch.where(batch.lag_zero, kl, nothing)
        columns = (
            scores.entropies,
            lag_zero_kl,
            torch.where(batch.lag_zero, nothing, kl),
            terms.ratio,
            terms.reference_kl,
            terms.update_kl,
            terms.without_gradient.float(),
        )
        values = torch.stack([nothing if x is None else x for x in columns], dim=1).double()
        has_value = ~values.isnan()
        # not nan_to_num, which makes a plausible number of an infinite one
        self.sums.index_add_(0, batch.envs, torch.where(has_value, values, 0.0))
        self.counts.index_add_(0, batch.envs, has_value.double())
        # nan: the sampler's is not known
        known = (~terms.ratio.isnan()).double()
        self.bins.index_put_((batch.envs, to_bin(log_ratio)), known, accumulate=True)
        self.kl_max = torch.maximum(self.kl_max, lag_zero_kl.nan_to_num(0.0).max())
        if is_first_update:
            self.parity.add(log_ratio, batch.lag_zero & ~batch.logprobs.isnan())

    def total_loss(self, world: World) -> float:
        """Returns the loss so far, summed over all ranks. Every rank calls this."""
        return float(world.reduce(self.loss.clone(), dist.ReduceOp.SUM))

    def metrics(self, world: World) -> dict[str, float]:
        """Returns the metrics over the tokens of all ranks. Every rank calls this."""
        table = world.reduce(self.table, dist.ReduceOp.SUM).cpu()
        kl_max = float(world.reduce(self.kl_max, dist.ReduceOp.MAX))
        metrics = {"loss/mean": self.total_loss(world)} | metrics_of("", table.sum(0))
        if "mismatch_kl/mean" in metrics:
            metrics["mismatch_kl/max"] = kl_max
        for env, row in zip(self.envs, table, strict=True):
            metrics |= metrics_of(f"{env}/", row)
        return metrics


def metrics_of(prefix: str, row: Tensor) -> dict[str, float]:
    """Returns the metrics of one environment, or with an empty prefix those of all; without
    metrics that no token has a value for."""
    sums, counts, bins = row.split([len(MEANS), len(MEANS), BINS])
    metrics = {
        name.format(prefix).rstrip("/"): float(total / count)
        for name, total, count in zip(MEANS, sums, counts, strict=True)
        if count
    }
    if bins.any():
        for name, q in QUANTILES.items():
            metrics[f"ratio/{prefix}{name}"] = math.exp(quantile(bins, q))
    return metrics


def to_bin(log_ratio: Tensor) -> Tensor:
    """[N] log r -> [N] int64 bin, 0..BINS-1. Bins are equally wide in asinh(log r / FINEST): 2 %
    of |log r|, and 2e-6 around 0."""
    fraction = (torch.asinh(log_ratio / FINEST) / SCALE + 1.0) / 2.0
    return (fraction * BINS).long().clamp_(0, BINS - 1)


def quantile(counts: Tensor, q: float) -> float:
    """Returns the q-quantile of log r from the number of tokens in each bin, as the middle of
    its bin."""
    cumulative = counts.cumsum(0)
    index = int(torch.searchsorted(cumulative, q * cumulative[-1]))
    return FINEST * math.sinh(((index + 0.5) / BINS * 2.0 - 1.0) * SCALE)
