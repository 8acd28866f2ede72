"""FlexAttention (torch) over prefix trees, for GPUs: its mask as blocks of keys, and one compiled callable for each kind of layer."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from rl.trainer.compiled import KEEP_RESULT, compiled, keeps_results

BLOCK = 128
"""FlexAttention's own block size."""
COMPILED_ON = ("cuda",)
"""Devices on which it is compiled; elsewhere it is a formula to compare with, without backward pass."""
LEAST_BLOCKS = 2
"""Blocks of the shortest row: of fewer queries torch takes another kernel, and a size of one is no symbol in a graph."""


def whole_blocks(length: int, ranks: int = 1) -> int:
    """Tokens of the shortest row that holds `length` tokens and is a whole number of blocks on each of the ranks that share it."""
    return BLOCK * ranks * max(LEAST_BLOCKS, -(-length // (BLOCK * ranks)))


def padded(ids: Tensor, positions: Tensor, ends: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row [T] with tokens behind it, up to `length`, each of which sees itself and is seen by nothing else."""
    missing = (0, length - len(ids))
    return pad(ids, missing), pad(positions, missing), torch.cat([ends, torch.arange(len(ends) + 1, length + 1, device=ends.device)])


def make_mask(ends: Tensor, positions: Tensor, queries: Tensor | None, window: int | None) -> BlockMask:
    """The mask of a row, see TreeMask. Finds from each block's extremes which blocks of keys a block of queries sees in part or in full:
    there is no [T, T] tensor, and no wait for the device."""
    index = torch.arange(len(ends), device=ends.device)
    queries = index if queries is None else queries
    first_q, last_q = extremes(queries)
    first_k, last_k = extremes(index)
    least_end, most_end = extremes(ends)
    some = (first_k[None, :] <= last_q[:, None]) & (most_end[None, :] > first_q[:, None])
    every = (last_k[None, :] <= first_q[:, None]) & (least_end[None, :] > last_q[:, None])
    if window is not None:
        near_q, far_q = extremes(positions[queries])
        near_k, far_k = extremes(positions)
        some &= near_q[:, None] - far_k[None, :] < window
        every &= far_q[:, None] - near_k[None, :] < window

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = queries[q]
        seen = (k <= row) & (row < ends[k])
        return seen if window is None else seen & (positions[row] - positions[k] < window)

    return BlockMask.from_kv_blocks(
        *block_list(some & ~every), *block_list(every), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(len(queries), len(ends))
    )


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] -> least and greatest value of each of FlexAttention's blocks."""
    missing = -len(values) % BLOCK
    blocks = torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def block_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[Q, K] bool -> how many blocks of keys each block of queries has, and their places, the chosen ones first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def kernel(scale: float, cap: float | None, sums: bool) -> Callable[..., Any]:
    """FlexAttention with these settings: (query, key, value, mask) -> output [1, H, T', D], and with `sums` its log-sum-exps, too."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    settings: dict[str, Any] = {"score_mod": capped if cap else None, "scale": scale, "return_aux": AuxRequest(lse=True) if sums else None}

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Any:
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1], **settings)

    return attend


@functools.cache
def compiled_kernel(scale: float, cap: float | None, sums: bool, window: int | None, gradient: bool) -> Callable[..., Any]:
    """The compiled `kernel` of the layers with these settings and this window, for passes with or without gradient.

    Torch counts compilations by code object, so each has its own; all that differs from call to call of one is the row's length.
    """
    attend = kernel(scale, cap, sums)
    attend.__code__ = attend.__code__.replace()
    return compiled(attend, "set trainer.attention = blocks", {KEEP_RESULT: True} if keeps_results() else None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, window: int | None, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention through the mask of the layers with this window; the rest is as in attention.block_attention."""
    kind = (scale, cap, sinks is not None)
    function = kernel(*kind)
    if query.device.type in COMPILED_ON:
        function = compiled_kernel(*kind, window, torch.is_grad_enabled())
        for tensor in (query, key, value):
            torch._dynamo.mark_static(tensor, [1, 3])  # heads, whose number the row's in blocks may equal, and their width
    if sinks is None:
        return function(query, key, value, mask).transpose(1, 2).contiguous()
    out, extra = function(query, key, value, mask)
    # The sink is one more term in the softmax's sum: exp(lse) / (exp(lse) + exp(sink)) of the weight is left.
    left = torch.sigmoid(extra.lse - sinks.to(extra.lse.dtype)[:, None])
    return (out * left[..., None].to(out.dtype)).transpose(1, 2).contiguous()
