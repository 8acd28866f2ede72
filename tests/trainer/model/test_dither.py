"""Dither: the rounded weights remain the same, and move as far as the masters on average."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.trainer.model import dither as module
from rl.trainer.model.dither import dither, hashes, parts
from rl.trainer.model.policy import load_policy

SHAPE = (512, 1000)


def bfloat16_weights(shape=SHAPE):
    """A module with normal weights, rounded to bfloat16, and its rounded weight."""
    layer = nn.Linear(*reversed(shape), bias=False)
    layer.weight.data = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16().float()
    return layer, layer.weight.detach().bfloat16()


def units(weights, rounded):
    """Distances of the weights from the rounded ones, in numbers that lie between."""
    return weights.detach().view(torch.int32) - rounded.float().view(torch.int32)


def test_the_rounded_weights_are_the_same_and_masters_lie_anywhere_around_them():
    layer, rounded = bfloat16_weights()
    dither(layer)
    assert torch.equal(layer.weight.bfloat16(), rounded)
    noise = units(layer.weight, rounded).double()
    error = 4 / math.sqrt(noise.numel())  # four standard errors of the mean of numbers with standard deviation 1
    assert noise.min() < -32_700 and noise.max() > 32_700
    assert abs(noise.mean()) / 65535 * math.sqrt(12) < error and noise.std() == pytest.approx(65535 / math.sqrt(12), rel=error)
    for shifted in (noise.roll(1, 0), noise.roll(1, 1), noise.T.reshape(noise.shape)):  # neighbours have independent noise
        assert abs((noise * shifted).mean() / noise.var()) < error


@pytest.mark.parametrize("update", [1e-6, 1e-5, 1e-4])
def test_the_mean_of_the_rounded_weights_moves_as_far_as_the_masters(update):
    layer, rounded = bfloat16_weights()
    plain = (layer.weight.detach() + update).bfloat16().double().sub(rounded.double()).mean()
    dither(layer)
    moves = (layer.weight.detach() + update).bfloat16().double().sub(rounded.double())
    assert abs(moves.mean() - update) < 4 * moves.std() / math.sqrt(moves.numel())
    if update == 1e-6:
        assert plain < 0.1 * update  # without dither next to nothing arrives


def test_numbers_at_the_edges_round_as_before():
    """Powers of two, whose smaller neighbour is nearer; the least and the largest numbers; zeros and numbers that are no bfloat16."""
    powers = [sign * 2.0**exponent for sign in (1, -1) for exponent in range(-126, 128)]
    edges = [0.0, -0.0, 2.0**-133, 2.0**-127, torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min]
    others = [0.1, -1e-40, 1 + 2.0**-23]
    layer = nn.Linear(1, 1, bias=False)
    before = torch.tensor([*powers, *edges, *others]).expand(200, -1).contiguous()
    layer.weight = nn.Parameter(before.clone())
    dither(layer)
    assert torch.equal(layer.weight.bfloat16(), before.bfloat16())
    moved = (layer.weight != before).float().mean(0)
    assert (moved[: len(powers)] > 0.9).all()
    assert not moved[-len(others) :].any() and not moved[len(powers) : len(powers) + 2].any()


def test_noise_depends_on_a_weights_name_and_place_only(monkeypatch):
    """Neither on the shard that a rank holds, of rows or columns, nor on the size of the parts in which it is made."""
    whole = hashes(7, torch.empty(6, 5, 4), (0, 0, 0))
    assert torch.equal(hashes(7, torch.empty(2, 5, 4), (3, 0, 0)), whole[3:5])
    assert torch.equal(hashes(7, torch.empty(6, 2, 4), (0, 3, 0)), whole[:, 3:])
    assert len(whole.unique()) == whole.numel() and not torch.equal(hashes(8, torch.empty(6, 5, 4), (0, 0, 0)), whole)
    monkeypatch.setitem(module.CHUNK, "cpu", 40)
    rows = torch.empty(6, 5, 4)
    assert [(len(part), first) for part, first in parts(rows, 10)] == [(2, 10), (2, 12), (2, 14)]
    assert torch.equal(torch.cat([hashes(7, part, (first, 0, 0)) for part, first in parts(rows, 0)]), whole)
    assert parts(torch.empty(0, 4), 3) == []


def test_a_policy_that_computes_in_bfloat16_has_dither_and_its_version_is_the_file(tmp_path, world):
    folder = make_tiny_model(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})

    def masters(dtype, frozen=False):
        model = load_policy(str(folder), ModelConfig(dtype=dtype), TrainerConfig(), world, frozen)
        return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}

    plain, dithered, frozen = masters("float32"), masters("bfloat16"), masters("bfloat16", frozen=True)
    for name, weights in dithered.items():
        assert weights.dtype == torch.float32 and torch.equal(weights.bfloat16(), frozen[name])
        assert torch.equal(plain[name].bfloat16(), frozen[name])
        assert (weights != plain[name]).float().mean() > 0.99
