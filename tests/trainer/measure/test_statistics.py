"""Metrics over tokens by hand. The token log: what is noted of each token, against plain
transformers, and its files.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rl.wire.parity
from rl.config.trainer import TokenLogConfig
from rl.run_dir.files import CorruptFileError
from rl.run_dir.lease import hold_role
from rl.run_dir.numbers import CLIPPED, FIRST, LATER, MASKED, read_token_log, write_token_log
from rl.run_dir.paths import RunDir, numbers
from rl.trainer.data.packing import cut
from rl.trainer.loss.common import LossTerms
from rl.trainer.measure.statistics import Statistics, TokenFiles, quantile, to_bin
from rl.trainer.model.head import Scores
from tests.bounds import OPERATIONS, rounding
from tests.trainer.data.test_packing import learner_of, the_batch, train
from tests.trainer.layouts import Kept
from tests.trainer.samples import make_sample, plain_scores


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


class Columns(Kept):
    """In place of TokenFiles: the columns as they are written."""

    def start(self, step, columns):
        self.columns = columns


def test_tokens_are_in_the_order_of_the_samples_whatever_the_packing(tied_folder, world):
    batch = the_batch()
    batch.samples.insert(3, make_sample([1, 2], [], group=0))  # nothing to train
    plain = AutoModelForCausalLM.from_pretrained(tied_folder, dtype=torch.float32)
    with torch.no_grad():
        expected = np.concatenate(
            [plain_scores(plain, sample)[0].double().numpy() for sample in batch.samples]
        )
    ratio = np.exp(expected - np.concatenate([sample.logprobs for sample in batch.samples]))
    low, high = np.quantile(ratio, [0.2, 0.8])
    context, config = learner_of(
        tied_folder, world, loss={"token_mask": [float(low), float(high)], "type": "cispo"}
    )
    context.token_files = kept = Columns()
    train(context, config, batch)
    assert kept.columns["trainer_logprobs"] == pytest.approx(
        expected, abs=rounding(OPERATIONS, np.abs(expected).max())
    )
    assert kept.columns["entropies"].dtype == np.float16
    outside = (ratio < low * (1 - 1e-5)) | (ratio > high * (1 + 1e-5))
    assert (
        np.array_equal(kept.columns["flags"] == MASKED + FIRST, outside)
        and 0 < outside.mean() < 0.5
    )
    assert set(kept.columns) == {"trainer_logprobs", "entropies", "flags"}


def test_later_epochs_add_only_that_a_token_was_stopped(tied_folder, world):
    """At this learning rate the second epoch's ratios are far from 1, those of the first
    minibatch's first pass exactly there."""
    batch, loss = the_batch(), {"type": "clip", "clip_low": 1e-3, "clip_high": 1e-3}
    once, config = learner_of(tied_folder, world, loss=loss)
    once.token_files = first = Columns()
    train(once, config, batch)
    twice, config = learner_of(tied_folder, world, loss=loss, epochs=2)
    twice.token_files = second = Columns()
    train(twice, config, batch)
    for name in ("trainer_logprobs", "entropies"):
        assert np.array_equal(first.columns[name], second.columns[name])
    later = second.columns["flags"] & LATER > 0
    # of the first pass: it is the policy itself
    assert later.mean() > 0.2 and not (second.columns["flags"] & CLIPPED).any()
    assert (first.columns["flags"] & LATER == 0).all()
    assert (second.columns["flags"] & FIRST > 0).all()


def test_the_log_says_which_tokens_were_scored_before_the_first_optimizer_step(tied_folder, world):
    batch = the_batch()
    context, config = learner_of(tied_folder, world, minibatches=2, epochs=2)
    context.token_files = kept = Columns()
    train(context, config, batch)
    first = cut(batch, 2, config.seed)[0]
    expected = [
        [number in first] * sample.num_trained for number, sample in enumerate(batch.samples)
    ]
    assert np.array_equal(kept.columns["flags"] & FIRST > 0, np.concatenate(expected))
    assert 0 < len(first) < len(batch.samples)


def columns(length: int) -> dict[str, np.ndarray]:
    return {"trainer_logprobs": np.zeros(length, np.float32), "flags": np.zeros(length, np.uint8)}


def test_the_oldest_files_go_first_and_a_step_that_is_trained_again_counts_once(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    lease = hold_role(run_dir.lock("trainer"))
    write_token_log(run_dir.tokens(1), columns(1000))
    files = TokenFiles(run_dir, TokenLogConfig(max_gib=16_000 / 2**30))
    for step in (2, 2, 2, 3):
        files.start(step, columns(1000))
    files.finish()
    assert (
        numbers(run_dir.tokens_dir, ".safetensors") == [1, 2, 3]
        and sum(files.sizes.values()) < 16_000
    )
    files.start(4, columns(1000))
    files.finish()
    assert numbers(run_dir.tokens_dir, ".safetensors") == [2, 3, 4] and list(files.sizes) == [
        2,
        3,
        4,
    ]
    files.start(5, columns(100_000))  # one alone is larger than the limit
    files.start(6, None)  # a rank that is not the first
    assert numbers(run_dir.tokens_dir, ".safetensors") == [5]
    lease.close()


def test_a_file_that_is_damaged_or_of_another_batch_is_refused(tmp_path):
    path = tmp_path / "000001.safetensors"
    with pytest.raises(FileNotFoundError):
        read_token_log(path, 5)
    size = write_token_log(path, columns(5))
    assert path.stat().st_size == size and len(read_token_log(path, 5)["flags"]) == 5
    with pytest.raises(CorruptFileError, match="does not match this batch, which trains 6 tokens"):
        read_token_log(path, 6)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="damaged"):
        read_token_log(path, 5)
