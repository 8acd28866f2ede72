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
    torch.manual_seed(0)
    envs = torch.tensor([0, 1, 1, 1, 0, 1])
    log_ratios, entropies = torch.tensor([0.0, 0.1, -0.2, 0.3, 2.0, -1.0]), torch.arange(6.0)
    masked = torch.tensor([False, False, False, False, True, True])
    reference = torch.full((6,), 0.25)
    lag_zero = torch.tensor([False, True, True, False, True, False])
    statistics = Statistics(SimpleNamespace(envs=["add", "sort"]), torch.device("cpu"))
    for part in (slice(0, 2), slice(2, 6), slice(0, 0)):
        batch, scores = (
            SimpleNamespace(
                envs=envs[part], lag_zero=lag_zero[part], logprobs=torch.zeros(6)[part]
            ),
            Scores(torch.zeros(0), entropies[part]),
        )
        statistics.add(
            batch, torch.tensor(0.5), scores, terms(log_ratios[part], masked[part], reference[part])
        )
    metrics = statistics.metrics(world)
    kl = (log_ratios.exp() - 1 - log_ratios).tolist()
    expected = {
        "loss/mean": 1.5,
        "mismatch_kl/max": kl[4],
        "mismatch_kl/mean": (kl[1] + kl[2] + kl[4]) / 3,
        "mismatch_kl/add/mean": kl[4],
        "lag_kl/mean": (kl[0] + kl[3] + kl[5]) / 3,
        "lag_kl/sort/mean": (kl[3] + kl[5]) / 2,
        "entropy/mean": 2.5,
        "entropy/sort/mean": 11 / 4,
        "masked_fraction": 2 / 6,
        "masked_fraction/add": 0.5,
        "masked_fraction/sort": 0.25,
        "reference_kl/mean": 0.25,
        "reference_kl/sort/mean": 0.25,
        "ratio/mean": log_ratios.exp().mean().item(),
    }
    agreement = statistics.parity.total(world)  # of the three fresh tokens: log r = 0.1, -0.2, 2
    expected_agreement = rl.wire.parity.parity_of([0.1, -0.2, 2.0])
    for name, value in vars(expected_agreement).items():
        assert getattr(agreement, name) == pytest.approx(value, rel=1e-6), name
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert metrics["ratio/add/p01"] == 1.0 and metrics["ratio/add/p99"] == pytest.approx(
        math.exp(2.0), rel=0.05
    )
    assert metrics["ratio/sort/p50"] == pytest.approx(math.exp(-0.2), rel=0.005)


def test_tokens_whose_sampler_gave_no_log_probability_are_not_compared(world):
    """Recorded rollouts may have versions without log-probabilities: their NaN made the two seem
    to compute different models."""
    statistics, log_ratios = (
        Statistics(SimpleNamespace(envs=["add"]), torch.device("cpu")),
        torch.tensor([math.nan, 0.1]),
    )
    known = torch.tensor([math.nan, -1.0])
    batch = SimpleNamespace(
        envs=torch.zeros(2, dtype=torch.int64),
        lag_zero=torch.ones(2, dtype=torch.bool),
        logprobs=known,
    )
    statistics.add(
        batch,
        torch.tensor(0.0),
        Scores(torch.zeros(0), torch.zeros(2)),
        terms(log_ratios, torch.zeros(2, dtype=torch.bool)),
    )
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
