import math
from types import SimpleNamespace

import pytest
import torch

import rl.wire.parity
from rl.trainer.loss.common import LossTerms
from rl.trainer.measure.statistics import Statistics, quantile, to_bin
from rl.trainer.model.head import Scores


def terms(log_ratios, masked, reference=None):
    ratio = log_ratios.exp()
    return LossTerms(
        torch.zeros_like(ratio),
        masked,
        torch.zeros_like(masked),
        ratio,
        ratio - 1 - log_ratios,
        reference,
        None,
    )


def test_two_environments_in_two_micro_batches(world):
    envs, entropies = torch.tensor([0, 1, 1, 1, 0, 1]), torch.arange(6.0)
    log_ratios = torch.tensor([0.0, 0.1, -0.2, 0.3, 2.0, -1.0])
    masked = torch.tensor([False] * 4 + [True] * 2)
    reference = torch.linspace(0.25, 0.5, 6)
    lag_zero = torch.tensor([False, True, True, False, True, False])
    statistics = Statistics(SimpleNamespace(envs=["add", "sort"]), torch.device("cpu"))
    for part in (slice(0, 2), slice(2, 6), slice(0, 0)):
        batch = SimpleNamespace(
            envs=envs[part], lag_zero=lag_zero[part], logprobs=torch.zeros(6)[part]
        )
        scores = Scores(torch.zeros(0), entropies[part])
        measured = terms(log_ratios[part], masked[part], reference[part])
        statistics.add(batch, torch.tensor(0.5), scores, measured)
    metrics = statistics.metrics(world)
    kl, every = log_ratios.exp() - 1 - log_ratios, torch.ones(6, dtype=torch.bool)
    expected = {"loss/mean": 1.5, "mismatch_kl/max": kl[4], "ratio/mean": log_ratios.exp().mean()}
    for of, chosen in (("", every), ("/add", envs == 0), ("/sort", envs == 1)):
        expected |= {
            f"mismatch_kl{of}/mean": kl[chosen & lag_zero].mean(),
            f"lag_kl{of}/mean": kl[chosen & ~lag_zero].mean(),
            f"entropy{of}/mean": entropies[chosen].mean(),
            f"reference_kl{of}/mean": reference[chosen].mean(),
            f"masked_fraction{of}": masked[chosen].float().mean(),
        }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-6), name
    agreement = statistics.parity.total(world)
    for name, value in vars(rl.wire.parity.parity_of(log_ratios[lag_zero].tolist())).items():
        assert getattr(agreement, name) == pytest.approx(value, rel=1e-6), name
    assert metrics["ratio/add/p01"] == 1.0
    assert metrics["ratio/add/p99"] == pytest.approx(math.exp(2.0), rel=0.05)
    assert metrics["ratio/sort/p50"] == pytest.approx(math.exp(-0.2), rel=0.005)


def test_tokens_whose_sampler_gave_no_log_probability_are_not_compared(world):
    """Recorded rollouts may have versions without log-probabilities: their NaN made the two seem
    to compute different models."""
    statistics = Statistics(SimpleNamespace(envs=["add"]), torch.device("cpu"))
    none = torch.zeros(2, dtype=torch.bool)
    batch = SimpleNamespace(envs=none.long(), lag_zero=~none, logprobs=torch.tensor([math.nan, -1]))
    measured = terms(torch.tensor([math.nan, 0.1]), none)
    scores = Scores(torch.zeros(0), torch.zeros(2))
    statistics.add(batch, torch.tensor(0.0), scores, measured)
    agreement = statistics.parity.total(world)
    assert (agreement.tokens, agreement.largest) == (1, pytest.approx(0.1))


def test_quantiles_of_the_histogram_are_those_of_the_values():
    torch.manual_seed(0)
    for scale in (1e-5, 1e-2, 1.0):
        values = (torch.randn(20000) * scale).clamp(-10, 10)
        counts = torch.bincount(to_bin(values), minlength=1025).double()
        for q in (0.01, 0.5, 0.99):
            expected = torch.quantile(values, q).item()
            assert quantile(counts, q) == pytest.approx(expected, rel=0.03, abs=0.02 * scale + 2e-6)
    edges = torch.tensor([-10.0, 0.0, 10.0])
    assert to_bin(edges).tolist() == [0, 512, 1024]
    assert quantile(torch.bincount(to_bin(edges), minlength=1025).double(), 0.5) == 0.0
