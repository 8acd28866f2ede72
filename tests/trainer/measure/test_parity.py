"""Trainer against vLLM: every supported family of models on the same tokens, and the check that
each run makes."""

from pathlib import Path

import pytest
import torch

from rl.models.tiny import make_tiny_model
from rl.trainer.measure.parity import ParityWatch, compare
from rl.wire.batch_file import decode_batch
from rl.wire.messages import TrainBatch
from rl.wire.parity import LIMITS, parity_of
from tests.families import CONFIGS, LENGTH_DEPENDENT, PACKED, STATES
from tests.raised import run_error
from tests.trainer.policies import learner
from tests.trainer.samples import make_sample, pack_alone
from tests.wire.samples import changed, with_version
from tests.zygote import inference_zygote

FAMILIES = PACKED + LENGTH_DEPENDENT + STATES


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """(dtype, family) -> folder with a model and what vLLM sampled from it, all in one process."""
    root = tmp_path_factory.mktemp("families")
    folders = {
        (dtype, name): make_tiny_model(root / dtype / name, CONFIGS[name])
        for dtype in LIMITS
        for name in FAMILIES
    }

    process = inference_zygote().fork(
        "scripts.sample_families", "512", *map(str, folders.values()), log=root / "log"
    )
    try:
        assert process.wait(280) == 0, process.log.read_text()[-3000:]
    finally:
        process.kill()
    return folders


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_equals_vllm(sampled, world, family, dtype):
    folder = sampled[dtype, family]
    # short samples apart from long ones
    model, _, config = learner(folder, world, dtype, {"max_model_len": 512}, micro_batch_tokens=64)
    batch = decode_batch((Path(folder) / "parity.batch").read_bytes(), family).batch
    tokens = compare(model, config, batch, world)
    for temperature in (1.0, 0.7):
        found = parity_of([difference for _, t, difference in tokens if t == temperature])
        assert found.tokens == 72 and found.within(LIMITS[dtype]), (temperature, found)
        if dtype == "float32":
            assert found.kl < 1e-9 and found.largest < 1e-4, found


@pytest.mark.parametrize(
    ("name", "row"),
    [("mlp.experts.down_proj", 3), ("mlp.gate.weight", 2)],
    ids=["expert", "router"],
)
def test_a_wrong_expert_or_router_of_a_layer_is_told_at_any_temperature(sampled, world, name, row):
    folder = sampled["float32", "qwen3_moe"]
    model, _, config = learner(folder, world, "float32", {"max_model_len": 512})
    weight = model.get_parameter(f"model.layers.1.{name}")
    with torch.no_grad():
        weight[row] = weight[0]
    batch = decode_batch((Path(folder) / "parity.batch").read_bytes(), name).batch
    tokens = compare(model, config, batch, world)
    for temperature in (1.0, 0.7):
        parity = parity_of([difference for _, t, difference in tokens if t == temperature])
        assert not parity.within(LIMITS["float32"]), parity


class FakeClient:
    """Answers a probe with samples whose log-probabilities are the model's own, off by `error`."""

    def __init__(self, samples):
        self.samples, self.asked, self.waits = samples, [], []

    def probe(self, version, timeout_s):
        self.asked.append(version)
        self.waits.append(timeout_s)
        return self.samples


def probe_samples(model, config, world, error):
    """Samples with the model's own log-probabilities, all but the first by version 4."""
    samples = []
    for i in range(3):
        sample = make_sample([5, 6, 7 + i], [9, 10, 11], group=i)
        tokens = compare(model, config, TrainBatch(step=1, samples=[sample]), world)
        # make_sample says -2 for every token
        logprobs = [difference - 2.0 + (error if i else 5.0) for _, _, difference in tokens]
        sample = changed(sample, logprobs=[0.0] * 3 + logprobs)
        samples.append(with_version(sample, 4 if i else 3))
    return samples


def watch_of(error, tied_folder, world, strict):
    model, _, config = learner(tied_folder, world)
    watch = ParityWatch(
        LIMITS["float32"], strict, FakeClient(probe_samples(model, config, world, error))
    )
    return watch, lambda *asks: watch.at_checkpoint(4, model, pack_alone, world, *asks)


def test_a_probe_is_asked_only_where_no_batch_had_fresh_tokens(tied_folder, world):
    watch, at_checkpoint = watch_of(0.0, tied_folder, world, strict=True)
    watch.judge(parity_of([0.0]), 3)
    assert at_checkpoint() == {} and watch.client.asked == []
    found = at_checkpoint()
    assert watch.client.asked == [4] and found["parity/agrees"] == 1.0
    assert found["parity/tokens"] == 6, "those of version 3 are not compared"
    assert found["parity/max"] < 1e-5
    samples, watch.client.samples = watch.client.samples, []
    # nothing said so
    assert [at_checkpoint() for _ in range(2)] == [
        {"parity/unjudged": 1.0},
        {"parity/unjudged": 2.0},
    ]
    assert at_checkpoint(False) == {"parity/unjudged": 3.0} and len(watch.client.asked) == 3, (
        "of the last version nothing is asked"
    )
    watch.client.samples = samples
    assert at_checkpoint()["parity/agrees"] == 1.0 and "parity/unjudged" not in at_checkpoint()
    assert watch.client.waits == [15, 15, 30, 60, 60], (
        "models that take longer to load are compared at a later checkpoint"
    )


def test_a_disagreement_is_told_or_ends_the_run(tied_folder, world):
    watch, at_checkpoint = watch_of(0.5, tied_folder, world, strict=False)
    found = at_checkpoint()
    assert found["parity/agrees"] == 0.0 and found["parity/max"] == pytest.approx(0.5, abs=1e-4)
    assert found["parity/kl"] == pytest.approx(torch.tensor(-0.5).exp().item() - 1 + 0.5, rel=1e-3)
    watch.strict = True
    with run_error(
        r"disagree on 6 tokens of the same policy version: kl 0.11, difference 0.5 nats "
        r"on average, 0.5 at most"
    ):
        at_checkpoint()
    assert ParityWatch(LIMITS["float32"], True, None).judge(None, 0) == {}


def test_a_gross_difference_ends_a_run_before_its_first_step_unless_that_is_wanted():
    limit, rounding, gross = (
        LIMITS["float32"],
        parity_of([0.1, -0.1] * 50),
        parity_of([2.0, -2.0] * 50),
    )
    with run_error(r"kl 2.8, .* two compute different models.* trainer.strict_parity = false"):
        ParityWatch(limit, None, None).judge(gross, 0)
    watch = ParityWatch(limit, None, None)
    assert watch.judge(None, 0) == {} and watch.judge(rounding, 0)["parity/agrees"] == 0.0
    assert watch.judge(gross, 1)["parity/agrees"] == 0.0, "later it is told alone"
    assert ParityWatch(limit, False, None).judge(gross, 0)["parity/kl"] == pytest.approx(gross.kl)
    few = parity_of([0.0] * 19 + [3.0])
    assert few.kl > 0.1 and ParityWatch(limit, None, None).judge(few, 0)["parity/agrees"] == 0.0, (
        "one token of twenty tells too little"
    )


def test_adapters_are_compared_first_when_they_add_something():
    """They add nothing to version 0, whose comparison was the only one that could end a run."""
    watch, limit = ParityWatch(LIMITS["float32"], None, None, has_adapters=True), LIMITS["float32"]
    assert watch.judge(parity_of([0.0] * 100), 0)["parity/agrees"] == 1.0
    with run_error("two compute different models"):
        watch.judge(parity_of([2.0, -2.0] * 50), 1)
    assert not parity_of([2.0, -2.0] * 50).within(limit) and not watch.is_first
