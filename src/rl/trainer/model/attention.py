"""Attention over prefix trees: token i sees token j if j <= i < subtree_ends[j] and, in a layer
with a window, i and j are less than `window` apart.

transformers passes the keyword arguments of a model's call on to its attention function, so each
call carries its own `TreeMask`. There are three implementations, all exact:

* `blocks`: consecutive queries with nearly the same keys form a block, for which two matrix
  products and a softmax use only those keys. Blocks of similar size are padded and form a
  bundle, which is computed at once. The cost is about the number of visible (query, key) pairs.
  Any device.
* `flex`: torch's FlexAttention, compiled. For GPUs (its backward pass exists only there).
* `eager`: transformers' own attention with a dense [T, T] mask, for models with special attention.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from rl.system.errors import RunError
from rl.trainer.model import flex

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


class TreeMask:
    """Which token sees which in a row of T tokens, of which this rank computes the T' `queries`.
    Masks are made once for all layers.

    It is not a dataclass because FSDP would copy a dataclass for every layer.
    """

    def __init__(
        self,
        subtree_ends: Tensor,
        positions: Tensor,
        queries: Tensor | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.subtree_ends = subtree_ends  # [T] int64: token i sees token j if j <= i < ends[j]
        # [T] int64: a token's index in its sample, which is the number of its ancestors
        self.positions = positions
        self.queries = queries  # [T'] int64, ascending; None: all T
        self.gather = gather or (lambda part: part)
        """Keys or values [1, H, T', D] at this rank's queries -> [1, H, T, D] of the whole row
        (context parallelism)."""
        self.windows: set[int | None] = set()
        """Windows that layers have asked for; None for a layer without a window."""
        self._plans: dict[tuple[int | None, torch.dtype, int, int], BlockPlan] = {}
        self._flex: dict[int | None, BlockMask] = {}

    def dense(self, window: int | None = None) -> Tensor:
        """Returns [T', T] bool, True where the query sees the key."""
        keys = torch.arange(len(self.subtree_ends), device=self.subtree_ends.device)
        return self._sees(keys if self.queries is None else self.queries, keys, window)

    def _sees(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        q, k = queries[:, None], keys[None, :]
        seen = (k <= q) & (q < self.subtree_ends[k])
        return seen if window is None else seen & (self.positions[q] - self.positions[k] < window)

    def plan(self, window: int | None, dtype: torch.dtype, heads: int, group: int) -> BlockPlan:
        """Returns the plan for all queries, with masks of type `dtype`."""
        key = (window, dtype, heads, group)
        if key not in self._plans:
            self._plans[key] = make_plan(bundled(self.blocks(window, dtype)), heads, group)
        return self._plans[key]

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """Cuts all queries into blocks, with masks of type `dtype`."""
        device = self.subtree_ends.device
        subtree_ends, positions = self.subtree_ends.cpu().numpy(), self.positions.cpu().numpy()
        queries = np.arange(len(positions)) if self.queries is None else self.queries.cpu().numpy()
        # each with its keys, and whether its mask is a view of one triangle: in an unbranched
        # block each query sees one key more than the query before it
        cut: list[tuple[slice, np.ndarray, bool]] = []
        height = width = 0
        for span in cut_blocks(queries, positions):
            keys = visible_keys(queries[span], subtree_ends, positions, window)
            plain = is_unbranched(positions[queries[span]]) and not (window and len(keys) >= window)
            cut.append((span, keys, plain))
            if plain:
                height, width = max(height, span.stop - span.start), max(width, len(keys))
        hidden = torch.ones(height, width, dtype=torch.bool, device=device).triu(width - height + 1)
        triangle = additive(hidden, dtype)
        blocks = []
        for span, keys, plain in cut:
            if plain:
                mask = triangle[height - (span.stop - span.start) :, width - len(keys) :]
            else:
                pair = (torch.from_numpy(array).to(device) for array in (queries[span], keys))
                mask = additive(~self._sees(*pair, window), dtype)
            blocks.append(Block(span, runs_of(keys), mask))
        return blocks

    def flex(self, window: int | None) -> BlockMask:
        """Returns the mask for FlexAttention."""
        if window not in self._flex:
            self._flex[window] = flex.make_mask(
                self.subtree_ends, self.positions, self.queries, window
            )
        return self._flex[window]


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask to be added to scores: -inf where they are hidden, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )


def bundle_keys(whole: Tensor, bundle: Bundle) -> Tensor:
    """[1, heads, T, D] -> [heads * B, k, D], a view if the bundle is a single block with
    consecutive keys."""
    if len(bundle.mask) == 1:
        runs = [whole[0, :, first:behind] for _, _, first, behind in bundle.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)
    return (
        head_rows(whole).index_select(0, bundle.keys).view(-1, bundle.mask.shape[2], whole.shape[3])
    )


def head_rows(whole: Tensor) -> Tensor:
    """[1, H, T, D] -> [T * H, D], a view if memory is ordered by token, as projections make it."""
    return whole[0].transpose(0, 1).reshape(-1, whole.shape[3])


def probabilities(
    query: Tensor, key: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * query @ key^T + mask): query [heads B, G q, D], key [heads B, k, D], mask [B,
    q, k] -> [heads B, G q, k].

    With a `cap` the scaled products x become cap * tanh(x / cap), and the tanh is returned too.
    With `sinks` [heads G] each row's softmax has one more column, the sink of its head, which is
    dropped from the result.
    """
    heads, group, tanh = len(key) // len(mask), query.shape[1] // mask.shape[1], None
    # [heads, B, G, q, k]
    shape = (heads, len(mask), group, *mask.shape[1:])
    scores = query.new_empty(shape).copy_(mask[:, None]).flatten(2, 3).flatten(0, 1)
    if cap:
        tanh = (query @ key.transpose(1, 2)).mul_(scale / cap).tanh_()
        scores.add_(tanh, alpha=cap)
    else:
        scores.baddbmm_(query, key.transpose(1, 2), alpha=scale)
    if sinks is None:
        return scores.softmax(-1), tanh
    column = sinks.view(heads, 1, group, 1).expand(shape[:-1]).reshape(len(key), -1, 1)
    return torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1)[..., :-1], tanh


class BlockAttention(torch.autograd.Function):
    """Computes attention bundle by bundle. The query heads that share a key head are rows of one
    matrix product, so no key is copied.

    Args:
        query: [1, H, T', D]; H is a multiple of the number of key heads.
        key, value: [1, heads, T, D] and [1, heads, T, D2].
        sinks, scale, cap: see `probabilities`; a cap of 0 means none.

    Returns: [1, T', H, D2].
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: BlockPlan,
        scale: float,
        cap: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.plan, ctx.scale, ctx.cap = plan, scale, cap
        out = query.new_empty(len(plan.slots), value.shape[3])
        for bundle, q, o in bundles_of(
            plan, key.shape[1], head_rows(query).index_select(0, plan.slots), out
        ):
            k, v = bundle_keys(key, bundle), bundle_keys(value, bundle)
            torch.bmm(probabilities(q, k, bundle.mask, scale, cap, sinks)[0], v, out=o)
        return out.index_select(0, plan.rows).view(
            1, query.shape[2], query.shape[1], value.shape[3]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With a bundle's probabilities P, computed again, and O = P V: dV = P^T dO, dS = P * (dO
        V^T - rowsum), dQ = scale dS K, dK = scale dS^T Q, where rowsum is the sum of P * (dO V^T)
        over each row.

        With a cap dS is multiplied by 1 - tanh^2. A sink's value is zero, so its gradient is its
        probability, 1 - sum P, times -rowsum. Sums over blocks are kept in float32 or better. The
        gradient of padding is 0.
        """
        query, key, value, sinks = ctx.saved_tensors
        plan, heads = ctx.plan, key.shape[1]
        precise = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = (
            x.new_zeros(x.shape[2], heads, x.shape[3], dtype=precise) for x in (key, value)
        )
        grad_sinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=precise)
        queries = head_rows(query).index_select(0, plan.slots)
        grads = (
            grad.reshape(-1, grad.shape[3])
            .index_select(0, plan.slots)
            .index_fill_(0, plan.padding, 0)
        )
        grad_query = torch.empty_like(queries)
        for bundle, q, g, grad_q in bundles_of(plan, heads, queries, grads, grad_query):
            k, v = bundle_keys(key, bundle), bundle_keys(value, bundle)
            p, tanh = probabilities(q, k, bundle.mask, ctx.scale, ctx.cap, sinks)
            grad_p = torch.bmm(g, v.transpose(1, 2))
            s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            count = len(bundle.mask)
            if grad_sinks is not None:
                # [heads B, G q]
                missing, mean = 1.0 - p.sum(-1, dtype=precise), (p * grad_p).sum(-1, dtype=precise)
                by_head = (missing * mean).view(heads, count, -1, bundle.mask.shape[1])
                grad_sinks -= by_head.sum((1, 3)).flatten()
            if tanh is not None:
                s *= 1.0 - tanh.square_()
            grad_q.baddbmm_(s, k, beta=0, alpha=ctx.scale)
            for total, result in (
                (grad_key, torch.bmm(s.transpose(1, 2), q).mul_(ctx.scale)),
                (grad_value, torch.bmm(p.transpose(1, 2), g)),
            ):
                by_block = result.view(heads, count, *result.shape[1:]).movedim(0, 2)
                for block, start, first, behind in bundle.runs:
                    total[first:behind] += by_block[block, start : start + behind - first]
        # [T', H, D], the order of the projections
        grad_query = grad_query.index_select(0, plan.rows).view(query.shape[2], *query.shape[1::2])
        return (
            *(x.to(key.dtype).transpose(0, 1)[None] for x in (grad_query, grad_key, grad_value)),
            None if grad_sinks is None else grad_sinks.to(sinks.dtype),
            *(None, None, None),
        )


def bundles_of(plan: BlockPlan, heads: int, *slots: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yields each bundle with its part of each tensor of slots [N, D], as [heads B, G q, D]."""
    counts = [len(bundle.mask) * heads for bundle in plan.bundles]
    sizes = [
        bundle.mask.shape[1] * plan.group * count
        for bundle, count in zip(plan.bundles, counts, strict=True)
    ]
    split = (x.split(sizes) for x in slots)
    for bundle, count, *tensors in zip(plan.bundles, counts, *split, strict=True):
        yield bundle, *(x.view(count, -1, x.shape[1]) for x in tensors)


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeMask,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    plan = tree.plan(window, query.dtype, key.shape[1], query.shape[1] // key.shape[1])
    return BlockAttention.apply(query, key, value, sinks, plan, scale, cap or 0.0)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, tree: TreeMask, window: int | None, *settings: Any
) -> Tensor:
    """`settings`: scale, cap and sinks, as `attend_blocks` has them."""
    return flex.attend(query, key, value, tree.flex(window), window, *settings)


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: TreeMask | None = None,
    attend: Callable[..., Tensor] = attend_blocks,
    **special: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer: query [1, H, T', D], key and
    value [1, heads, T', D] -> [1, T', H, D].

    `softcap` bounds the scores (Gemma 2); `s_aux` [H] are the heads' sinks (gpt-oss). Raises
    RunError if the attention is anything but a softmax over the visible keys.
    """
    asked = [name for name in ("position_bias", "head_mask") if special.get(name) is not None]
    asked += ["bidirectional attention"] * (getattr(module, "is_causal", True) is False)
    if tree is None or asked:
        what = (
            f"needs {', '.join(asked)}"
            if asked
            else "does not receive the keyword arguments of the model's call"
        )
        raise RunError(f"{type(module).__name__} {what}: set trainer.attention = auto")
    assert dropout == 0.0
    window = sliding_window or None
    tree.windows.add(window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(
        query, tree.gather(key), tree.gather(value), tree, window, scale, softcap, s_aux
    ), None


AttentionInterface.register("rl_blocks", attention)
AttentionInterface.register("rl_flex", functools.partial(attention, attend=attend_flex))
