import math

import pytest
import torch

from rl.inference.draw import BLOCK, counted_uniform, draw, mix

EPSILON = torch.finfo(torch.float32).eps


def sums_before(logits: torch.Tensor) -> torch.Tensor:
    """The sum of the probabilities up to each token of a row, itself included, in float64."""
    return logits.double().softmax(-1).cumsum(-1)


def rounding(logits: torch.Tensor) -> float:
    """How far a sum of float32 probabilities may be off: each is off by the roundings of its
    logit's difference to the largest, of exp (two units in the last place at most) and of the
    division, relative to itself; and they add up to 1. A block is added up pairwise."""
    largest = float((logits.max() - logits.min()).abs())
    return EPSILON * (largest + 4 + math.log2(BLOCK))


@pytest.mark.parametrize("vocabulary", [7, 97, 4096, 49152, 1031 * 2, 32003])
def test_a_token_is_the_one_at_which_the_sum_of_probabilities_passes_the_draw(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(6, vocabulary, generator=generator)
    uniform = torch.rand(6, dtype=torch.float64, generator=generator)
    tokens, logprobs = draw(logits.clone(), uniform)
    assert tokens.shape == logprobs.shape == (6, 1)
    for row, u, token in zip(logits, uniform, tokens[:, 0].tolist(), strict=True):
        ends, bound = sums_before(row), rounding(row)
        assert (float(ends[token - 1]) if token else 0.0) - bound <= u < ends[token] + bound
    expected = logits.double().log_softmax(-1).gather(1, tokens)
    assert float((logprobs - expected).abs().max()) < rounding(logits) + EPSILON * float(
        expected.abs().max()
    )


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_what_is_impossible_never_comes_at_the_ends_either(uniform):
    logits = torch.full((1, 3 * BLOCK), -float("inf"))
    logits[0, [5, 1700]] = torch.tensor([0.0, 0.5])
    token, logprob = draw(logits.clone(), torch.tensor([uniform], dtype=torch.float64))
    assert int(token) == (5 if uniform == 0 else 1700)
    assert float(logprob) == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [100, BLOCK + 1])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary_and_a_logprob_that_is_none(
    vocabulary,
):
    token, logprob = draw(
        torch.full((1, vocabulary), float("nan")), torch.tensor([0.3], dtype=torch.float64)
    )
    assert 0 <= int(token) < vocabulary and bool(logprob.isnan())


def test_rows_may_be_parts_of_longer_ones_as_those_of_a_padded_vocabulary():
    padded = torch.randn(40, 4100, generator=torch.Generator().manual_seed(1))
    uniform = torch.linspace(0, 0.999, 40, dtype=torch.float64)
    expected = draw(padded[:, :4096].clone(), uniform)
    found = draw(padded[:, :4096], uniform)
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])


def test_a_counted_number_follows_from_seed_and_position_and_is_uniform():
    """SplitMix64's first outputs for the states 0 and 1 are those of its authors' C code; a
    chi-square of 100 cells has mean 99."""
    assert [mix(0), mix(1)] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert counted_uniform(7, 3) == counted_uniform(7, 3) != counted_uniform(7, 4)
    assert 0 <= counted_uniform(-(2**63), 0) < 1 and 0 <= counted_uniform(2**63 - 1, 10**6) < 1
    for numbers in (
        [counted_uniform(seed, 0) for seed in range(20_000)],
        [counted_uniform(0, position) for position in range(20_000)],
        [
            counted_uniform(seed, 1)
            - counted_uniform(seed, 0)
            + (counted_uniform(seed, 1) < counted_uniform(seed, 0))
            for seed in range(20_000)
        ],
    ):
        cells = torch.histc(torch.tensor(numbers), bins=100, min=0, max=1)
        chi_square = float(((cells - 200) ** 2 / 200).sum())
        assert 99 - 5 * math.sqrt(2 * 99) < chi_square < 99 + 5 * math.sqrt(2 * 99)
