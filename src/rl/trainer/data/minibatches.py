"""Defines what each optimizer step trains on: the minibatches of a batch, their tokens' weights,
and the policy that the batch began with.

A minibatch consists of whole groups, so it keeps the batch's baselines and shared prompts. All
epochs go through the same minibatches in the same order. Weights are published and saved only
between batches: a policy version is the result of one whole batch. docs/algorithms.md has the
sources.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rl.config.loss import ClippedSettings, CustomConfig, LossSettings
from rl.config.trainer import TrainerConfig
from rl.wire.messages import TrainBatch


def cut(batch: TrainBatch, count: int, seed: int) -> list[list[int]]:
    """Returns the indices of each minibatch's samples, in training order.

    Shuffles the groups by seed and step; the minibatches' numbers of groups differ by at most one.
    A batch with fewer groups than `count` has fewer minibatches: none is empty.
    """
    if count == 1:
        return [list(range(len(batch.samples)))]
    groups = defaultdict[int, list[int]](list)
    for index, sample in enumerate(batch.samples):
        if sample.spans:
            groups[sample.group_id].append(index)
    order = np.random.Generator(np.random.PCG64([seed, batch.step])).permutation(sorted(groups))
    divided = np.array_split(order, max(1, min(count, len(groups))))
    return [[index for group in part.tolist() for index in groups[group]] for part in divided]


def minibatch_weights(
    batch: TrainBatch, divided: Sequence[Sequence[int]], config: LossSettings, constant_length: int
) -> list[float]:
    """Returns the weight of each sample's loss tokens in the loss of its own minibatch, see
    LossSettings.sample_weights."""
    weights = [0.0] * len(batch.samples)
    for indices in divided:
        counts = [batch.samples[index].num_trained for index in indices]
        values = config.sample_weights(counts, constant_length)
        for index, weight in zip(indices, values, strict=True):
            weights[index] = weight
    return weights


def compares_with_old(settings: TrainerConfig) -> bool:
    """Whether the loss compares with the policy that the batch began with, and so needs its
    log-probabilities. Clipped and custom losses do if a batch has several optimizer steps; with
    a single one that policy is the one being trained."""
    return settings.minibatches * settings.epochs > 1 and isinstance(
        settings.loss, ClippedSettings | CustomConfig
    )
