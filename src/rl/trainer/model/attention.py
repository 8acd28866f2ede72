"""Attention over prefix trees: token i sees token j if j <= i < subtree_ends[j] and, in a layer
with a window, i and j are less than `window` apart.

transformers passes the keyword arguments of a model's call on to its attention function, so each
call carries its own `TreeMask`. There are three implementations, all exact:

* `blocks`: consecutive queries with nearly the same keys form a block, for which two matrix
  products and a softmax use only those keys. Blocks of similar size are padded and computed
  together. The cost is about the number of visible (query, key) pairs. Any device.
* `flex`: torch's FlexAttention, compiled. For GPUs (its backward pass exists only there).
* `eager`: transformers' own attention with a dense [T, T] mask, for models with special attention.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from rl.system.errors import RunError
from rl.trainer.model import flex
from rl.trainer.model.blocks import (
    Block,
    Plan,
    bundle,
    cut_blocks,
    is_unbranched,
    make_plan,
    runs_of,
    visible_keys,
)


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
        self._plans: dict[tuple[int | None, torch.dtype, int, int], Plan] = {}
        self._flex: dict[int | None, BlockMask] = {}

    def dense(self, window: int | None = None) -> Tensor:
        """Returns [T', T] bool, True where the query sees the key."""
        keys = torch.arange(len(self.subtree_ends), device=self.subtree_ends.device)
        return self._sees(keys if self.queries is None else self.queries, keys, window)

    def _sees(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        q, k = queries[:, None], keys[None, :]
        seen = (k <= q) & (q < self.subtree_ends[k])
        return seen if window is None else seen & (self.positions[q] - self.positions[k] < window)

    def plan(self, window: int | None, dtype: torch.dtype, heads: int, group: int) -> Plan:
        """Returns the plan for all queries, with masks of type `dtype`."""
        key = (window, dtype, heads, group)
        if key not in self._plans:
            self._plans[key] = make_plan(bundle(self.blocks(window, dtype)), heads, group)
        return self._plans[key]

    def blocks(self, window: int | None, dtype: torch.dtype) -> list[Block]:
        """Cuts all queries into blocks, with masks of type `dtype`."""
        subtree_ends, positions = self.subtree_ends.cpu().numpy(), self.positions.cpu().numpy()
        queries = (
            np.arange(len(subtree_ends)) if self.queries is None else self.queries.cpu().numpy()
        )
        spans = cut_blocks(queries, positions)
        keys = [visible_keys(queries[span], subtree_ends, positions, window) for span in spans]
        # In an unbranched block each query sees one key more than the query before it, so all such
        # masks are views of one triangle.
        plain = [
            is_unbranched(positions[queries[span]]) and not (window and len(k) >= window)
            for span, k in zip(spans, keys, strict=True)
        ]
        shapes = [
            (span.stop - span.start, len(k))
            for span, k, is_plain in zip(spans, keys, plain, strict=True)
            if is_plain
        ]
        height, width = (max(column) for column in zip(*shapes, strict=True)) if shapes else (0, 0)
        hidden = torch.ones(height, width, dtype=torch.bool, device=self.subtree_ends.device).triu(
            width - height + 1
        )
        triangle = torch.zeros(
            height, width, dtype=dtype, device=self.subtree_ends.device
        ).masked_fill_(hidden, -torch.inf)
        blocks = []
        for span, k, is_plain in zip(spans, keys, plain, strict=True):
            if is_plain:
                mask = triangle[height - (span.stop - span.start) :, width - len(k) :]
            else:
                seen = self._sees(
                    *(
                        torch.from_numpy(places).to(self.subtree_ends.device)
                        for places in (queries[span], k)
                    ),
                    window,
                )
                mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                    ~seen, -torch.inf
                )
            blocks.append(Block(span, runs_of(k), mask))
        return blocks

    def flex(self, window: int | None) -> BlockMask:
        """Returns the mask for FlexAttention."""
        if window not in self._flex:
            self._flex[window] = flex.make_mask(
                self.subtree_ends, self.positions, self.queries, window
            )
        return self._flex[window]


def bundle_keys(whole: Tensor, places: Tensor, mask: Tensor, runs: Tensor) -> Tensor:
    """[1, heads, T, D] -> [heads * B, k, D], a view if the bundle is a single block with
    consecutive keys."""
    if len(mask) == 1:
        parts = [whole[0, :, first:behind] for _, _, first, behind in runs.tolist()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return head_rows(whole).index_select(0, places).view(-1, mask.shape[2], whole.shape[3])


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
    heads, group = len(key) // len(mask), query.shape[1] // mask.shape[1]
    scores, tanh = (
        query.new_empty(heads, len(mask), group, *mask.shape[1:])
        .copy_(mask[:, None])
        .flatten(2, 3)
        .flatten(0, 1),
        None,
    )
    if cap:
        tanh = (query @ key.transpose(1, 2)).mul_(scale / cap).tanh_()
        scores.add_(tanh, alpha=cap)
    else:
        scores.baddbmm_(query, key.transpose(1, 2), alpha=scale)
    if sinks is None:
        return scores.softmax(-1), tanh
    column = (
        sinks.view(heads, 1, group, 1)
        .expand(heads, len(mask), group, mask.shape[1])
        .reshape(len(key), -1, 1)
        .to(scores.dtype)
    )
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1], tanh


@torch.library.custom_op("rl::block_attention", mutates_args=())
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[Tensor],
    keys: Sequence[Tensor],
    slots: Tensor,
    rows: Tensor,
    padding: Tensor,
    runs: Sequence[Tensor],
    scale: float,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention bundle by bundle. The query heads that share a key head are rows of one
    matrix product, so no key is copied.

    Args:
        query: [1, H, T', D]; H is a multiple of the number of key heads.
        key, value: [1, heads, T, D] and [1, heads, T, D2].
        masks: the masks of the bundles, in order.
        keys, slots, rows, padding, runs: see `Plan`.
        scale, cap, sinks: see `probabilities`; a cap of 0 means none.

    Returns: [1, T', H, D2].
    """
    group = query.shape[1] // key.shape[1]
    out = query.new_empty(len(slots), value.shape[3])
    sizes = [query.shape[1] * mask.shape[0] * mask.shape[1] for mask in masks]
    queries = head_rows(query).index_select(0, slots).split(sizes)
    for q, o, mask, places, own in zip(queries, out.split(sizes), masks, keys, runs, strict=True):
        q, o = (x.view(-1, group * mask.shape[1], x.shape[1]) for x in (q, o))
        k, v = (bundle_keys(whole, places, mask, own) for whole in (key, value))
        torch.bmm(probabilities(q, k, mask, scale, cap, sinks)[0], v, out=o)
    return out.index_select(0, rows).view(1, query.shape[2], query.shape[1], value.shape[3])


def save(ctx: FunctionCtx, inputs: tuple, output: Tensor) -> None:
    (
        query,
        key,
        value,
        ctx.masks,
        ctx.keys,
        ctx.slots,
        ctx.rows,
        ctx.padding,
        ctx.runs,
        ctx.scale,
        ctx.cap,
        sinks,
    ) = inputs
    ctx.save_for_backward(query, key, value, sinks)


def block_attention_backward(
    ctx: FunctionCtx, grad: Tensor
) -> tuple[Tensor | list[None] | None, ...]:
    """With a bundle's probabilities P, computed again, and O = P V: dV = P^T dO, dS = P * (dO V^T -
    rowsum), dQ = scale dS K, dK = scale dS^T Q, where rowsum is the sum of P * (dO V^T) over each
    row.

    With a cap dS is multiplied by 1 - tanh^2. A sink's value is zero, so its gradient is its
    probability, 1 - sum P, times -rowsum. Sums over blocks are kept in float32 or better. The
    gradient of padding is 0.
    """
    query, key, value, sinks = ctx.saved_tensors
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    sizes = [query.shape[1] * mask.shape[0] * mask.shape[1] for mask in ctx.masks]
    precise = torch.promote_types(key.dtype, torch.float32)
    grad_key, grad_value = (
        x.new_zeros(x.shape[2], heads, x.shape[3], dtype=precise) for x in (key, value)
    )
    grad_sinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=precise)
    queries = head_rows(query).index_select(0, ctx.slots)
    grads = (
        grad.reshape(-1, grad.shape[3]).index_select(0, ctx.slots).index_fill_(0, ctx.padding, 0)
    )
    grad_query = torch.empty_like(queries)
    parts = (x.split(sizes) for x in (queries, grads, grad_query))
    for *rows, mask, places, own in zip(*parts, ctx.masks, ctx.keys, ctx.runs, strict=True):
        q, g, grad_q = (x.view(heads * len(mask), group * mask.shape[1], x.shape[1]) for x in rows)
        k, v = (bundle_keys(whole, places, mask, own) for whole in (key, value))
        p, tanh = probabilities(q, k, mask, ctx.scale, ctx.cap, sinks)
        grad_p = torch.bmm(g, v.transpose(1, 2))
        s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
        if grad_sinks is not None:
            # [heads B, G q]
            missing, mean = 1.0 - p.sum(-1, dtype=precise), (p * grad_p).sum(-1, dtype=precise)
            grad_sinks -= (missing * mean).view(heads, len(mask), group, -1).sum((1, 3)).flatten()
        if tanh is not None:
            s *= 1.0 - tanh.square_()
        grad_q.baddbmm_(s, k, beta=0, alpha=ctx.scale)
        for total, part in (
            (grad_key, torch.bmm(s.transpose(1, 2), q).mul_(ctx.scale)),
            (grad_value, torch.bmm(p.transpose(1, 2), g)),
        ):
            by_block = part.view(heads, len(mask), *part.shape[1:])
            for block, place, first, behind in own.tolist():
                total[first:behind] += by_block[:, block, place : place + behind - first].transpose(
                    0, 1
                )
    # [T', H, D], the order of the projections
    grad_query = grad_query.index_select(0, ctx.rows).view(query.shape[2], *query.shape[1::2])
    grad_key, grad_value = (
        total.to(key.dtype).transpose(0, 1)[None] for total in (grad_key, grad_value)
    )
    grad_sinks = None if sinks is None else grad_sinks.to(sinks.dtype)
    none = [None] * len(sizes)
    return (
        grad_query.transpose(0, 1)[None],
        grad_key,
        grad_value,
        none,
        none,
        None,
        None,
        None,
        none,
        None,
        None,
        grad_sinks,
    )


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
    plan = tree.plan(window, query.dtype, key.shape[1], query.shape[1] // key.shape[1])
    return block_attention(
        query,
        key,
        value,
        plan.masks,
        plan.keys,
        plan.slots,
        plan.rows,
        plan.padding,
        plan.runs,
        scale,
        cap or 0.0,
        sinks,
    )


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
