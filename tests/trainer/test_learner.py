"""The trainer of `rl serve`: its gradients are those of our trainer, and adapters of several
clients do not mix."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl.config.run import RLConfig
from rl.run_dir.checksums import verify_version
from rl.trainer.data.batch_sources import prepare
from rl.trainer.learner import AdapterLearner
from rl.trainer.loss.common import compute_loss
from rl.trainer.loss.losses import loss_function
from rl.trainer.model import lora
from rl.trainer.model.head import mode_of, score
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import local
from rl.trainer.train import loss_inputs
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.training_calls import CallError, Example, LossCall, NoRoomError, Step
from tests.wire.samples import aligned_sample

RANK = 8


def config_of(model: Path, dtype: str = "float32", **loss) -> RLConfig:
    trainer = {"lora": {"rank": RANK}, "loss": loss or {"type": "cross_entropy"}}
    return RLConfig.model_validate(
        {"model": {"name": str(model), "dtype": dtype}, "serve": {}, "trainer": trainer}
    )


@pytest.fixture(scope="module")
def learner(model, world) -> AdapterLearner:
    return AdapterLearner(config_of(model), model, world)


def examples(seed: int = 0, prompt: int = 5) -> list[Example]:
    """A group with a common prompt, whose answers alone are trained."""
    rng = np.random.default_rng(seed)
    start, found = rng.integers(3, 250, prompt), []
    for n in (3, 7, 4):
        tokens = np.concatenate([start, rng.integers(3, 250, n)])
        count = len(tokens) - 1
        answer = (np.arange(count) >= prompt - 1).astype(np.float32)
        values = {
            "advantages": rng.normal() * answer,
            "logprobs": -rng.exponential(1.5, count) * answer,
        }
        columns = {key: value.astype(np.float32)[:, None] for key, value in values.items()}
        found.append(
            Example(tokens[:-1], tokens[1:][:, None], trained=answer[:, None] > 0, **columns)
        )
    return found


def gradients(parameters) -> dict[str, torch.Tensor]:
    return {name: local(parameter.grad).clone() for name, parameter in parameters.items()}


LOSSES = {
    "importance_sampling": LossCall(
        "clip", {"clip_low": 1.0, "clip_high": math.inf, "delta": math.inf}
    ),
    "cispo": LossCall("cispo", {"clip_low": 0.2, "clip_high": 0.2}),
    "gspo": LossCall("gspo", {"clip_low": 1.0, "clip_high": math.inf, "delta": math.inf}),
    "dro": LossCall("dro", {"beta": 0.05}),
    "cross_entropy": LossCall("cross_entropy"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_those_of_our_trainer(name, learner, model, world):
    """Ours trains samples with a loss mask; the API has a weight at each token. The sums of
    their losses, and gradients, agree."""
    call, data = LOSSES[name], examples()
    learner.create("a", RANK, seed=1)
    learner._enter("a")
    for key, parameter in learner.parameters.items():  # B is 0 at first, and then A has no gradient
        local(parameter.detach()).copy_(
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key))) * 0.1
        )
    scored = learner.forward_backward("a", data, call, backward=True)
    found = gradients(learner.parameters)
    learner.optimizer.zero_grad()

    config = config_of(model, type=call.type, aggregation="token", **call.settings)
    policy = load_policy(str(model), config.model, config.trainer, world)
    own = lora.trainable(policy)
    for key, parameter in own.items():
        local(parameter.detach()).copy_(local(learner.parameters[key].detach()))
    samples = [
        aligned_sample(
            token_ids=[*example.token_ids.tolist(), int(example.targets[-1, 0])],
            loss_mask=[False, *example.trained[:, 0].tolist()],
            logprobs=[0.0, *example.logprobs[:, 0].tolist()],
            advantages=[0.0, *example.advantages[:, 0].tolist()],
            policy_versions=[VersionSpan(0, int(example.trained.sum()))],
            env="",
            group_id=0,
            rollout_id=index,
        )
        for index, example in enumerate(data)
    ]
    batch = TrainBatch(step=1, samples=samples)
    for row in prepare(
        batch, config, world, learner.hidden_size, mode=mode_of(policy)
    ).micro_batches:
        scores = score(policy, row, world)
        inputs = loss_inputs(row, len(samples), scores, world)
        compute_loss(
            inputs, config.trainer.loss, loss_function(config.trainer.loss)
        ).loss.sum().backward()
    assert (
        found.keys() == own.keys()
        and sum(float(gradient.abs().sum()) for gradient in found.values()) > 0
    )
    for key, expected in gradients(own).items():
        assert torch.allclose(
            found[key], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max())
        ), key
    assert [values.shape for values in scored.logprobs] == [
        example.targets.shape for example in data
    ]


def train(learner: AdapterLearner, name: str, steps: int, seed: int = 0) -> list[float]:
    losses = []
    for _ in range(steps):
        scored = learner.forward_backward(
            name, examples(seed), LOSSES["cross_entropy"], backward=True
        )
        losses.append(float(sum(values.sum() for values in scored.losses)))
        learner.optimizer_step(name, Step(lr=1e-2))
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_side_by_side_and_saved_ones_train_as_alone(model, world, tmp_path, dtype):
    """Of two clients that take turns each gets, bit for bit, what it gets alone; so does one
    that was saved and loaded halfway. A smaller rank stays one: what pads it remains 0."""
    learner = AdapterLearner(config_of(model, dtype), model, world)
    learner.create("alone", 4, seed=1)
    expected = train(learner, "alone", 4)
    assert expected[-1] < expected[0]
    learner.create("b", 4, seed=1)
    learner.create("c", RANK, seed=2)
    found = []
    for step in range(4):
        found += train(learner, "b", 1)
        train(learner, "c", 1, seed=step)
        if step == 1:
            learner.save("b", tmp_path / "state", {"number": 7})
            learner.forget("b")
            assert learner.notes(tmp_path / "state")["number"] == 7
            learner.load("b", tmp_path / "state", optimizer=True)
    assert found == expected
    learner._leave()
    assert all(
        not tensor[4:].any()
        for key, tensor in learner.adapters["b"].tensors.items()
        if key.startswith("weight.") and ".lora_A." in key
    )
    learner.publish("b", tmp_path / "weights" / "000004", tmp_path / "digests" / "000004.json")
    content = verify_version(tmp_path / "weights" / "000004")
    assert any("lora_B" in name for name in content["tensors"])
    learner.load("d", tmp_path / "state", optimizer=False)
    assert train(learner, "d", 1)[0] == expected[2]


def test_several_targets_of_a_token(learner):
    """A datum with K targets a position scores each, with its own weight."""
    learner.create("a", RANK, seed=1)
    [one, *_] = examples()
    both = np.concatenate([one.targets, one.targets[::-1]], 1)
    wide = Example(
        one.token_ids,
        both,
        np.ones(both.shape, np.float32),
        np.zeros(both.shape, np.float32),
        np.ones(both.shape, bool),
    )
    scored = learner.forward_backward("a", [wide, one], LOSSES["cross_entropy"], backward=False)
    alone = learner.forward_backward("a", [one], LOSSES["cross_entropy"], backward=False)
    assert scored.logprobs[0].shape == both.shape
    np.testing.assert_allclose(scored.logprobs[0][:, :1], alone.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(scored.losses[0], -scored.logprobs[0], atol=1e-6)


def test_what_is_refused(learner, tmp_path):
    with pytest.raises(CallError, match="ranks from 1 to 8"):
        learner.create("a", RANK + 1, 0)
    learner.create("a", RANK, seed=1)
    with pytest.raises(CallError, match="without a gradient"):
        learner.optimizer_step("a", Step())
    with pytest.raises(CallError, match="not loaded"):
        learner.optimizer_step("nobody", Step())
    with pytest.raises(CallError, match="not loaded"):
        learner.save("nobody", tmp_path / "state", {})
    with pytest.raises(CallError, match="not loaded"):
        learner.publish("nobody", tmp_path / "weights", None)


def test_room_on_a_gpu_includes_what_torch_holds_unused(learner, monkeypatch):
    """What a model leaves behind stays with torch: to the driver it is not free, and no model
    that left made room for another."""
    monkeypatch.setattr(learner, "world", SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (0, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 3 << 30)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 1 << 30)
    monkeypatch.setattr("torch.cuda.get_per_process_memory_fraction", lambda _: 1.0)
    learner.create("in what another has left", RANK, 0)
    learner.forget("in what another has left")
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 3 << 30)
    with pytest.raises(NoRoomError, match="and 0 MiB of memory are free"):
        learner.create("one too many", RANK, 0)
