"""Computes metrics of a step's tokens over all ranks and by environment, from sums, maxima and a
histogram: no tokens are gathered."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.loss.common import LossTerms
from rl.trainer.loss.kl import MAX_LOG_RATIO
from rl.trainer.measure.parity import ParitySums
from rl.trainer.measure.tokens import TokenColumns
from rl.trainer.model.head import Scores
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch

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
        size = len(self.envs)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(size, len(MEANS) + 1, dtype=torch.float64, device=device)
        """[E, values]: sums of the values in MEANS, and of tokens without gradient."""
        self.counts = torch.zeros(size, len(MEANS) + 1, dtype=torch.float64, device=device)
        """[E, values]: number of tokens that have the value."""
        self.log_ratios = torch.zeros(size, BINS, dtype=torch.float64, device=device)
        """[E, BINS]: number of tokens by the bin of log r."""
        self.kl_max = torch.zeros((), dtype=torch.float32, device=device)
        self.parity = ParitySums(device)
        """Agreement on the tokens that were sampled by exactly the version being trained."""

    @torch.no_grad()
    def add(
        self, batch: MicroBatch, loss: Tensor, scores: Scores, terms: LossTerms, first: bool = True
    ) -> None:
        """Adds a micro batch: its loss, and the values of its N tokens, each to the row of its
        environment.

        Never waits for the device: sums are read once per step. `first`: the policy has not been
        updated since the batch began. That policy is compared with the sampler, so later optimizer
        steps add to the comparison only if its log-probabilities were kept.
        """
        self.loss += loss
        if not len(terms.ratio):
            return
        if self.tokens:
            self.tokens.add(batch, scores, terms)
        nothing = torch.full_like(terms.ratio, math.nan)
        kl = terms.kl if first or terms.update_kl is not None else nothing
        kls = [torch.where(batch.fresh, kl, nothing), torch.where(batch.fresh, nothing, kl)]
        optional = [
            nothing if values is None else values
            for values in (terms.reference_kl, terms.update_kl)
        ]
        values = torch.stack(
            [scores.entropies, *kls, terms.ratio, *optional, terms.without_gradient.float()], dim=1
        ).double()
        has_value = ~values.isnan()
        self.sums.index_add_(0, batch.envs, torch.where(has_value, values, 0.0))
        self.counts.index_add_(0, batch.envs, has_value.double())
        bins = batch.envs * BINS + to_bin(terms.ratio.log())
        # nan: the sampler's is not known
        self.log_ratios.view(-1).index_add_(0, bins, (~terms.ratio.isnan()).double())
        self.kl_max = torch.maximum(self.kl_max, kls[0].nan_to_num(0.0).max())
        if first:
            self.parity.add(terms.ratio.log(), batch.fresh & ~batch.logprobs.isnan())

    def total_loss(self, world: World) -> float:
        """Returns the loss so far, summed over all ranks. Every rank calls this."""
        return float(world.reduce(self.loss.clone(), dist.ReduceOp.SUM))

    def metrics(self, world: World) -> dict[str, float]:
        """Returns the metrics over the tokens of all ranks. Every rank calls this."""
        parts = (self.sums, self.counts, self.log_ratios)
        flat = world.reduce(
            torch.cat([self.loss.view(1), *(part.flatten() for part in parts)]), dist.ReduceOp.SUM
        ).cpu()
        kl_max = float(world.reduce(self.kl_max, dist.ReduceOp.MAX))
        sums, counts, log_ratios = (
            part.view_as(like)
            for part, like in zip(
                flat[1:].split([part.numel() for part in parts]), parts, strict=True
            )
        )
        metrics = {"loss/mean": float(flat[0])} | metrics_of(
            "", sums.sum(0), counts.sum(0), log_ratios.sum(0)
        )
        if "mismatch_kl/mean" in metrics:
            metrics["mismatch_kl/max"] = kl_max
        for i, env in enumerate(self.envs):
            metrics |= metrics_of(env, sums[i], counts[i], log_ratios[i])
        return metrics


def metrics_of(env: str, sums: Tensor, counts: Tensor, log_ratios: Tensor) -> dict[str, float]:
    """Returns the metrics of one environment, or with an empty name those of all; without
    metrics that no token has a value for."""
    inner = f"{env}/" if env else ""
    names = [*(name.format(inner) for name in MEANS), f"masked_fraction/{env}".rstrip("/")]
    found = {
        name: float(total / count)
        for name, total, count in zip(names, sums, counts, strict=True)
        if count
    }
    if log_ratios.any():
        found |= {
            f"ratio/{inner}{name}": math.exp(quantile(log_ratios, q))
            for name, q in QUANTILES.items()
        }
    return found


def to_bin(log_ratio: Tensor) -> Tensor:
    """[N] log r -> [N] int64 bin, 0..BINS-1. Bins are equally wide in asinh(log r / FINEST): 2 %
    of |log r|, and 2e-6 around 0."""
    place = (torch.asinh(log_ratio / FINEST) / SCALE + 1.0) / 2.0
    return (place * BINS).long().clamp_(0, BINS - 1)


def quantile(counts: Tensor, q: float) -> float:
    """Returns the q-quantile of log r from the number of tokens in each bin, as the middle of
    its bin."""
    cumulative = counts.cumsum(0)
    place = int(torch.searchsorted(cumulative, q * cumulative[-1]))
    return FINEST * math.sinh(((place + 0.5) / BINS * 2.0 - 1.0) * SCALE)
