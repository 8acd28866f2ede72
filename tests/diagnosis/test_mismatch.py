"""Mismatch KL by place: exact sums of small batches, and which made-up faults are named."""

import time

import numpy as np
import pytest

from rl.commands.doctor.main import diagnosis as doctor
from rl.config.stored import stored_config
from rl.diagnosis.mismatch import BINS, MAX_STEPS, stretches
from rl.diagnosis.waits import diagnose
from rl.records.run import Run
from rl.run_dir.numbers import CLIPPED, FIRST, read_token_log, write_token_log
from rl.wire.messages import KeptTokens, TrainedSpan, TrainingSample
from rl.wire.parity import clear_rises
from tests.records.made import make_run, note, write_noisy, write_samples

NOISE = 0.08
"""Standard deviation of the difference at an uncertain token in bfloat16, nats: a KL of 1e-3."""
FAULT = 12.0
"""Factor of a fault on the standard deviation: 100 on the KL."""


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "run", model={"name": "none", "dtype": "bfloat16"})


def examined(run_dir):
    return diagnose(run_dir, stored_config(run_dir.root), reads_tokens=True)


def tables(run_dir):
    """The rows of each kind of place."""
    rows = examined(run_dir).mismatch
    return {
        kind: [row for row in rows if row.kind == kind] for kind in {row.kind: 0 for row in rows}
    }


def hints(run_dir):
    return [hint.text for hint in examined(run_dir).hints]


def answers(samples, seed=0, mean=1500, longest=16000):
    """One turn each, after a prompt of 100 tokens; most are short."""
    lengths = np.random.default_rng(seed).exponential(mean, samples).clip(1, longest)
    return [[(100, int(length))] for length in lengths]


def agents(samples, seed=0):
    """One to eight turns each."""
    rng = np.random.default_rng(seed)
    return [
        [(int(rng.integers(20, 600)), int(rng.integers(20, 300))) for _ in range(count)]
        for count in rng.integers(1, 9, samples)
    ]


def readers(samples, seed=0):
    """A prompt of up to 8,000 tokens, and an answer of up to 2,000."""
    rng = np.random.default_rng(seed)
    return [[(int(rng.integers(50, 8000)), int(rng.integers(20, 2000)))] for _ in range(samples)]


def test_each_token_counts_in_its_bins(run_dir):
    """Two answers, of which the second goes on with new weights; and one by an old version."""
    note(run_dir, time.time(), "ready", "inference", prefill_tokens=200)
    spans = [(120, 130, 4), (300, 302, 3), (302, 304, 4), (500, 501, 3)]
    sample = TrainingSample(
        packed_ids=bytes(4 * 501),
        spans=[TrainedSpan(*span, 1.0) for span in spans],
        packed_logprobs=np.full(15, -1.0, np.float32).tobytes(),
        env="sums",
        group_id=0,
        rollout_id=0,
    )
    write_samples(run_dir, 5, [sample, sample])
    differences = np.array([0.1] * 10 + [9.0, 9.0, 0.2, 50.0, 9.0] * 1)
    logprobs = np.concatenate([differences, np.where(differences == 50.0, 0.3, differences)]) - 1.0
    columns = {
        "trainer_logprobs": logprobs.astype(np.float32),
        "entropies": np.ones(30, np.float16),
        "flags": np.zeros(30, np.uint8),
    }
    write_token_log(run_dir.tokens(5), columns)
    depth, turn, chunks = tables(run_dir).values()

    def k3(*differences):
        return np.mean([np.expm1(d) - d for d in differences])

    assert [(row.first, row.last, row.tokens, row.samples) for row in depth] == [
        (0, 127, 16, 2),
        (128, 255, 4, 2),
        (256, 511, 4, 2),
    ]
    second = [0.2, 10.0, 0.2, 0.3]  # clamped as in the losses
    assert [row.kl for row in depth] == pytest.approx([k3(0.1), k3(0.1), k3(*second)], rel=1e-5)
    halves = k3(0.2, 10.0), k3(0.2, 0.3)
    assert depth[2].error == pytest.approx(abs(halves[0] - halves[1]) / 8**0.5, rel=1e-5)
    assert [(row.first, row.last, row.tokens) for row in turn] == [(1, 1, 20), (2, 2, 4)]
    # the second answer's last tokens come after 302 tokens computed anew, in two chunks
    assert [(row.first, row.last, row.tokens) for row in chunks] == [(1, 1, 20), (2, 2, 4)]
    assert not hints(run_dir)


def test_tokens_that_are_not_trained_begin_no_turn():
    """Regression: each token of which truncation had kept too many ids was the end of a turn."""

    def of(kept):
        spans = [(300, 302), (303, 305), (307, 308), (311, 312)]
        sample = TrainingSample(
            packed_ids=bytes(4 * 312),
            spans=[TrainedSpan(*span, 4, 1.0) for span in spans],
            packed_logprobs=bytes(4 * 6),
            kept=KeptTokens(bytes(4 * 6), b"") if kept else None,
            env="sums",
            group_id=0,
            rollout_id=0,
        )
        return [place[-2:] for place in stretches([sample], 302)]

    assert of(kept=True) == [(0, 0), (0, 0), (0, 0), (1, 1)]
    assert of(kept=False) == [(0, 0), (1, 1), (2, 1), (2, 1)]


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("shape", [answers, agents, readers])
def test_noise_alone_is_never_named(run_dir, shape, scale):
    """That of bfloat16, and stronger noise than any run should have."""
    note(run_dir, time.time(), "ready", "inference", prefill_tokens=2048)
    for step in range(1, 5):
        write_noisy(run_dir, step, shape(64, step), lambda *_: scale * NOISE)
    assert len(examined(run_dir).mismatch) > 4 and not hints(run_dir)


def heavy(rng, size):
    """Rare differences of any size, up to the clamp."""
    hits = rng.random(size) < 10.0 ** rng.uniform(-5, -2)
    return np.where(hits, rng.standard_t(1.2, size) * 5.0, rng.normal(0, NOISE, size))


def pareto(rng, size):
    return (1e-3 * rng.pareto(0.7, size) * rng.choice([-1, 1], size)).astype(float)


def by_task(rng, size):
    """Each sample has noise of its own strength."""
    return rng.normal(0, NOISE, size) * np.exp(rng.normal(0, 1))


@pytest.mark.parametrize("noise", [heavy, pareto, by_task])
def test_heavy_tails_are_no_rise(noise):
    """Even without the limit below which a mean KL is never named."""
    named = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        num_samples = int(rng.choice([4, 16, 64, 128]))
        sums = np.zeros((num_samples, BINS, 3))
        for i, length in enumerate(rng.exponential(1200, num_samples).astype(int) + 1):
            difference, entropy = noise(rng, length).clip(-10, 10), np.ones(length)
            kl, bins = np.expm1(difference) - difference, np.frexp(np.arange(length) // 128)[1]
            for j, values in enumerate((entropy, kl, entropy)):
                sums[i, :, j] = np.bincount(bins, values, BINS)
        named += clear_rises(sums, limit=0.0)
    assert not named


def test_rounding_may_grow_with_the_entropy():
    """Later answers are less certain: the KL is 20 times as large with 20 times the entropy."""
    sums = np.zeros((50, BINS, 3))
    sums[:, 0], sums[:, 1] = [100, 0.05, 3.0], [100, 1.0, 60.0]
    assert not [*clear_rises(sums, limit=6e-3)]
    sums[:, 1, 2] = 2 * 3.0
    ((_, cut, low, high, _),) = clear_rises(sums, limit=6e-3)
    assert (cut, low, high) == (1, pytest.approx(5e-4), pytest.approx(0.01))
    assert not [*clear_rises(sums, limit=2e-2)]
    assert not [*clear_rises(sums[:7], limit=6e-3)]  # whatever their values: too few


def test_a_fault_past_a_depth_is_named(run_dir):
    for step in range(1, 5):
        write_noisy(
            run_dir,
            step,
            answers(256, step),
            lambda depth, *_: NOISE * np.where(depth >= 4096, FAULT, 1.0),
        )
    (text,) = hints(run_dir)
    assert " from token 4,096 of a sample on, else 0.00" in text
    assert "lower model.max_model_len to 4096" in text


def test_a_fault_of_later_turns_is_named(run_dir):
    note(run_dir, time.time(), "ready", "inference", prefill_tokens=2048)
    for step in (1, 2):
        write_noisy(
            run_dir,
            step,
            agents(128, step),
            lambda _, turn, __: NOISE * (FAULT if turn >= 4 else 1.0),
        )
    (text,) = hints(run_dir)
    assert " after turn 4, else 0.00" in text
    assert text.endswith("try inference.vllm.enable_prefix_caching = false")


def test_a_fault_after_prompts_of_several_chunks_is_named(run_dir):
    note(run_dir, time.time(), "ready", "inference", prefill_tokens=2048)
    for step in (1, 2):
        write_noisy(
            run_dir,
            step,
            readers(128, step),
            lambda _, __, prompt: NOISE * (FAULT if prompt > 2048 else 1.0),
        )
    (text,) = hints(run_dir)
    assert " after prompts of more than 1 x 2048 tokens, else 0.00" in text
    assert "inference.vllm.max_num_batched_tokens = " in text


def test_only_the_newest_steps_are_read(run_dir, monkeypatch):
    def read():
        """The sum of the steps that are read: step N has N samples of 200 tokens."""
        first = next(iter(tables(run_dir).values()), [])
        return sum(row.tokens for row in first) // 200

    assert read() == 0
    for step in range(1, MAX_STEPS + 4):
        write_noisy(run_dir, step, [[(100, 200)]] * step, lambda *_: NOISE)
    assert read() == sum(range(4, 12))
    run_dir.tokens(MAX_STEPS + 2).write_bytes(b"damaged")
    run_dir.batch(MAX_STEPS + 1).unlink()
    assert read() == sum(range(4, 12)) - 9 - 10
    monkeypatch.setattr("rl.diagnosis.mismatch.MAX_BYTES", 1)
    assert read() == 11


def test_of_several_minibatches_the_first_counts(run_dir):
    """Regression: none did, although the first was scored by the trained version itself."""
    text = run_dir.config.read_text()
    run_dir.config.write_text(text.replace("minibatches = 1", "minibatches = 2"))
    write_noisy(run_dir, 5, [[(100, 200)]] * 4, lambda *_: NOISE)
    assert not tables(run_dir)  # of an older version, whose log does not say which these are
    columns = read_token_log(run_dir.tokens(5), 800)
    columns["flags"] = np.repeat(np.array([CLIPPED, FIRST, FIRST + CLIPPED, 0], np.uint8), 200)
    columns["trainer_logprobs"][:200] = columns["trainer_logprobs"][600:] = -9.0
    write_token_log(run_dir.tokens(5), columns)
    (depth,) = tables(run_dir).values()
    assert [(row.first, row.tokens) for row in depth] == [(0, 56), (128, 256), (256, 88)]
    assert max(row.kl for row in depth) < 0.01


def test_old_versions_do_not_count(run_dir):
    write_noisy(run_dir, 5, answers(64), lambda depth, *_: depth / 100.0, version=3)
    assert not examined(run_dir).mismatch and not hints(run_dir)


def test_doctor_and_run_show_it(run_dir, capsys):
    write_noisy(
        run_dir, 1, answers(128), lambda depth, *_: NOISE * np.where(depth >= 1024, FAULT, 1.0)
    )
    doctor(run_dir.root, verify=False, as_json=False)
    text = capsys.readouterr().out
    assert "mismatch KL by depth in the context, 1,024 to 2,047: 0." in text
    assert "from token 1,024 of a sample on" in text
    problems = [problem for problem in Run(run_dir.root).problems if "from token" in problem.text]
    assert [(each.serious, each.metrics) for each in problems] == [(False, ("mismatch_kl/mean",))]
