"""Several optimizer steps a batch: its minibatches, and the policy that it began with. docs/algorithms.md has the sources.

A minibatch is a part of whole groups, so that it has baselines and shared prompts as the batch has them. All epochs go through the same
minibatches in the same order. What is published and saved lies between batches: a policy version is a batch trained.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rl.config.loss import ClippedSettings, CustomConfig, LossSettings
from rl.config.trainer import TrainerConfig
from rl.trainer.loss import sample_weights
from rl.trainer.model import score
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel.world import World
from rl.wire.messages import TrainBatch


def cut(batch: TrainBatch, count: int, seed: int) -> list[list[int]]:
    """The places of the samples of each minibatch, in the order in which they are trained.

    Groups in a random order, which follows from seed and step, and as many of them in each minibatch, to one. A batch with fewer groups has
    fewer minibatches: none is empty.
    """
    if count == 1:
        return [list(range(len(batch.samples)))]
    groups: dict[int, list[int]] = defaultdict(list)
    for place, sample in enumerate(batch.samples):
        if any(sample.loss_mask):
            groups[sample.group_id].append(place)
    order = np.random.Generator(np.random.PCG64([seed, batch.step])).permutation(sorted(groups))
    parts = np.array_split(order, max(1, min(count, len(groups))))
    return [[place for group in part.tolist() for place in groups[group]] for part in parts]


def minibatch_weights(batch: TrainBatch, parts: Sequence[Sequence[int]], config: LossSettings, constant_length: int) -> list[float]:
    """Weight of each sample's loss tokens in the loss of its own minibatch, see `sample_weights`."""
    weights = [0.0] * len(batch.samples)
    for places in parts:
        for place, weight in zip(places, sample_weights([batch.samples[i] for i in places], config, constant_length), strict=True):
            weights[place] = weight
    return weights


def compares_with_old(settings: TrainerConfig) -> bool:
    """Whether the loss gets the log-probabilities of the policy that the batch began with: with several optimizer steps a clipped one, and
    one of the user's."""
    return settings.minibatches * settings.epochs > 1 and isinstance(settings.loss, ClippedSettings | CustomConfig)


@torch.no_grad()
def keep_old_logprobs(model: PreTrainedModel, micro_batches: Iterable[MicroBatch], world: World, advance: Callable[[], None]) -> None:
    """Scores what is not trained in the first optimizer step, which can do that by itself. Every rank calls this, before that step."""
    for micro_batch in micro_batches:
        micro_batch.old_logprobs = score(model, micro_batch.to(world.device), world).logprobs
        advance()
