"""What torch compiles for the trainer: one graph for all lengths, and never a silent fallback to
uncompiled code. Above all FlexAttention over prefix trees, for GPUs: a mask in blocks of keys, and
one compiled callable for each kind of layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from rl.system.errors import RunError

LIMIT = 16
"""Sizes of 1 and equal ones have graphs of their own, as have passes with and without gradients."""


class CompilerError(RunError):
    """Torch cannot compile a function: it may be at fault, or a full disk, or a machine without
    a C compiler."""


def compiled(function: Callable[..., Any], remedy: str) -> Callable[..., Any]:
    """Compiles `function` at its first call, with symbols for all sizes.

    Each value of a size or flag that cannot be a symbol costs another compilation, and after LIMIT
    of one code object torch would continue uncompiled, with many times the memory. The function
    raises RunError with `remedy` then, and CompilerError if torch cannot compile it.
    """
    from torch._dynamo import config  # takes seconds, which runs without compilation need not spend
    from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit

    config.fail_on_recompile_limit_hit, config.recompile_limit = True, LIMIT
    # caps on scores must be constants of the graph: inductor cannot compile them as symbols
    config.specialize_float = True
    inner = torch.compile(function, dynamic=True)
    name = getattr(function, "__qualname__", "a function")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise RunError(
                f"torch compiled {name} {LIMIT} times, each time for other inputs; {remedy}"
            ) from error
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, torch.OutOfMemoryError):  # needs another remedy
                raise
            raise CompilerError(
                f"torch cannot compile {name} ({describe(error.inner_exception)}); {remedy}"
            ) from error

    return call


def describe(error: Exception) -> str:
    """The first line of an error, with its kind."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"


BLOCK = 128
"""FlexAttention's own block size."""
COMPILED_ON = ("cuda",)
"""Devices on which FlexAttention is compiled; elsewhere it is only a reference for tests,
without a backward pass."""
LEAST_BLOCKS = 2
"""Blocks of the shortest row: for fewer queries torch uses another kernel, and a size of one
cannot be a symbol in a graph."""


def whole_blocks(length: int, ranks: int = 1) -> int:
    """Returns the length of the shortest row that holds `length` tokens in whole blocks on each
    of the ranks that share it."""
    return BLOCK * ranks * max(LEAST_BLOCKS, -(-length // (BLOCK * ranks)))


def padded(
    ids: Tensor, positions: Tensor, subtree_ends: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pads a row [T] to `length` with tokens that see only themselves and that no other token
    sees."""
    missing = (0, length - len(ids))
    return (
        pad(ids, missing),
        pad(positions, missing),
        torch.cat(
            [
                subtree_ends,
                torch.arange(len(subtree_ends) + 1, length + 1, device=subtree_ends.device),
            ]
        ),
    )


def make_mask(
    subtree_ends: Tensor, positions: Tensor, queries: Tensor | None, window: int | None
) -> BlockMask:
    """Returns the mask of a row, see TreeMask. Uses each block's extremes to find the blocks of
    keys that a block of queries sees partly or fully, so it needs no [T, T] tensor and does not
    wait for the device."""
    index = torch.arange(len(subtree_ends), device=subtree_ends.device)
    queries = index if queries is None else queries
    first_q, last_q = extremes(queries)
    first_k, last_k = extremes(index)
    least_end, most_end = extremes(subtree_ends)
    some = (first_k[None, :] <= last_q[:, None]) & (most_end[None, :] > first_q[:, None])
    every = (last_k[None, :] <= first_q[:, None]) & (least_end[None, :] > last_q[:, None])
    if window is not None:
        near_q, far_q = extremes(positions[queries])
        near_k, far_k = extremes(positions)
        some &= near_q[:, None] - far_k[None, :] < window
        every &= far_q[:, None] - near_k[None, :] < window

    def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = queries[q]
        seen = (k <= row) & (row < subtree_ends[k])
        return seen if window is None else seen & (positions[row] - positions[k] < window)

    return BlockMask.from_kv_blocks(
        *block_list(some & ~every),
        *block_list(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(queries), len(subtree_ends)),
    )


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] -> the least and the greatest value in each of FlexAttention's blocks."""
    missing = -len(values) % BLOCK
    blocks = torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def block_list(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[Q, K] bool -> the number of chosen key blocks of each query block, and the indices of all
    key blocks, chosen ones first."""
    order = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def kernel(scale: float, cap: float | None, sums: bool, is_whole: bool) -> Callable[..., Any]:
    """Returns FlexAttention with these settings: (query, key, value, mask) -> output [1, H, T', D],
    with `sums` also its log-sum-exps.

    `is_whole`: T and T' are whole blocks. The compiler cannot know that of lengths that are
    symbols, and would check every bound.
    """

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    settings: dict[str, Any] = {
        "score_mod": capped if cap else None,
        "scale": scale,
        "return_aux": AuxRequest(lse=True) if sums else None,
    }
    settings["kernel_options"] = {"IS_DIVISIBLE": is_whole}

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Any:
        return flex_attention(
            query,
            key,
            value,
            block_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
            **settings,
        )

    return attend


@functools.cache
def compiled_kernel(
    scale: float, cap: float | None, sums: bool, is_whole: bool, window: int | None, gradient: bool
) -> Callable[..., Any]:
    """Returns the compiled `kernel` for layers with these settings and this window, and for passes
    with or without gradient.

    Torch limits compilations per code object, so each kernel gets its own; between its calls only
    the row's length differs.
    """
    attend = kernel(scale, cap, sums, is_whole)
    attend.__code__ = attend.__code__.replace()
    return compiled(attend, "set trainer.attention = blocks")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention with the mask of the layers with this window; the other arguments are
    as in attention.BlockAttention."""
    kind = (scale, cap, sinks is not None, query.shape[2] % BLOCK == key.shape[2] % BLOCK == 0)
    function = kernel(*kind)
    if query.device.type in COMPILED_ON:
        function = compiled_kernel(*kind, window, torch.is_grad_enabled())
        for tensor in (query, key, value):
            # number of heads (the row's number of blocks may equal it) and their width
            torch._dynamo.mark_static(tensor, [1, 3])
    if sinks is None:
        return function(query, key, value, mask).transpose(1, 2).contiguous()
    out, extra = function(query, key, value, mask)
    # The sink is one more term of the softmax's sum, which leaves exp(lse) / (exp(lse) + exp(sink))
    # of the weight.
    left = torch.sigmoid(extra.lse - sinks.to(extra.lse.dtype)[:, None])
    return (out * left[..., None].to(out.dtype)).transpose(1, 2).contiguous()
