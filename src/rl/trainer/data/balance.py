"""Cuts the sorted samples into micro batches of equal cost and assigns them to the ranks. Pure:
numbers only.

A micro batch is a part of the sorted samples. A cut within a group makes its shared prefix be
computed again; a cut between groups is free.
"""

from dataclasses import dataclass

import numpy as np

from rl.trainer.data.prefix_tree import MicroBatchRange, SortedSamples

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
