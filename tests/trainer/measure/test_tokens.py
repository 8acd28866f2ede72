"""The token log: what is noted of each token, against plain transformers, and its files."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.trainer import TokenLogConfig
from rl.run_dir.files import CorruptFileError
from rl.run_dir.lease import hold_role
from rl.run_dir.paths import numbers
from rl.run_dir.token_log import CLIPPED, LATER, MASKED, read_token_log, write_token_log
from rl.trainer.measure.tokens import TokenFiles
from tests.bounds import OPERATIONS, rounding
from tests.trainer.data.test_minibatches import learner_of, the_batch, train
from tests.trainer.layouts import Kept
from tests.trainer.samples import make_sample, plain_scores


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
    assert np.array_equal(kept.columns["flags"] == MASKED, outside) and 0 < outside.mean() < 0.5
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


def columns(length: int) -> dict[str, np.ndarray]:
    return {"trainer_logprobs": np.zeros(length, np.float32), "flags": np.zeros(length, np.uint8)}


def test_the_oldest_files_go_first_and_a_step_that_is_trained_again_counts_once(run_dir):
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
