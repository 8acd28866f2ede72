"""Attention over prefix trees: token i sees token j if j <= i < ends[j] and, in a layer with a window, if it is less than `window` away.

transformers hands the keyword arguments of a model's call on to its attention function, so each call brings its own `TreeMask` along.
Three implementations, all exact:

* `blocks`: consecutive queries with nearly the same keys form a block; per block two matrix products and a softmax over those keys
  only. The cost is the number of visible (query, key) pairs, nothing is padded, and no mask is larger than its block. Any device.
* `flex`: torch's FlexAttention, compiled. For GPUs (its backward pass exists only there).
* `eager`: transformers' own attention with a dense [T, T] mask, for models whose attention is special.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from rl.system.errors import RunError
from rl.trainer import flex

CALL_COST = 4096
"""Cost of a block beyond its (query, key) pairs, in pairs: a dozen small operations take as long as 64 queries on 64 keys."""
BLOCK_PAIRS = 1 << 19
"""The most pairs of a block: beyond it the scores of all heads leave the CPU's caches."""
BLOCK_QUERIES = range(32, 129)
"""A block's least number of queries, whatever it sees, and its largest."""
ONE_THREAD_SCORES = 1 << 19
"""Blocks with so many scores over all heads or fewer are computed by one of the CPU's threads: a dozen operations of 10 to 100
microseconds, at each of which one thread would wait for the other, for milliseconds if something else wants the cores. In bfloat16 that
does not change a bit; float32 products do depend on the number of threads."""
KEPT_KEYS = 256
"""A block with so many keys or fewer keeps its probabilities for the backward pass, at most the memory of four queries of 64 numbers
for each of its own; larger ones compute them again."""


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys that any of them sees."""

    queries: slice
    """Places among the queries of this rank."""
    keys: list[tuple[int, int]]
    """Runs of consecutive keys, ascending, each with its first key and the one behind its last: the stretches of a path to a root."""
    mask: Tensor  # [q, k], 0 where the query sees the key, else -inf


class TreeMask:
    """Which token sees which in a row of T, of which this rank computes the T' `queries`; masks are made once and serve all layers.

    No dataclass: FSDP would copy one for every layer.
    """

    def __init__(
        self, ends: Tensor, positions: Tensor, queries: Tensor | None = None, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.ends = ends  # [T] int64: token i sees token j if j <= i < ends[j]
        self.positions = positions  # [T] int64: a token's place in its sample, and so the number of its ancestors
        self.queries = queries  # [T'] int64, ascending; None: all T
        self.gather = gather or (lambda part: part)
        """Keys or values [1, H, T', D] of this rank's queries -> [1, H, T, D] of the whole row (context parallelism)."""
        self.windows: set[int | None] = set()
        """Windows that layers have asked for; None: a layer without one."""
        self._blocks: dict[tuple[int | None, torch.dtype], list[Block]] = {}
        self._flex: dict[int | None, BlockMask] = {}

    def dense(self, window: int | None = None) -> Tensor:
        """[T', T] bool, True where the query sees the key."""
        keys = torch.arange(len(self.ends), device=self.ends.device)
        return self._sees(keys if self.queries is None else self.queries, keys, window)

    def _sees(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        q, k = queries[:, None], keys[None, :]
        seen = (k <= q) & (q < self.ends[k])
        return seen if window is None else seen & (self.positions[q] - self.positions[k] < window)

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """All queries in blocks, with masks of type `dtype`."""
        if (window, dtype) not in self._blocks:
            self._blocks[window, dtype] = self._make_blocks(window, dtype)
        return self._blocks[window, dtype]

    def _make_blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        ends, positions = self.ends.cpu().numpy(), self.positions.cpu().numpy()
        queries = np.arange(len(ends)) if self.queries is None else self.queries.cpu().numpy()
        spans = cut_blocks(queries, positions)
        keys = [visible_keys(queries[span], ends, positions, window) for span in spans]
        # In an unbranched block each query sees one key more than the one before it: views of one triangle serve them all.
        plain = [is_unbranched(positions[queries[span]]) and not (window and len(k) >= window) for span, k in zip(spans, keys, strict=True)]
        shapes = [(span.stop - span.start, len(k)) for span, k, is_plain in zip(spans, keys, plain, strict=True) if is_plain]
        height, width = (max(column) for column in zip(*shapes, strict=True)) if shapes else (0, 0)
        hidden = torch.ones(height, width, dtype=torch.bool, device=self.ends.device).triu(width - height + 1)
        triangle = torch.zeros(height, width, dtype=dtype, device=self.ends.device).masked_fill_(hidden, -torch.inf)
        blocks = []
        for span, k, is_plain in zip(spans, keys, plain, strict=True):
            if is_plain:
                mask = triangle[height - (span.stop - span.start) :, width - len(k) :]
            else:
                seen = self._sees(*(torch.from_numpy(places).to(self.ends.device) for places in (queries[span], k)), window)
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
            blocks.append(Block(span, runs_of(k), mask))
        return blocks

    def flex(self, window: int | None) -> BlockMask:
        """The mask for FlexAttention."""
        if window not in self._flex:
            self._flex[window] = flex.make_mask(self.ends, self.positions, self.queries, window)
        return self._flex[window]


def is_unbranched(positions: np.ndarray) -> bool:
    """Whether each token is its predecessor's child."""
    return bool((np.diff(positions) == 1).all())


def visible_keys(queries: np.ndarray, ends: np.ndarray, positions: np.ndarray, window: int | None) -> np.ndarray:
    """The keys that some of the consecutive `queries` sees, ascending: ancestors of the first, and the queries themselves."""
    first = queries[0]
    seen = ends[:first] > first
    if window is not None:
        seen &= positions[:first] > positions[queries].min() - window
    return np.concatenate([np.flatnonzero(seen), queries])


def runs_of(ascending: np.ndarray) -> list[tuple[int, int]]:
    """The runs of consecutive numbers among some, each as its first and the one behind its last."""
    edges = np.flatnonzero(np.diff(ascending) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(ascending, edges)]


def cut_blocks(queries: np.ndarray, positions: np.ndarray) -> list[slice]:
    """Cuts the queries into blocks of consecutive tokens.

    In depth-first order a block [a, b) sees the positions[a] ancestors of its first token and itself, whatever branches it holds. So
    it costs (b - a) * (positions[a] + b - a) pairs, most of them hidden from some query if branches share a block; they do where
    that costs less than one more call.
    """

    def pairs(a: int, b: int) -> int:
        return (b - a) * (int(positions[queries[a]]) + b - a)

    token_jumps, depth_jumps = np.diff(queries) != 1, np.diff(positions[queries]) != 1
    blocks: list[slice] = []
    starts = [0, *(np.flatnonzero(token_jumps | depth_jumps) + 1).tolist(), len(queries)]
    for start, end in pairwise(starts):
        last = blocks[-1] if blocks and not token_jumps[start - 1] else None
        if last and end - last.start < BLOCK_QUERIES.stop:
            together = pairs(last.start, end)
            if together <= BLOCK_PAIRS and together <= pairs(last.start, start) + pairs(start, end) + CALL_COST:
                blocks[-1] = slice(last.start, end)
                continue
        while start < end:
            size = min(max(BLOCK_PAIRS // (int(positions[queries[start]]) + 1), BLOCK_QUERIES.start), BLOCK_QUERIES.stop - 1)
            blocks.append(slice(start, min(start + size, end)))
            start = blocks[-1].stop
    return blocks


def block_keys(whole: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """[H, T, D] -> [H, k, D], a view where the keys are consecutive."""
    parts = [whole[:, first:end] for first, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def runs_by_block(bounds: Sequence[int], masks: Sequence[Tensor]) -> Iterator[list[tuple[int, int]]]:
    """The runs of keys of each block: `bounds` has the first key and the one behind the last of every run, block after block."""
    runs = zip(bounds[::2], bounds[1::2], strict=True)
    for mask in masks:
        found, missing = [], mask.shape[1]
        while missing:
            found.append(next(runs))
            missing -= found[-1][1] - found[-1][0]
        yield found


def probabilities(query: Tensor, key: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """softmax(scale * query @ key^T + mask): query [H, G q, D], key [H, k, D], mask [q, k] -> [H, G q, k].

    With a `cap` the products x are cap * tanh(x / cap); the tanh is returned, too. With `sinks` [H G] each row's softmax has one more
    column, the sink of its head, which is left out of what is returned.
    """
    scores, tanh = query.new_empty(len(query), query.shape[1] // mask.shape[0], *mask.shape).copy_(mask).flatten(1, 2), None
    if cap:
        tanh = (query @ key.transpose(1, 2)).mul_(scale / cap).tanh_()
        scores.add_(tanh, alpha=cap)
    else:
        scores.baddbmm_(query, key.transpose(1, 2), alpha=scale)
    if sinks is None:
        return scores.softmax(-1), tanh
    column = sinks.view(len(key), -1).repeat_interleave(mask.shape[0], 1)[..., None].to(scores.dtype)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1], tanh


@torch.library.custom_op("rl::block_attention", mutates_args=())
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor],
    bounds: Sequence[int],
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Attention block by block. The query heads that share a key's head are rows of the same matrix product: no key is copied for them.

    Args:
        query: [1, H, T', D]; H is a multiple of the keys' heads.
        key, value: [1, heads, T, D] and [1, heads, T, D2].
        masks: those of the blocks, in order.
        bounds: see `runs_by_block`.
        scale, cap, sinks: see `probabilities`; a cap of 0 is none.

    Returns: [1, T', H, D2], and the probabilities of those blocks that keep them, for the backward pass.
    """
    heads, sizes = key.shape[1], [mask.shape[0] for mask in masks]
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    outs = out[0].unflatten(1, (heads, -1)).permute(1, 2, 0, 3).split(sizes, dim=2)  # each [heads, G, q, D2]
    queries, kept = query[0].unflatten(0, (heads, -1)).split(sizes, 2), list[Tensor]()
    with few_threads(query, masks):
        for q, o, mask, runs in zip(queries, outs, masks, runs_by_block(bounds, masks), strict=True):
            k, v = (block_keys(whole[0], runs) for whole in (key, value))
            p = probabilities(q.flatten(1, 2), k, mask, scale, cap, sinks)[0]
            o.copy_((p @ v).view(o.shape))
            if is_kept(mask, cap):
                kept.append(p)
    return out, kept


@contextmanager
def few_threads(query: Tensor, masks: Sequence[Tensor]) -> Iterator[None]:
    """A context in which torch computes on the CPU with one thread if all blocks are small, and the bits do not depend on that."""
    before, scores = torch.get_num_threads(), query.shape[1] * max(mask.numel() for mask in masks)
    alone = not query.is_cuda and query.dtype == torch.bfloat16 and scores <= ONE_THREAD_SCORES
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(before)


def is_kept(mask: Tensor, cap: float) -> bool:
    """Whether a block's probabilities are kept. With a cap its scores are computed again in any case, for their tanh."""
    return mask.shape[1] <= KEPT_KEYS and not cap


@block_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor], bounds: object, scale: float, cap: float, sinks: object
) -> tuple[Tensor, list[Tensor]]:
    group = query.shape[1] // key.shape[1]
    kept = [query.new_empty(key.shape[1], group * mask.shape[0], mask.shape[1]) for mask in masks if is_kept(mask, cap)]
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), kept


def save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, list[Tensor]]) -> None:
    query, key, value, ctx.masks, ctx.bounds, ctx.scale, ctx.cap, sinks = inputs
    ctx.save_for_backward(query, key, value, sinks, *output[1])
    ctx.set_materialize_grads(False)


def block_attention_backward(ctx: FunctionCtx, grad: Tensor, _: list[None]) -> tuple[Tensor | list[None] | None, ...]:
    """With a block's probabilities P, recomputed where they were not kept, and O = P V: dV = P^T dO, dS = P * (dO V^T - rowsum),
    dQ = scale dS K, dK = scale dS^T Q.

    With a cap dS is multiplied with 1 - tanh^2. A sink's probability, 1 - sum P, multiplies a value of zero: its gradient is that times
    -rowsum. Sums over blocks are kept in float32 or better.
    """
    query, key, value, sinks, *kept = ctx.saved_tensors
    heads, sizes = key.shape[1], [mask.shape[0] for mask in ctx.masks]
    grad_query = query.new_empty(query.shape[2], *query.shape[1::2])  # [T', H, D], as the projections have it
    precise = torch.promote_types(key.dtype, torch.float32)
    grad_key, grad_value = (x.new_zeros(x.shape[2], heads, x.shape[3], dtype=precise) for x in (key, value))
    grad_sinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=precise)
    grad_queries = grad_query.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).split(sizes, dim=2)
    grads = grad[0].unflatten(1, (heads, -1)).permute(1, 2, 0, 3).split(sizes, dim=2)
    queries = query[0].unflatten(0, (heads, -1)).split(sizes, 2)
    with few_threads(query, ctx.masks):
        for q, g, grad_q, mask, runs in zip(queries, grads, grad_queries, ctx.masks, runs_by_block(ctx.bounds, ctx.masks), strict=True):
            k, v = (block_keys(whole[0], runs) for whole in (key, value))
            q, g = q.flatten(1, 2), g.flatten(1, 2)
            p, tanh = (kept.pop(0), None) if is_kept(mask, ctx.cap) else probabilities(q, k, mask, ctx.scale, ctx.cap, sinks)
            grad_p = g @ v.transpose(1, 2)
            s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            if grad_sinks is not None:
                missing, mean = 1.0 - p.sum(-1, dtype=precise), (p * grad_p).sum(-1, dtype=precise)  # [heads, G q]
                grad_sinks -= (missing * mean).view(len(sinks), -1).sum(-1)
            if tanh is not None:
                s *= 1.0 - tanh.square_()
            grad_q.copy_((s @ k).mul_(ctx.scale).view(grad_q.shape))
            for total, part in ((grad_key, (s.transpose(1, 2) @ q).mul_(ctx.scale)), (grad_value, p.transpose(1, 2) @ g)):
                for (first, end), own in zip(runs, part.transpose(0, 1).split([end - first for first, end in runs]), strict=True):
                    total[first:end] += own
    grad_key, grad_value = (total.to(key.dtype).transpose(0, 1)[None] for total in (grad_key, grad_value))
    grad_sinks = None if sinks is None else grad_sinks.to(sinks.dtype)
    return grad_query.transpose(0, 1)[None], grad_key, grad_value, [None] * len(sizes), None, None, None, grad_sinks


block_attention.register_autograd(block_attention_backward, setup_context=save)


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
    blocks = tree.blocks(window, query.dtype)
    bounds = [bound for block in blocks for run in block.keys for bound in run]
    return block_attention(query, key, value, [block.mask for block in blocks], bounds, scale, cap or 0.0, sinks)[0]


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeMask,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return flex.attend(query, key, value, tree.flex(window), window, scale, cap, sinks)


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
    """The attention function that transformers calls in each layer: query [1, H, T', D], key and value [1, heads, T', D] -> [1, T', H, D].

    `softcap` bounds the scores (Gemma 2); `s_aux` [H] are the heads' sinks (gpt-oss). Raises RunError for attention that is not softmax
    over the visible keys.
    """
    asked = [name for name in ("position_bias", "head_mask") if special.get(name) is not None]
    asked += ["bidirectional attention"] * (getattr(module, "is_causal", True) is False)
    if tree is None or asked:
        what = f"wants {', '.join(asked)}" if asked else "is not given the keyword arguments of the model's call"
        raise RunError(f"{type(module).__name__} {what}: set trainer.attention = auto")
    assert dropout == 0.0
    window = sliding_window or None
    tree.windows.add(window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, tree.gather(key), tree.gather(value), tree, window, scale, softcap, s_aux), None


AttentionInterface.register("rl_blocks", attention)
AttentionInterface.register("rl_flex", functools.partial(attention, attend=attend_flex))
