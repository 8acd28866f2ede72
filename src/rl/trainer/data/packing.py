"""Turns a batch of samples into this rank's micro batches: divides it into minibatches, sorts their
samples, cuts them into ranges of equal cost, and makes tensors of each range.

A minibatch is what an optimizer step trains on. It consists of whole groups, so it keeps the
batch's baselines and shared prompts. All epochs go through the same minibatches in the same order.
Weights are published and saved only between batches: a policy version is the result of one whole
batch. docs/algorithms.md has the sources.

Shared prefixes are computed once. The samples of a group share a prefix (prompt, history, often the
first answer tokens). They are sorted within groups, and each is stored with the length of the
prefix that it shares with the one before it. A range of them, laid out depth first, is one row in
which each token sees its ancestors and itself. In that order the descendants of token j are the
tokens j+1..subtree_ends[j]-1, so "token i sees token j" means `j <= i < subtree_ends[j]`: one
integer per token describes the whole mask. A token's hidden state depends only on its ancestors, so
log-probabilities and gradients equal those of the samples computed one by one.

Example: samples `a b c` and `a b d e`, everything after `a` trained::

    token_ids    a  b  d     (c and e end their samples, so they are predicted but are not inputs)
    position_ids 0  1  2
    subtree_ends 3  3  3
    loss tokens (predicted from, target):  (0, b) (0, b) (1, c) (1, d) (2, e)

A cut of the sorted samples within a group makes its shared prefix be computed again; a cut between
groups is free.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from rl.config.loss import ClippedSettings, CustomConfig, LossSettings
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch, empty_micro_batch
from rl.wire.messages import TrainBatch, TrainingSample


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


OVERHEAD_PART = 64
"""The fixed cost of a micro batch (gathered weights, kernel launches) is 1/64 of the cost of
`max_tokens` tokens."""


@dataclass(frozen=True)
class Layout:
    """The rank that a batch is packed for, the number of ranks, and the size limit of micro
    batches."""

    rank: int
    """Index among the data-parallel ranks, those that have samples of their own."""
    num_ranks: int
    max_tokens: int
    """The most tokens of a micro batch; a longer sample gets a micro batch of its own. 0: every
    sample does."""
    hidden_size: int
    """The model's hidden size: it determines how a token's matrix products compare with its
    attention, see `path_cost`."""


def plan(ordered: SortedSamples, layout: Layout) -> list[list[MicroBatchRange]]:
    """Returns the ranges of each rank; every rank gets the same number of them. Deterministic.

    Makes as few micro batches as possible, or up to an eighth more if that is cheaper because it
    cuts fewer groups.
    """
    furthest = furthest_ends(ordered, layout.max_tokens)
    needed, size = ranges_needed(furthest), layout.num_ranks
    least = max(1, -(-int(needed[0]) // size))
    rounds = sorted({least + -(-least * extra // 64) for extra in range(9)})
    cuts = [cut_ranges(ordered, layout, furthest, needed, count * size) for count in rounds]
    plans = [assign_to_ranks(ordered, layout, ranges) for ranges in cuts]
    return min(plans, key=lambda plan: plan[1])[0]


def ranges_needed(furthest: np.ndarray) -> np.ndarray:
    """Returns [n + 1]: the fewest ranges that hold all items from i on. It never grows with
    i, so taking the longest range each time is optimal."""
    needed = [0] * (len(furthest) + 1)
    for i, end in reversed(list(enumerate(furthest.tolist()))):
        needed[i] = 1 + needed[end]
    return np.array(needed)


def furthest_ends(ordered: SortedSamples, max_tokens: int) -> np.ndarray:
    """Returns [n]: the end of the longest part that begins with item i and has at most
    `max_tokens`; one item always fits."""
    tokens = np.concatenate([[0], np.cumsum(ordered.lengths - ordered.shared)])
    ends = np.searchsorted(tokens, tokens[:-1] - ordered.shared + max_tokens, side="right") - 1
    return np.maximum(ends, np.arange(1, len(tokens)))


def cut_ranges(
    ordered: SortedSamples, layout: Layout, furthest: np.ndarray, needed: np.ndarray, num_parts: int
) -> list[MicroBatchRange]:
    """Cuts the sorted samples into parts (first item, end) of about equal cost; `num_parts` must be
    at least needed[0].

    Each part ends where two costs together are lowest: the difference from its fair share of the
    rest of the samples, and the prefix that the next part computes again. No part is empty unless
    there are fewer items than ranges. The difference counts less the more ranges a rank gets, and
    only a little with a single rank, since no rank waits for another.
    """
    count, hidden_size = len(ordered.items), layout.hidden_size
    # [n + 1]: cost repeated by a part that begins with the item
    repeated = np.append(path_cost(ordered.shared, hidden_size), 0)
    cost = path_cost(ordered.lengths, hidden_size) - repeated[:-1]
    cost = np.concatenate([[0], np.cumsum(cost)])
    care = max(0.01, layout.num_ranks / num_parts if layout.num_ranks > 1 else 0)
    ranges, start = [], 0
    for left in range(num_parts, 0, -1):
        if start == count:
            ranges.append((count, count))
            continue
        # leave an item for each later part
        last = max(min(int(furthest[start]), count - left + 1), start + 1)
        ends = np.arange(start + 1, last + 1)
        ends = ends[needed[ends] < left]
        base = repeated[start] - cost[start]
        fair = (cost[count] + base + repeated[ends]) / left
        end = int(ends[(repeated[ends] + care * np.abs(cost[ends] + base - fair)).argmin()])
        ranges.append((start, end))
        start = end
    return ranges


def assign_to_ranks(
    ordered: SortedSamples, layout: Layout, ranges: list[MicroBatchRange]
) -> tuple[list[list[MicroBatchRange]], int]:
    """Returns the ranges of each rank, and the cost of the step if ranks wait for each other after
    every micro batch.

    Assigns in rounds from the costliest ranges to the cheapest: if memory is too small, the first
    round shows it, and the ranges of a round cost about the same. Within a round the rank with the
    lowest cost so far gets the costliest part.
    """
    size = layout.num_ranks
    assigned, sums, waited = [list[MicroBatchRange]() for _ in range(size)], [0] * size, 0
    whole, shared = (
        path_cost(values, layout.hidden_size) for values in (ordered.lengths, ordered.shared)
    )
    costs = {part: range_sum(whole, shared, part) for part in ranges}
    order = sorted(ranges, key=lambda part: -costs[part])
    for start in range(0, len(order), size):
        waited += costs[order[start]]
        ranks = sorted(range(size), key=lambda rank: sums[rank])
        for part, rank in zip(order[start : start + size], ranks, strict=True):
            assigned[rank].append(part)
            sums[rank] += costs[part]
    fixed = int(path_cost(np.array(layout.max_tokens), layout.hidden_size)) // OVERHEAD_PART
    return assigned, waited + fixed * (len(order) // size)


def range_tokens(ordered: SortedSamples, part: MicroBatchRange) -> int:
    """Returns the number of tokens of a micro batch; its first item is computed in full."""
    return range_sum(ordered.lengths, ordered.shared, part)


def range_sum(whole: np.ndarray, shared: np.ndarray, part: MicroBatchRange) -> int:
    """Returns the sum over a part of what each item has by itself: its first item has all of it,
    the others no more than what they do not share."""
    start, end = part
    return int(whole[start:end].sum() - shared[start + 1 : end].sum())


def path_cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Returns the cost of the first `lengths` tokens of a sample, in (query, key) pairs of
    attention.

    A token sees itself and its ancestors. In a transformer layer its matrix products take 24 *
    hidden_size^2 operations (forward) and each key that it sees takes 4 * hidden_size, so the
    matrix products cost as much as 6 * hidden_size keys.
    """
    return lengths * (6 * hidden_size) + lengths * (lengths + 1) // 2


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

    `weights`: for each sample, the weight of each of its loss tokens, see `minibatch_weights`.
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
        kept=kept_sets(items, order),
        # if the sampler gave those of all items
        routes=torch.from_numpy(np.concatenate(routes)) if len(routes) == len(items) else None,
    )


def kept_sets(items: Sequence[Item], order: np.ndarray) -> Tensor | None:
    """Returns MicroBatch.kept of these items, whose loss tokens have this order in the micro
    batch; None if no token was truncated. Raises RunError for sets that no sampler can have kept:
    they would become wrong numbers in silence."""
    counts, ids = list[np.ndarray](), list[np.ndarray]()
    for item in items:
        kept, targets = item.sample.kept, item.sample.token_ids[item.trained]
        counts.append(np.zeros(len(targets), np.int32) if kept is None else kept.counts)
        ids.append(np.zeros(0, np.int32) if kept is None else kept.ids)
        tokens = np.repeat(np.arange(len(targets)), counts[-1].clip(0))
        num_own = np.bincount(tokens[ids[-1] == targets[tokens]], minlength=len(targets))
        pairs = tokens << 32 | ids[-1]
        if (
            (num_own != counts[-1].clip(-1, 1)).any()  # TOO_MANY is not trained
            or ids[-1].min(initial=0) < 0
            # to sort them takes a hundred times as long
            or (not (np.diff(pairs) > 0).all() and len(np.unique(pairs)) < len(pairs))
        ):
            raise RunError(
                f"a sample of group {item.sample.group_id}, rollout {item.sample.rollout_id}, has "
                "a token outside the ids that were kept there, or ids that no sampler keeps; set "
                "trainer.max_kept = 0, or sample without top_p, top_k and min_p"
            )
    if not any(map(len, ids)):
        return None
    places = np.argsort(order)  # of the tokens in the micro batch
    tokens = places.repeat(np.concatenate(counts))
    by_token = tokens.argsort(kind="stable")
    return torch.from_numpy(np.stack([tokens, np.concatenate(ids)])[:, by_token])
