"""Random batches. Supervised fine-tuning: what a batch has, its loss against plain cross entropy,
and the real trainer, resumed and on two ranks.
"""

import json
import os
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.loss import CrossEntropyConfig
from rl.config.run import RLConfig
from rl.config.trainer import FakeDataConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import numbered
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import (
    FakeBatches,
    FromExamples,
    full_batch,
    make_batch,
    shuffled,
    split,
    validate,
)
from rl.trainer.data.packing import Layout, pack
from rl.trainer.loss.common import compute_loss
from rl.trainer.loss.losses import cross_entropy
from rl.trainer.model.head import score
from rl.trainer.sft.tokens import open_examples, prepare_data, write_examples
from rl.trainer.train import Trainer, loss_inputs
from tests import jsonl
from tests.trainer.policies import learner
from tests.trainer.samples import (
    assert_alike,
    assert_same_files,
    pack_alone,
    plain_scores,
    sample_weights,
    write_config,
)
from tests.trainer.test_departure import SIGNAL_IN_STEP_3, signal_in_step_3
from tests.trainer.test_main import run_trainer

STEPS = 6


def rows(count=37):
    """Prompts, some of them alike, and answers of several lengths."""
    rng = random.Random(0)
    return [
        {"prompt": f"Say {'ab'[i % 2]} {rng.randint(1, 5)}", "completion": "x" * rng.randint(1, 12)}
        for i in range(count)
    ]


def make_config(root, model, **more) -> RLConfig:
    """A configuration on `rows`; `more`: other settings at the top, those of sft and trainer are
    merged."""
    data = root / "data.jsonl"
    data.write_text(jsonl.text(*rows()))
    sft = {
        "dataset": str(data),
        "batch_size": 8,
        "validation_fraction": 0.2,
        "validation_interval": 2,
    } | more.pop("sft", {})
    trainer = {
        "optim": {"lr": 1e-3, "schedule": "cosine"},
        "micro_batch_tokens": 128,
        "checkpoint": {"interval": 4, "keep_last": 5},
        "batch_timeout_s": 60,
    } | more.pop("trainer", {})
    values = {
        "name": "run",
        "output_dir": str(root),
        "max_steps": STEPS,
        "model": {"name": str(model), "dtype": "float32"},
    }
    config = RLConfig.model_validate(values | {"sft": sft, "trainer": trainer} | more)
    write_config(config)
    return config


def prepared(config) -> FromExamples:
    prepare_data(config, config.model.name, lambda *_: None)
    return FromExamples(config, config.run_dir.data)


def source_of(root, model, **more) -> FromExamples:
    return prepared(make_config(root, model, **more))


# Batches


def texts(batch):
    return [tuple(sample.token_ids.tolist()) for sample in batch.samples]


def test_every_pass_has_every_example_once_in_a_new_order(tied_folder, tmp_path):
    source = source_of(tmp_path, tied_folder, sft={"epochs": 2, "validation_fraction": 0})
    batches = [source.receive(step) for step in range(1, source.num_steps + 1)]
    # 74 examples
    assert [len(batch.samples) for batch in batches] == [8] * 9 + [2] and source.receive(11) is None
    whole = [text for batch in batches for text in texts(batch)]
    assert Counter(whole[:37]) == Counter(whole[37:]) and whole[:37] != whole[37:]
    assert source.epoch(1) == 8 / 37 and source.epoch(10) == 2.0


def test_held_out_tasks_are_never_trained(tied_folder, tmp_path):
    source = source_of(tmp_path, tied_folder, sft={"epochs": 1, "validation_fraction": 0.2})
    trained, held_out = set(source.places.tolist()), set(source.held_out_places.tolist())
    assert len({rows()[place]["prompt"] for place in held_out}) == 2  # of ten
    assert len(held_out) == 11 and trained | held_out == set(range(37)) and not trained & held_out
    assert [len(batch.samples) for batch in source.validation(0)] == [8, 3] and source.validation(
        1
    ) == []
    assert list(source.validation(source.num_steps)) and source.num_steps == 4  # 26 examples
    with pytest.raises(RunError, match="leaves none of 10 tasks"):
        split(pa.table({"group": np.arange(10)}), 0.99, seed=0)


def chat(*said):
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
        ]
    }


@pytest.mark.parametrize(
    ("row", "tasks"),
    [
        (lambda i: {"prompt": f"Say {i % 4}", "completion": f"{i}"}, 4),
        (lambda i: {"prompt": "", "completion": f"a text {i % 5}"}, 5),
        (lambda i: chat(f"Say {i % 4}", f"{i}"), 4),
        (lambda i: chat("Hello", "Hi", f"Say {i % 4}", f"{i}"), 4),
    ],
)
def test_rows_of_one_prompt_are_on_one_side(tied_folder, tmp_path, row, tasks):
    """Regression: a row that was there twice was trained and held out."""
    data = tmp_path / "repeated.jsonl"
    data.write_text(jsonl.text(*map(row, range(20))))
    config = make_config(
        tmp_path, tied_folder, sft={"dataset": str(data), "validation_fraction": 1 / tasks}
    )
    config.model.chat_template = "chatml"
    source = prepared(config)
    left, right = (
        {i % tasks for i in places.tolist()} for places in (source.places, source.held_out_places)
    )
    assert not left & right and len(right) == 1 and len(source.held_out_places) == 20 // tasks


def test_prompts_that_are_trained_and_held_out_are_told(tied_folder, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(jsonl.text(rows()[0], {"prompt": "new", "completion": "x"}))
    source_of(tmp_path, tied_folder, sft={"validation": str(held_out), "validation_fraction": 0})
    (said,) = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())["warnings"]
    assert said == "1 of 2 prompts of sft.validation are trained on too: hold out others"


def test_samples_fit_the_loss_and_share_prompts(tmp_path):
    rows = [([5, 6, 7], [False, False, True]), ([5, 6, 8, 9], [False, False, True, True])]
    sizes = write_examples(tmp_path / "e", zip(rows, range(2), strict=True))
    assert sizes == {"examples": 2, "tokens": 7, "trained_tokens": 3}
    before = pa.total_allocated_bytes()
    examples = open_examples(tmp_path / "e")
    assert pa.total_allocated_bytes() == before, "they are mapped from their file"
    batch = make_batch(3, examples, [1, 0, 1])
    assert [sample.token_ids.tolist() for sample in batch.samples] == [
        rows[i][0] for i in (1, 0, 1)
    ]
    assert batch.samples[0].advantages.tolist() == [1.0, 1.0]
    assert batch.samples[0].logprobs.tolist() == [0.0, 0.0]
    assert len({sample.group_id for sample in batch.samples}) == 1 and batch.num_loss_tokens == 5
    packed = pack_alone(batch)
    # 5 6 8 for all: 3 of 3 + 2 + 3 inputs
    assert packed.shared_token_fraction == pytest.approx(1 - 3 / 8)
    # no version sampled them: nothing to compare with inference
    assert not any(row.lag_zero.any() for row in packed.micro_batches)


def test_shuffling_is_the_same_everywhere():
    assert shuffled(6, 0, 0).tolist() == [3, 2, 5, 4, 0, 1]
    assert sorted(shuffled(1000, 7, 3).tolist()) == list(range(1000))


def test_damaged_data_is_refused(tied_folder, tmp_path):
    config = make_config(tmp_path, tied_folder)
    prepare_data(config, str(tied_folder), lambda *_: None)
    file = config.run_dir.data / "train.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[:900] + bytes([whole[900] ^ 1]) + whole[901:])
    with pytest.raises(
        CorruptFileError, match=r"train.arrow: damaged; delete .*data to have it made again"
    ):
        prepare_data(config, str(tied_folder), lambda *_: None)


# Numbers


def plain_loss(folder, samples):
    """Loss and gradients of plain transformers: each sample alone, mean over all trained tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count = sum(sample.num_trained for sample in samples)
    total = 0.0
    for sample in samples:
        loss = -plain_scores(model, sample)[0].sum() / count
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batch_tokens", [40, 4096])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(
    tied_folder, world, tmp_path, micro_batch_tokens
):
    batch = source_of(tmp_path, tied_folder).receive(1)
    expected, gradients = plain_loss(tied_folder, batch.samples)
    config = CrossEntropyConfig()
    model, _, _ = learner(tied_folder, world)
    rows = pack_alone(
        batch, sample_weights(batch.samples, config, 1), micro_batch_tokens
    ).micro_batches
    assert (len(rows) > 1) == (micro_batch_tokens == 40)
    total = 0.0
    for row in rows:
        terms = compute_loss(
            loss_inputs(row, len(batch.samples), score(model, row, world), world),
            config,
            cross_entropy,
        )
        loss = (terms.loss * row.weights).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected, abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5)
    held_out = validate(model, [batch], pack_alone, world)
    assert held_out["validation/loss"] == pytest.approx(expected, abs=1e-5)
    assert held_out["validation/perplexity"] == pytest.approx(np.exp(expected), rel=1e-4)
    # sharded again: a step and a save may follow
    assert all(type(parameter).__name__ != "Tensor" for parameter in model.parameters())


# The real process


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of all steps in one go."""
    root = tmp_path_factory.mktemp("straight")
    config = make_config(root, make_tiny_model(root / "model"))
    run_trainer(config)
    return config


def test_end_to_end(straight):
    run_dir, lines = straight.run_dir, read_metrics(straight.run_dir.metrics)
    assert list(lines) == [(step, "trainer") for step in range(STEPS + 1)]
    assert [step for (step, _), line in lines.items() if "validation/loss" in line] == [0, 2, 4, 6]
    assert lines[0, "trainer"]["validation/loss"] > lines[6, "trainer"]["validation/loss"]
    assert lines[1, "trainer"]["loss/mean"] > lines[6, "trainer"]["loss/mean"]
    wanted = "loss/mean entropy/mean optim/grad_norm optim/lr epoch perf/tokens_per_s time/step"
    found = lines[1, "trainer"]
    assert {*wanted.split(), "time/wait_for_batch"} <= set(found) and not {
        "mismatch_kl/mean",
        "ratio/mean",
    } & set(found)
    assert list(numbered(run_dir.checkpoints)) == [4, 6]
    assert list(numbered(run_dir.weights_dir)) == [4, 6]  # with each checkpoint, not with each step
    held_out = [
        sample
        for batch in FromExamples(straight, straight.run_dir.data).validation(6)
        for sample in batch.samples
    ]
    assert plain_loss(run_dir.weights(6), held_out)[0] == pytest.approx(
        lines[6, "trainer"]["validation/loss"], abs=1e-5
    )


def test_sigterm_loses_no_step_and_no_validation(straight, tmp_path, monkeypatch):
    """The version of the checkpoint is published, as with every other. The next start goes on bit
    for bit; the data set has changed since, which changes nothing."""
    monkeypatch.setenv("RL_GRACE_S", "20")
    monkeypatch.setenv("RL_TEST_STEP_S", "0.5")
    config = make_config(tmp_path, straight.model.name, sft={"validation_interval": 3})
    run_trainer(config, 143, SIGNAL_IN_STEP_3)
    for folder in (config.run_dir.checkpoints, config.run_dir.weights_dir):
        assert list(numbered(folder)) == [3]
    (tmp_path / "data.jsonl").write_text('{"prompt": "other", "completion": "rows"}\n')
    run_trainer(config)
    assert_same_files(config.run_dir, straight.run_dir, 6)
    mine, whole = (read_metrics(c.run_dir.metrics) for c in (config, straight))
    assert list(mine) == list(whole)
    for name in ("loss/mean", "optim/grad_norm", "validation/loss"):
        assert mine[6, "trainer"][name] == whole[6, "trainer"][name]
    assert [step for (step, _), line in mine.items() if "validation/loss" in line] == [0, 3, 6]


def end_in_the_validation_of_step_3():
    """SIGTERM comes in step 3, and the grace is over while the held-out examples are scored,
    after the checkpoint is complete."""
    signal_in_step_3()
    validate = Trainer.validate

    def cut_off(trainer, timer=None):
        if trainer.step == 3:
            trainer.saver.finish()
            os._exit(143)
        return validate(trainer, timer)

    Trainer.validate = cut_off


def test_a_grace_that_ends_in_the_validation_loses_only_that(straight, tmp_path, monkeypatch):
    """The step's line came after the validation, and was lost, as the next start does not train
    the step again."""
    monkeypatch.setenv("RL_GRACE_S", "100")
    monkeypatch.setenv("RL_TEST_STEP_S", "0.5")
    config = make_config(tmp_path, straight.model.name, sft={"validation_interval": 3})
    run_trainer(
        config, 143, "tests.trainer.data.test_batch_sources:end_in_the_validation_of_step_3"
    )
    assert list(numbered(config.run_dir.checkpoints)) == [3]
    assert [step for step, _ in read_metrics(config.run_dir.metrics)] == [0, 1, 2, 3]
    run_trainer(config)
    mine, whole = (read_metrics(c.run_dir.metrics) for c in (config, straight))
    assert (
        list(mine) == list(whole)
        and mine[3, "trainer"]["loss/mean"] == whole[3, "trainer"]["loss/mean"]
    )
    assert [step for (step, _), line in mine.items() if "validation/loss" in line] == [0, 6]


def test_two_ranks_equal_one(straight, tmp_path):
    config = make_config(tmp_path, straight.model.name)
    run_trainer(config, ranks=2)
    assert_alike(config.run_dir, straight.run_dir, STEPS)


def test_batches_are_a_function_of_seed_and_step():
    config = FakeDataConfig(samples=6, group_size=4, prompt_tokens=5, completion_tokens=3)
    batch, *others = [
        FakeBatches(config, 50, seed).receive(step)
        for seed, step in ((1, 2), (1, 2), (2, 2), (1, 3))
    ]
    assert [other == batch for other in others] == [True, False, False]
    sizes = [(s.group_id, s.rollout_id, s.num_tokens, s.num_trained) for s in batch.samples]
    assert sizes == [(i // 4, i % 4, 8, 3) for i in range(6)]
    heads = [s.token_ids[:5].tolist() for s in batch.samples]
    assert heads[0] == heads[3] != heads[4] == heads[5]
    assert max(s.token_ids.max() for s in batch.samples) < 50


@pytest.mark.parametrize(("ranks", "length"), [(1, 100), (2, 100), (2, 30)])
def test_a_full_batch_is_one_full_row_for_each_rank(ranks, length):
    """Of sequences of 40 tokens, which are not divided."""
    batch = full_batch(ranks, length, 41, 50)
    for rank in range(ranks):
        layout = Layout(rank, ranks, length, 64)
        (row,) = pack(batch, [1.0] * len(batch.samples), layout).micro_batches
        assert len(row.input_ids) == len(row.predictors) == max(length, 40)
