"""Attention over trees against torch's own with a dense mask."""

import random
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rl.trainer.model.attention import (
    TreeMask,
    attend_blocks,
    attend_flex,
    attention,
    bundled,
    make_plan,
)
from tests.raised import run_error
from tests.trainer.device import DEVICE


def random_row(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends and positions of random trees, by definition: a token's descendants are those whose
    path holds it."""
    rng = random.Random(seed)
    paths, path = [], []
    for token in range(length):
        if rng.random() < 0.1:
            path = path[: rng.randint(0, len(path))]
        path = [*path, token]
        paths.append(path)
    subtree_ends = [
        1 + max(i for i, path in enumerate(paths) if token in path) for token in range(length)
    ]
    return torch.tensor(subtree_ends, device=DEVICE), torch.tensor(
        [len(path) - 1 for path in paths], device=DEVICE
    )


def qkv(queries: int, length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, n, heads, 16, dtype=dtype).to(DEVICE).transpose(1, 2).requires_grad_()
        for heads, n in ((6, queries), (2, length), (2, length))
    ]


LIMITS = {
    "one block": {},
    "small blocks": {"BLOCK_PAIRS": 300, "CALL_COST": 5, "BLOCK_QUERIES": range(4, 65)},
    "bundles": {"TREE_QUERIES": 20, "BLOCK_QUERIES": range(4, 33)},
}


CASES = [
    *product(LIMITS, (None, 1, 5, 40), (False, True), [(None, False)]),
    # Gemma 2 bounds its scores, gpt-oss has one more column in each softmax, whose value is zero
    *product(["bundles"], (None, 5), [False], [(3.0, False), (None, True), (3.0, True)]),
]


@pytest.mark.parametrize(("limits", "window", "local", "special"), CASES)
def test_blocks_and_flex_equal_the_dense_formula(monkeypatch, limits, window, local, special):
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(f"rl.trainer.model.attention.{name}", value)
    cap, sunk = special
    # as with context parallelism
    mine = torch.cat([torch.arange(20, 90), torch.arange(200, 290)]).to(DEVICE) if local else None
    tree = TreeMask(*random_row(1, 300), mine)
    query, key, value = qkv(160 if local else 300, 300)
    sinks = torch.randn(6, dtype=torch.float64, device=DEVICE).requires_grad_() if sunk else None
    scores = 0.7 * query @ key.repeat_interleave(3, 1).transpose(2, 3)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores.masked_fill(~tree.dense(window), -torch.inf)
    if sunk:
        scores = torch.cat([scores, sinks.view(1, 6, 1, 1).expand(1, 6, 300, 1)], -1)
    expected = (scores.softmax(-1)[..., :300] @ value.repeat_interleave(3, 1)).transpose(1, 2)
    out = attend_blocks(query, key, value, tree, window, 0.7, cap, sinks)
    assert (out - expected).abs().max() < 1e-12
    plan = tree.plan(window, query.dtype, 2, 3)
    assert (len(plan.padding) > 0 and len(plan.bundles[0].mask) > 2) == (limits == "bundles")
    inputs, grad = [x for x in (query, key, value, sinks) if x is not None], torch.randn_like(out)
    grads = [torch.autograd.grad(o, inputs, grad) for o in (out, expected)]
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))
    query, key, value, *sinks = (x.detach().float() for x in inputs)
    out = attend_flex(query, key, value, tree, window, 0.7, cap, *sinks)
    assert (out - expected).abs().max() < 1e-5


def test_every_query_is_in_one_block_and_the_cost_is_what_is_visible():
    # one chain of 4096, and 8 answers of 128 behind a prompt of 256
    positions = torch.cat([torch.arange(4096), torch.arange(256), torch.arange(256, 384).repeat(8)])
    starts = 4096 + 256 + 128 * torch.arange(9)
    subtree_ends = torch.cat(
        [
            torch.full((4096,), 4096),
            torch.full((256,), int(starts[-1])),
            starts[1:].repeat_interleave(128),
        ]
    )
    found = TreeMask(subtree_ends, positions).blocks(None, torch.float32)
    assert [b.queries.start for b in found] == [0, *(b.queries.stop for b in found[:-1])] and found[
        -1
    ].queries.stop == len(subtree_ends)
    assert sum(b.mask.numel() for b in make_plan(bundled(found), 1, 1).bundles) < 1.15 * int(
        (positions + 1).sum()
    )
    storages = {
        b.mask.untyped_storage().data_ptr(): b.mask.untyped_storage().nbytes() for b in found
    }
    assert sum(storages.values()) < 4 * 300 * 4096  # unbranched blocks share one triangle


def test_flex_mask_knows_full_and_partial_blocks():
    subtree_ends, positions = (
        torch.tensor([512] * 256 + [384] * 128 + [512] * 128),
        torch.cat([torch.arange(256), torch.arange(256, 384).repeat(2)]),
    )
    mask = TreeMask(subtree_ends, positions).flex(None)
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 2] and mask.kv_num_blocks[
        0, 0
    ].tolist() == [1, 1, 1, 1]


def test_bfloat16_is_as_near_as_torch():
    subtree_ends, positions = random_row(2, 200)
    tree = TreeMask(subtree_ends, positions)
    exact = qkv(200, 200)
    rounded = [x.detach().bfloat16() for x in exact]
    expected = attend_blocks(*exact, tree, None, 0.25)
    repeated = [x.repeat_interleave(3, 1) for x in rounded[1:]]
    # its fused kernel asks the CPU itself, and fails where torch is told to use fewer instructions
    with sdpa_kernel(SDPBackend.MATH):
        theirs = scaled_dot_product_attention(
            rounded[0], *repeated, attn_mask=tree.dense(), scale=0.25
        )
    ours = attend_blocks(*rounded, tree, None, 0.25)
    # Both round scores, probabilities and the result to bfloat16.
    assert (ours - expected).norm() < 2 * (theirs.transpose(1, 2) - expected).norm()


def test_what_is_not_plain_attention_is_refused():
    tree = TreeMask(torch.tensor([2, 2], device=DEVICE), torch.tensor([0, 1], device=DEVICE))
    tensors = qkv(2, 2)
    for special in ({"position_bias": torch.zeros(2, 2)}, {"head_mask": torch.zeros(6)}):
        with run_error(f"{next(iter(special))}: set trainer.attention = auto"):
            attention(nn.Module(), *tensors, None, tree=tree, **special)
    with run_error("keyword arguments"):
        attention(nn.Module(), *tensors, None)
    out, _ = attention(nn.Module(), *tensors, None, tree=tree, sliding_window=0, softcap=None)
    assert out.shape == (1, 2, 6, 16) and tree.windows == {None}
