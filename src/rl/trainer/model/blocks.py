"""The plan by which trainer/model/attention.py computes a row: queries form blocks, and blocks
form bundles that are computed together."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

CALL_COST = 8192
"""Fixed cost of a call, in (query, key) pairs: its two dozen small operations take as long as 90
queries on 90 keys."""
BLOCK_PAIRS = 1 << 19
"""The most pairs that are computed together: with more, the scores of all heads no longer fit in
the CPU's caches."""
BLOCK_QUERIES = range(32, 129)
"""The least number of queries of a block, whatever it sees, and the largest of a block without
branches."""
TREE_QUERIES = 256
"""The most queries of a block with branches."""
WHOLE_KEYS = 16
"""The keys of a bundle are padded to a multiple of this: a softmax over 144 numbers is faster
than one over 140."""


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys that any of them sees."""

    queries: slice
    """Indices among the queries of this rank."""
    keys: list[tuple[int, int]]
    """Runs of consecutive keys, ascending, as (first, last + 1): the contiguous parts of a path
    from a root."""
    mask: Tensor  # [q, k], 0 where the query sees the key, else -inf


@dataclass(frozen=True)
class Bundle:
    """Blocks that are computed together, each padded to the largest numbers of queries and keys
    among them."""

    # [B, q, k]; a padded query sees everything, a padded key is seen by padded queries only
    mask: Tensor
    keys: Tensor  # [heads * B * k] int64, rows of a key tensor [T, heads, D]
    runs: list[tuple[int, int, int, int]]
    """The runs of its keys: each run's block within the bundle, its offset among the block's keys,
    its first key and the key after its last."""


@dataclass(frozen=True)
class BlockPlan:
    """All queries of a row in bundles, for `heads` key heads, each shared by `group` query heads.

    A slot is one query of one head in the padded bundles. Slots are ordered by bundle, key head,
    block, query head and query.
    """

    bundles: list[Bundle]
    # [N] int64: for each slot, the row of a query tensor [T', heads * group, D] that it holds
    slots: Tensor
    rows: Tensor  # [T' * heads * group] int64: for each of these rows, the slot that holds it
    padding: Tensor  # [n] int64: the slots that are padding
    group: int


def is_unbranched(positions: np.ndarray) -> bool:
    """Whether each token is its predecessor's child."""
    return bool((np.diff(positions) == 1).all())


def visible_keys(
    queries: np.ndarray, subtree_ends: np.ndarray, positions: np.ndarray, window: int | None
) -> np.ndarray:
    """Returns the keys that any of the consecutive `queries` sees, ascending: ancestors of the
    first query, and the queries themselves."""
    first = queries[0]
    seen = subtree_ends[:first] > first
    if window is not None:
        seen &= positions[:first] > positions[queries].min() - window
    return np.concatenate([np.flatnonzero(seen), queries])


def runs_of(ascending: np.ndarray) -> list[tuple[int, int]]:
    """Returns the runs of consecutive numbers in an ascending array, each as (first, last + 1)."""
    edges = np.flatnonzero(np.diff(ascending) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(ascending, edges)]


def cut_blocks(queries: np.ndarray, positions: np.ndarray) -> list[slice]:
    """Cuts the queries into blocks of consecutive tokens.

    In depth-first order a block [a, b) sees the positions[a] ancestors of its first token and
    itself, whatever branches it holds. So it costs (b - a) * (positions[a] + b - a) pairs. If
    branches share a block, many of these pairs are masked; branches share a block if that costs
    less than one more call.
    """

    def pairs(a: int, b: int) -> int:
        return (b - a) * (int(positions[queries[a]]) + b - a)

    token_jumps, depth_jumps = np.diff(queries) != 1, np.diff(positions[queries]) != 1
    blocks: list[slice] = []
    starts = [0, *(np.flatnonzero(token_jumps | depth_jumps) + 1).tolist(), len(queries)]
    for start, end in pairwise(starts):
        last = blocks[-1] if blocks and not token_jumps[start - 1] else None
        if last and end - last.start <= TREE_QUERIES:
            together = pairs(last.start, end)
            if (
                together <= BLOCK_PAIRS
                and together <= pairs(last.start, start) + pairs(start, end) + CALL_COST
            ):
                blocks[-1] = slice(last.start, end)
                continue
        while start < end:
            size = min(
                max(BLOCK_PAIRS // (int(positions[queries[start]]) + 1), BLOCK_QUERIES.start),
                BLOCK_QUERIES.stop - 1,
            )
            blocks.append(slice(start, min(start + size, end)))
            start = blocks[-1].stop
    return blocks


def bundled(blocks: list[Block]) -> list[list[Block]]:
    """Bundles the blocks, largest number of keys first. A block joins a bundle if its padding
    costs less than one more call."""
    bundles: list[list[Block]] = []
    height, cost = 0, 0
    for block in sorted(blocks, key=lambda block: block.mask.shape[::-1], reverse=True):
        (q, k), last = block.mask.shape, bundles[-1] if bundles else []
        together = (len(last) + 1) * max(height, q) * last[0].mask.shape[1] if last else 0
        if last and together <= min(BLOCK_PAIRS, cost + q * k + CALL_COST):
            last.append(block)
            height, cost = max(height, q), together
        else:
            bundles.append([block])
            height, cost = q, q * k
    return bundles


def padded_mask(masks: list[Tensor]) -> Tensor:
    """Stacks masks [q, k] into [B, q, k] with padding; a single mask is not padded."""
    if len(masks) == 1:
        return masks[0][None]
    height, width = (max(sizes) for sizes in zip(*(mask.shape for mask in masks), strict=True))
    padded = masks[0].new_zeros(len(masks), height, -(-width // WHOLE_KEYS) * WHOLE_KEYS)
    for whole, mask in zip(padded, masks, strict=True):
        whole[: mask.shape[0]] = -torch.inf
        whole[: mask.shape[0], : mask.shape[1]] = mask
    return padded


def make_plan(bundles: list[list[Block]], heads: int, group: int) -> BlockPlan:
    """Computes the masks of the bundles, and the indices of their queries, keys and results."""
    device = bundles[0][0].mask.device
    of_heads = np.arange(heads * group).reshape(heads, 1, group, 1)
    slots, plans = [], []
    for blocks in bundles:
        mask, runs = padded_mask([block.mask for block in blocks]), []
        # -1: padding
        queries, keys = (np.full((len(blocks), size), -1) for size in mask.shape[1:])
        for row, block in enumerate(blocks):
            span, end = block.queries, 0
            queries[row, : span.stop - span.start] = np.arange(span.start, span.stop)
            for first, behind in block.keys:
                runs.append((row, end, first, behind))
                keys[row, end : end + behind - first] = np.arange(first, behind)
                end += behind - first
        slots.append((queries[None, :, None] * heads * group + of_heads).ravel())
        indices = keys.clip(0)[None] * heads + np.arange(heads)[:, None, None]
        plans.append(Bundle(mask, torch.from_numpy(indices.ravel()).to(device), runs))
    slot = np.concatenate(slots)
    real, padding = np.flatnonzero(slot >= 0), np.flatnonzero(slot < 0)
    indices = (slot.clip(0), real[np.argsort(slot[real])], padding)
    return BlockPlan(plans, *(torch.from_numpy(array).to(device) for array in indices), group)
