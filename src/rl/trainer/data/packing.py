"""Turns a batch of samples into this rank's micro batches: `prefix_tree` sorts the samples,
`balance` cuts them into ranges of equal cost, and each part becomes tensors. A token's hidden state
depends only on its ancestors, so log-probabilities and gradients equal those of the samples
computed one by one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from rl.trainer.data.balance import Layout, plan, range_tokens
from rl.trainer.data.micro_batch import MicroBatch, empty_micro_batch
from rl.trainer.data.prefix_tree import MicroBatchRange, SortedSamples, sort_samples
from rl.wire.messages import TrainBatch


@dataclass(frozen=True)
class Packed:
    """A batch and one rank's micro batches of it."""

    batch: TrainBatch
    minibatches: list[list[MicroBatch]]
    """The micro batches of each minibatch; every rank has the same number of them."""
    shared_token_fraction: float
    """Fraction of all ranks' input tokens that is not computed because another sample of the
    micro batch has the same prefix."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return list(chain(*self.minibatches))


def pack(
    batch: TrainBatch,
    weights: Sequence[float],
    layout: Layout,
    divided: Sequence[Sequence[int]] | None = None,
) -> Packed:
    """Packs a batch for one rank; every rank computes the same plan from the same batch and takes
    its part.

    `weights`: for each sample, the weight of each of its loss tokens, see minibatches.py.
    `divided`: for each minibatch, the indices of its samples; by default one holds all samples.
    """
    minibatches: list[list[MicroBatch]] = []
    computed = length = 0
    starts = list(accumulate((sample.num_trained for sample in batch.samples), initial=0))
    for indices in divided or [None]:
        ordered = sort_samples(batch, indices)
        ranks = plan(ordered, layout)
        minibatches.append(
            [to_micro_batch(ordered, part, batch, weights, starts) for part in ranks[layout.rank]]
        )
        computed += sum(range_tokens(ordered, part) for assigned in ranks for part in assigned)
        length += int(ordered.lengths.sum())
    return Packed(batch, minibatches, 1.0 - computed / max(1, length))


def to_micro_batch(
    ordered: SortedSamples,
    part: MicroBatchRange,
    batch: TrainBatch,
    weights: Sequence[float],
    starts: Sequence[int],
) -> MicroBatch:
    """Returns the samples of one range: their tokens as trees in one row, depth first, and the
    values of each loss token.

    `starts`: the number of the batch's loss tokens before each sample.
    """
    items, shared = ordered.items[slice(*part)], ordered.shared[slice(*part)].tolist()
    if not items:
        return empty_micro_batch()
    shared[0] = 0
    inputs, positions, routes, predicting = (list[np.ndarray]() for _ in range(4))
    subtree_ends = np.full(range_tokens(ordered, part), range_tokens(ordered, part))
    path, used = np.arange(0), 0
    for item, n in zip(items, shared, strict=True):
        # The previous item's tokens that this item does not share have no more descendants: their
        # subtrees end here.
        subtree_ends[path[n:]] = used
        inputs.append(item.inputs[n:])
        positions.append(np.arange(n, len(item.inputs)))
        path = np.concatenate([path[:n], used - n + positions[-1]])
        used += len(positions[-1])
        predicting.append(path[item.trained - 1])
        if item.routes is not None:
            routes.append(item.routes[n:])
    predicted_from = np.concatenate(predicting)
    order = np.argsort(predicted_from, kind="stable")
    predictors, first, predictor_of = np.unique(
        predicted_from[order], return_index=True, return_inverse=True
    )
    samples, indices = [item.sample for item in items], [item.sample_index for item in items]
    counts, envs = torch.tensor([len(item.trained) for item in items]), batch.envs

    def by_item(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(counts)[order]

    def by_token(columns: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*columns])[order])

    teacher = None
    if any(sample.packed_teacher is not None for sample in samples):
        teacher = by_token(
            np.full(sample.num_trained, np.nan, np.float32)
            if sample.teacher_logprobs is None
            else sample.teacher_logprobs
            for sample in samples
        )
    places = zip(indices, counts.tolist(), strict=True)
    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(inputs)).long(),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        subtree_ends=torch.from_numpy(subtree_ends),
        queries=None,
        predictors=torch.from_numpy(predictors),
        temperatures=by_item([sample.temperature for sample in samples])[first],
        predictor_of=torch.from_numpy(predictor_of),
        targets=by_token(item.sample.token_ids[item.trained] for item in items).long(),
        logprobs=by_token(sample.logprobs for sample in samples),
        advantages=by_token(sample.advantages for sample in samples),
        weights=by_item([float(weights[index]) for index in indices]),
        sequences=by_item(indices),
        token_index=by_token(np.arange(starts[index], starts[index] + n) for index, n in places),
        envs=by_item([envs.index(sample.env) for sample in samples]),
        teacher_logprobs=teacher,
        lag_zero=by_token(sample.versions == batch.step - 1 for sample in samples),
        # if the sampler gave those of all items
        routes=torch.from_numpy(np.concatenate(routes)) if len(routes) == len(items) else None,
    )
