"""The part of scripts/gpu_check.py that compares implementations of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from benchmarks.gpu_bench import Bench, apart, case, compilations, say
from torch import Tensor

from rl.config.trainer import FakeDataConfig
from rl.trainer.data.balance import Layout
from rl.trainer.data.fake import FakeBatches
from rl.trainer.data.micro_batch import fill_blocks
from rl.trainer.data.packing import pack
from rl.trainer.model.attention import TreeMask, attend_blocks, attend_flex


@dataclass(frozen=True)
class Special:
    """What a layer's attention has beside plain softmax."""

    window: int | None = None
    cap: float | None = None
    sinks: bool = False


def attention(bench: Bench) -> None:
    """FlexAttention, blocks and a dense mask, also with a window, a cap on the scores and sinks:
    how near to an exact one in float32, and how fast, forward and backward."""
    for length in (300, 700) if bench.tiny else (1024, 4096, 16384, 65536):
        with case(str(length)):
            attend_all(bench, length, Special(), "")
    length, window = (300, 8) if bench.tiny else (4096, 512)
    specials = {
        "window": Special(window),
        "cap": Special(cap=2.0),
        "sinks": Special(sinks=True),
        "all": Special(window, 2.0, True),
    }
    for name, special in specials.items():
        with case(f"{length} {name}"):
            attend_all(bench, length, special, f" {name}")


def attend_all(bench: Bench, length: int, special: Special, name: str) -> None:
    """One kind of attention on one row, computed in each way. Exact is the formula, or blocks
    where its scores take too much memory."""
    heads, keys, width, dtype = (
        (4, 2, 16, torch.float32) if bench.tiny else (16, 8, 128, torch.bfloat16)
    )
    data = FakeDataConfig(
        samples=8, group_size=4, prompt_tokens=length // 10, completion_tokens=length // 10
    )
    batch = FakeBatches(data, 1000, seed=0).receive(1)
    row = fill_blocks(pack(batch, [1.0] * 8, Layout(0, 1, 1 << 20, 64)).micro_batches[0], 1).to(
        bench.device
    )
    tree = TreeMask(row.subtree_ends, row.position_ids)
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, n, len(row.subtree_ends), width, device=bench.device)
        for n in (heads, keys, keys, heads)
    )
    tensors = [
        query,
        key,
        value,
        *([torch.randn(heads, device=bench.device)] if special.sinks else []),
    ]

    def run(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [
            x.to(dtype).requires_grad_(attend is not attend_flex or bench.on_gpu) for x in tensors
        ]
        out = attend(*inputs[:3], tree, special.window, width**-0.5, special.cap, *inputs[3:])
        grads = (
            torch.autograd.grad(out, inputs, grad.transpose(1, 2).to(dtype))
            if out.requires_grad
            else ()
        )
        return [out.detach(), *grads]

    is_small = length <= 4096
    exact = run(attend_dense if is_small else attend_blocks, torch.float32)
    kinds = {"flex": attend_flex, "blocks": attend_blocks} | (
        {"dense": attend_dense} if is_small else {}
    )
    for kind, attend in kinds.items():
        before, title = compilations(), f"{kind} {len(row.subtree_ends)}{name}"
        with case(title):
            found = run(attend, dtype)
            errors = dict(
                zip(
                    ("output", "d_query", "d_key", "d_value", "d_sinks"),
                    map(apart, found, exact),
                    strict=False,
                )
            )
            ms = round(1e3 * bench.seconds(partial(run, attend, dtype), rounds=2), 2)
            say(
                title,
                **errors,
                ms=ms,
                compilations=compilations() - before,
                aim="errors of flex as those of blocks",
            )


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TreeMask,
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The formula, as transformers computes it: all scores in memory."""
    keys, values = (
        x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value)
    )
    scores = query @ keys.transpose(2, 3) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~tree.dense(window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights[..., : keys.shape[2]] @ values).transpose(1, 2)
