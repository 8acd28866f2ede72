"""Turns a batch of samples into this rank's micro batches: `prefix_tree` sorts the samples,
`balance` cuts them into parts of equal cost, and each part becomes tensors. A token's hidden state
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
from rl.trainer.data.prefix_tree import MicroBatchRange, SortedSamples, lay_out, sort_samples
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
    parts: Sequence[Sequence[int]] | None = None,
) -> Packed:
    """Packs a batch for one rank; every rank computes the same plan from the same batch and takes
    its part.

    `weights`: for each sample, the weight of each of its loss tokens, see minibatches.py. `parts`:
    for each minibatch, the indices of its samples; by default one minibatch holds all samples.
    """
    minibatches, computed, length = [], 0, 0
    starts = list(accumulate((sample.num_trained for sample in batch.samples), initial=0))
    for indices in parts or [None]:
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
    """Returns the samples of one part: their tokens as trees in one row, and the values of each
    loss token.

    `starts`: the number of the batch's loss tokens before each sample.
    """
    items = ordered.items[part[0] : part[1]]
    if not items:
        return empty_micro_batch()
    token_ids, positions, subtree_ends, paths, routes = lay_out(ordered, part)
    predicted_from = np.concatenate(
        [path[item.trained - 1] for item, path in zip(items, paths, strict=True)]
    )
    order = np.argsort(predicted_from, kind="stable")
    predictors, first, predictor_of = np.unique(
        predicted_from[order], return_index=True, return_inverse=True
    )
    counts = [len(item.trained) for item in items]

    def by_item(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts)[order])

    def by_token(columns: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*columns])[order])

    env_of = {env: i for i, env in enumerate(batch.envs)}
    samples = [item.sample for item in items]
    teachers = [sample.teacher_logprobs for sample in samples]
    none = [np.full(count, np.nan, np.float32) for count in counts]
    teachers_or_none = [
        missing if values is None else values
        for values, missing in zip(teachers, none, strict=True)
    ]
    return MicroBatch(
        input_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(positions),
        subtree_ends=torch.from_numpy(subtree_ends),
        queries=None,
        predictors=torch.from_numpy(predictors),
        temperatures=by_item([item.sample.temperature for item in items], np.float32)[
            torch.from_numpy(first)
        ],
        predictor_of=torch.from_numpy(predictor_of),
        targets=by_token(item.sample.token_ids[item.trained].astype(np.int64) for item in items),
        logprobs=by_token(sample.logprobs for sample in samples),
        advantages=by_token(sample.advantages for sample in samples),
        weights=by_item([weights[item.sample_index] for item in items], np.float32),
        sequences=by_item([item.sample_index for item in items], np.int64),
        token_index=by_token(
            starts[item.sample_index] + np.arange(count)
            for item, count in zip(items, counts, strict=True)
        ),
        envs=by_item([env_of[item.sample.env] for item in items], np.int64),
        teacher_logprobs=None
        if all(values is None for values in teachers)
        else by_token(teachers_or_none),
        fresh=by_token(sample.versions == batch.step - 1 for sample in samples),
        routes=None if routes is None else torch.from_numpy(routes),
    )
