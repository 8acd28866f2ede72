import pytest
import torch

from rl.inference.draw import BLOCK, draw


def exact(logits: torch.Tensor, uniform: float) -> int:
    """The token by the definition, in float64."""
    ends = logits.double().softmax(-1).cumsum(-1)
    return int((ends <= uniform * ends[-1]).sum())


@pytest.mark.parametrize("vocabulary", [7, 97, 4096, 49152, 1031 * 2, 32003])
def test_a_token_is_the_one_at_which_the_sum_of_probabilities_passes_the_draw(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(6, vocabulary, generator=generator)
    uniform = torch.rand(6, dtype=torch.float64, generator=generator)
    tokens, logprobs = draw(logits.clone(), uniform)
    assert tokens.shape == logprobs.shape == (6, 1)
    assert [int(token) for token in tokens] == [exact(row, float(u)) for row, u in zip(logits, uniform, strict=True)]
    expected = logits.double().log_softmax(-1).gather(1, tokens)
    assert float((logprobs - expected).abs().max()) < 2e-6


def test_every_token_comes_as_often_as_it_is_probable():
    logits = torch.tensor([0.0, 1.0, -float("inf"), 2.0, -3.0, -float("inf")])
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, _ = draw(logits.repeat(20_000, 1), uniform)
    counts = torch.bincount(tokens[:, 0], minlength=6)
    assert float((counts / 20_000 - logits.softmax(-1)).abs().max()) < 1e-4
    assert counts[2] == counts[5] == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_what_is_impossible_never_comes_at_the_ends_either(uniform):
    logits = torch.full((1, 3 * BLOCK), -float("inf"))
    logits[0, [5, 1700]] = torch.tensor([0.0, 0.5])
    token, logprob = draw(logits.clone(), torch.tensor([uniform], dtype=torch.float64))
    assert int(token) == (5 if uniform == 0 else 1700)
    assert float(logprob) == pytest.approx(float(logits[0].log_softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [100, BLOCK + 1])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary_and_a_logprob_that_is_none(vocabulary):
    token, logprob = draw(torch.full((1, vocabulary), float("nan")), torch.tensor([0.3], dtype=torch.float64))
    assert 0 <= int(token) < vocabulary and bool(logprob.isnan())


def test_rows_may_be_parts_of_longer_ones_as_those_of_a_padded_vocabulary():
    padded = torch.randn(40, 4100, generator=torch.Generator().manual_seed(1))
    uniform = torch.linspace(0, 0.999, 40, dtype=torch.float64)
    expected = draw(padded[:, :4096].clone(), uniform)
    found = draw(padded[:, :4096], uniform)
    assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
