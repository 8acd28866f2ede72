"""Computes shared prefixes once: sorts the samples of a batch, so that packing.py can lay out those
of each micro batch as trees.

The samples of a group share a prefix (prompt, history, often the first answer tokens). They are
sorted within groups, and each is stored with the length of the prefix that it shares with the one
before it. A range of them, laid out depth first, is one row in which each token sees its ancestors
and itself. In that order the descendants of token j are the tokens j+1..subtree_ends[j]-1, so
"token i sees token j" means `j <= i < subtree_ends[j]`: one integer per token describes the whole
mask.

Example: samples `a b c` and `a b d e`, everything after `a` trained::

    token_ids    a  b  d     (c and e end their samples, so they are predicted but are not inputs)
    position_ids 0  1  2
    subtree_ends 3  3  3
    loss tokens (predicted from, target):  (0, b) (0, b) (1, c) (1, d) (2, e)
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rl.wire.messages import TrainBatch, TrainingSample

MicroBatchRange = tuple[int, int]
"""(first item, end) of a part of the sorted samples: the samples of one micro batch."""


@dataclass(frozen=True)
class Item:
    """A sample among the sorted samples."""

    sample: TrainingSample
    sample_index: int  # index among the batch's samples
    trained: np.ndarray  # [n] indices of its loss tokens
    inputs: np.ndarray  # [L] int32: all tokens before the last loss token, on which these depend
    routes: np.ndarray | None  # [L, width] uint8: their routes, if the sampler gave them

    @property
    def key(self) -> bytes:
        """Sorts items by their tokens, and tokens by their numbers (big-endian bytes do), then
        by their routes."""
        ids = self.inputs.astype(">i4")
        if self.routes is None:
            return ids.tobytes()
        return np.hstack([ids[:, None].view(np.uint8), self.routes]).tobytes()


@dataclass(frozen=True)
class SortedSamples:
    """The samples of a batch that have loss tokens, by group, then temperature, then tokens."""

    items: list[Item]
    lengths: np.ndarray  # [n] int64: input tokens of each item
    # [n] int64: length of the prefix that each item shares with the one before it, 0 where a tree
    # begins
    shared: np.ndarray


def sort_samples(batch: TrainBatch, indices: Iterable[int] | None = None) -> SortedSamples:
    """Returns the samples at these indices of a batch (default: all), ordered so that neighbours
    share the longest prefixes."""
    groups = defaultdict[tuple[int, float], list[Item]](list)
    for index in range(len(batch.samples)) if indices is None else indices:
        sample = batch.samples[index]
        if sample.spans:
            trained, routes = sample.trained, None
            inputs = sample.token_ids[: trained[-1]]
            if sample.routes:
                routes = np.frombuffer(sample.routes, np.uint8).reshape(len(inputs), -1)
            item = Item(sample, index, trained, inputs, routes)
            groups[sample.group_id, sample.temperature].append(item)
    items: list[Item] = []
    shared: list[int] = []
    for key in sorted(groups):
        group = sorted(groups[key], key=lambda item: item.key)
        items += group
        shared += [0, *itertools.starmap(common_prefix, itertools.pairwise(group))]
    lengths = [len(item.inputs) for item in items]
    return SortedSamples(items, np.array(lengths, np.int64), np.array(shared, np.int64))


def common_prefix(a: Item, b: Item) -> int:
    """Returns the number of leading tokens that both share with equal routes: a shared token is
    computed once, and so by one route."""
    shortest = min(len(a.inputs), len(b.inputs))
    differs = a.inputs[:shortest] != b.inputs[:shortest]
    if a.routes is not None and b.routes is not None:
        differs |= (a.routes[:shortest] != b.routes[:shortest]).any(1)
    return int(differs.argmax()) if differs.any() else shortest
