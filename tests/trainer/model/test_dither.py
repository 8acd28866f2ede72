"""Dither: the rounded weights remain the same, and move as far as the masters on average."""

import math

import pytest
import torch
from torch import nn

from rl.trainer.model import dither as module
from rl.trainer.model.dither import dither, hashes, parts

SHAPE = (512, 1000)
FIRST = [-15557, -23742, -17398, -15441]
"""The first numbers of one noise: a replay needs the same on every machine."""


def bfloat16_weights(shape=SHAPE):
    """A module with normal weights, rounded to bfloat16, and its rounded weight."""
    layer = nn.Linear(*reversed(shape), bias=False)
    layer.weight.data = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16().float()
    )
    return layer, layer.weight.detach().bfloat16()


def units(weights, rounded):
    """Distances of the weights from the rounded ones, in numbers that lie between."""
    return weights.detach().view(torch.int32) - rounded.float().view(torch.int32)


def test_the_rounded_weights_are_the_same_and_masters_lie_anywhere_around_them():
    layer, rounded = bfloat16_weights()
    dither(layer, 1)
    assert torch.equal(layer.weight.bfloat16(), rounded)
    noise = units(layer.weight, rounded).double()
    # four standard errors of the mean of numbers with standard deviation 1
    error = 4 / math.sqrt(noise.numel())
    assert abs(noise.mean()) / 65535 * math.sqrt(12) < error and noise.std() == pytest.approx(
        65535 / math.sqrt(12), rel=error
    )
    shares = torch.histc(noise, bins=16, min=-32768, max=32768) / noise.numel()
    # a bin's count has a standard error of sqrt(1/16 * 15/16)
    assert (shares - 1 / 16).abs().max() < error / 4
    for shift in (1, 2, 4, 8, 64):  # neighbours of any distance have independent noise
        for shifted in (noise.roll(shift, 0), noise.roll(shift, 1)):
            assert abs((noise * shifted).mean() / noise.var()) < error, shift


def test_noise_is_that_of_a_seed_and_a_name():
    def noise(seed, name):
        layer, rounded = bfloat16_weights()
        dither(nn.ModuleDict({name: layer}), seed)
        return units(layer.weight, rounded)

    first = noise(1, "a")
    assert first.equal(noise(1, "a")) and first[0, :4].tolist() == FIRST
    for other in (noise(2, "a"), noise(1, "b")):
        assert (first == other).float().mean() < 1e-3


@pytest.mark.parametrize("update", [1e-6, 1e-5, 1e-4])
def test_the_mean_of_the_rounded_weights_moves_as_far_as_the_masters(update):
    layer, rounded = bfloat16_weights()
    plain = (layer.weight.detach() + update).bfloat16().double().sub(rounded.double()).mean()
    dither(layer, 1)
    moves = (layer.weight.detach() + update).bfloat16().double().sub(rounded.double())
    assert abs(moves.mean() - update) < 4 * moves.std() / math.sqrt(moves.numel())
    if update == 1e-6:
        assert plain < 0.1 * update  # without dither next to nothing arrives


def test_numbers_at_the_edges_round_as_before():
    """Powers of two, whose smaller neighbour is nearer; the least and the largest numbers;
    zeros, infinities, other float32 numbers."""
    powers = [sign * 2.0**exponent for sign in (1, -1) for exponent in range(-126, 128)]
    edges = [
        0.0,
        -0.0,
        2.0**-133,
        2.0**-127,
        torch.finfo(torch.bfloat16).max,
        torch.finfo(torch.bfloat16).min,
    ]
    others = [0.1, -1e-40, 1 + 2.0**-23, math.inf, -math.inf]
    layer = nn.Linear(1, 1, bias=False)
    before = torch.tensor([*powers, *edges, *others]).expand(200, -1).contiguous()
    layer.weight = nn.Parameter(before.clone())
    dither(layer, 1)
    assert torch.equal(layer.weight.bfloat16(), before.bfloat16())
    moved = (layer.weight != before).float().mean(0)
    assert (moved[: len(powers)] > 0.9).all()
    assert not moved[-len(others) :].any() and not moved[len(powers) : len(powers) + 2].any()


def test_noise_depends_on_the_place_of_a_number_alone(monkeypatch):
    """Neither on the rows that a rank holds, see tests/trainer/layouts.py, nor on the size of
    parts."""
    whole = hashes(7, torch.empty(6, 5, 4), (0, 0, 0))
    assert torch.equal(hashes(7, torch.empty(6, 2, 4), (0, 3, 0)), whole[:, 3:])
    assert len(whole.unique()) == whole.numel()
    monkeypatch.setitem(module.CHUNK, "cpu", 40)
    split = [hashes(7, part, (first, 0, 0)) for part, first in parts(torch.empty(6, 5, 4), 0)]
    assert len(split) == 3 and torch.equal(torch.cat(split), whole)
    assert not list(parts(torch.empty(0, 4), 3))
