"""Several optimizer steps a batch: against plain steps on its parts, and the clipped losses
against float64 in an unpacked model."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from rl.config.loss import LossConfig
from rl.config.run import RLConfig
from rl.system.errors import RunError
from rl.trainer.data.minibatches import cut, minibatch_weights
from rl.trainer.data.prefetch import prepare
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer
from rl.trainer.train import TrainContext, train_step
from rl.wire.messages import TrainBatch
from rl.wire.parity import LIMITS
from tests.trainer import loss_formulas as formulas
from tests.trainer.layouts import gradients_of, weights_of
from tests.trainer.policies import learner
from tests.trainer.samples import assert_equal, make_batch, make_sample, plain_scores

LR = 1e-2


def the_batch() -> TrainBatch:
    """Six groups of two environments; some answers are longer than others."""
    batch = make_batch(1, groups=6)
    for sample in batch.samples:
        sample.env = "even" if sample.group_id % 2 == 0 else "odd"
    return batch


def part_of(batch, places, step=1) -> TrainBatch:
    return TrainBatch(step=step, samples=[batch.samples[place] for place in places])


def learner_of(folder, world, parity=None, **settings) -> tuple[TrainContext, RLConfig]:
    # what is compared are gradients, not clipped ones
    settings = {"optim": {"max_grad_norm": 1e9}, "micro_batch_tokens": 200} | settings
    model, optimizer, config = learner(folder, world, **settings)
    config.seed = 5
    return TrainContext(model, optimizer, config.trainer, world, parity=parity), config


def train(context, config, batch) -> dict[str, float]:
    return train_step(
        context, prepare(batch, config, context.world, 64, config.trainer.minibatches), LR, Timer()
    )


# Cutting ------------------------------------------------------------------------------------------


def test_minibatches_are_whole_groups_in_an_order_that_seed_and_step_determine():
    batch = make_batch(3, groups=5, group_size=3)
    batch.samples.append(make_sample([1, 2], [], group=9))  # nothing to train
    parts = cut(batch, 2, 7)
    groups = [{batch.samples[place].group_id for place in part} for part in parts]
    assert [len(part) for part in parts] == [9, 6] and sorted([*parts[0], *parts[1]]) == list(
        range(15)
    )
    assert [len(group) for group in groups] == [3, 2] and not groups[0] & groups[1]
    assert cut(batch, 2, 7) == parts and cut(
        make_batch(4, groups=5, group_size=3), 2, 7
    ) != parts != cut(batch, 2, 8)
    assert cut(batch, 1, 7) == [list(range(16))]
    assert [len(part) for part in cut(batch, 9, 7)] == [3] * 5  # no more than groups


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("token", [1 / 3] * 3),
        ("sequence", [1 / 2, 1 / 3, 1 / 4]),
        ("constant", [1 / 16, 1 / 8, 1 / 16]),
    ],
)
def test_tokens_are_weighed_within_their_minibatch(kind, weights):
    samples = [make_sample([1], [2] * n, group=i) for i, n in enumerate((1, 3, 2))]
    config = TypeAdapter(LossConfig).validate_python({"aggregation": kind})
    batch = TrainBatch(step=1, samples=samples)
    assert minibatch_weights(batch, [[0, 2], [1]], config, constant_length=8) == weights


# Against plain steps ------------------------------------------------------------------------------


def test_two_minibatches_twice_are_four_plain_steps_on_the_halves(tied_folder, world):
    """Bit for bit, for a loss that compares with the sampler alone."""
    batch = the_batch()
    several, config = learner_of(tied_folder, world, minibatches=2, epochs=2)
    metrics = train(several, config, batch)
    plain, config = learner_of(tied_folder, world)
    steps = [
        train(plain, config, part_of(batch, places)) for places in cut(batch, 2, config.seed) * 2
    ]
    assert_equal(weights_of(several.model), weights_of(plain.model))
    assert {int(state["step"]) for state in several.optimizer.state.values()} == {4} and metrics[
        "optim/steps"
    ] == 4
    for name in ("loss/mean", "optim/grad_norm"):
        assert metrics[name] == pytest.approx(sum(step[name] for step in steps) / 4, rel=1e-12)
    tokens = [
        sum(batch.samples[place].num_trained for place in places)
        for places in cut(batch, 2, config.seed)
    ] * 2
    for name in ("entropy/mean", "ratio/mean", "masked_fraction"):
        assert metrics[name] == pytest.approx(
            np.average([step[name] for step in steps], weights=tokens), rel=1e-9
        )
    # later the policy is another than the one that sampled
    assert metrics["mismatch_kl/mean"] == steps[0]["mismatch_kl/mean"]
    assert metrics["optim/lr"] == LR and "update_kl/mean" not in metrics


# The clipped losses -------------------------------------------------------------------------------


def float64_gradient(model, old, samples, loss) -> dict[str, torch.Tensor]:
    """The gradient of a minibatch's loss, mean over its tokens, by the formulas and an unpacked
    float64 model."""
    model.zero_grad()
    count = sum(sample.num_trained for sample in samples)
    for sample, first in zip(samples, old, strict=True):
        now, _ = plain_scores(model, sample)
        sampler, advantages = sample.logprobs.astype(float), sample.advantages.astype(float)
        nothing = np.zeros(len(sampler))
        sequence = formulas.Sequence(
            now.detach().numpy(), sampler, advantages, nothing, nothing, nothing, first.numpy()
        )
        (now * torch.tensor(loss(sequence)[1])).sum().div(count).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


LOSSES = {
    "clip": (
        {"type": "clip"},
        lambda s: formulas.decoupled(s, lambda s: formulas.clip(s, 0.2, 0.28, 3.0), 2.0),
    ),
    "cispo": (
        {"type": "cispo", "clip_low": 0.2, "clip_high": 0.2},
        lambda s: formulas.decoupled(s, lambda s: formulas.cispo(s, 0.2, 0.2), 2.0),
    ),
    "gspo": (
        {"type": "gspo", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "token"},
        lambda s: formulas.decoupled(
            s, lambda s: formulas.gspo(s, 0.05, 0.05, 3.0), 2.0, geometric=True
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_clipped_losses_compare_with_the_policy_that_the_batch_began_with(tied_folder, world, name):
    """Every optimizer step's gradient of two minibatches, twice: the reference has the weights
    before that step, and the first ones."""
    settings, loss = LOSSES[name]
    batch = the_batch()
    context, config = learner_of(tied_folder, world, loss=settings, minibatches=2, epochs=2)
    reference = AutoModelForCausalLM.from_pretrained(
        tied_folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        old = [plain_scores(reference, sample)[0] for sample in batch.samples]
    steps, apply = [], context.optimizer.step

    def step():
        steps.append((weights_of(context.model), gradients_of(context.model)))
        apply()

    context.optimizer.step = step
    metrics = train(context, config, batch)
    for (weights, gradients), places in zip(steps, cut(batch, 2, config.seed) * 2, strict=True):
        reference.load_state_dict(weights, strict=False)
        reference.tie_weights()
        samples = [batch.samples[place] for place in places]
        for key, expected in float64_gradient(
            reference, [old[place] for place in places], samples, loss
        ).items():
            assert (gradients[key] - expected).norm() <= 1e-4 * expected.norm() + 1e-7, key
    sampled = [sample.logprobs for sample in batch.samples]
    apart = np.concatenate([first.numpy() for first in old]) - np.concatenate(sampled)
    # of all tokens, at the beginning
    assert metrics["mismatch_kl/mean"] == pytest.approx(np.mean(np.expm1(apart) - apart), rel=1e-4)
    assert metrics["update_kl/mean"] > 1e-3 and (metrics["masked_fraction"] > 0.05) == (
        name != "cispo"
    )


def test_parity_is_judged_on_what_the_version_itself_would_score(tied_folder, world):
    """The tokens of the first optimizer step; and a strict run ends before anything is changed."""
    batch = the_batch()

    def learner(strict):
        parity = ParityWatch(LIMITS["float32"], strict, client=None)
        return learner_of(tied_folder, world, parity, loss={"type": "clip"}, minibatches=3)

    context, config = learner(strict=False)
    first = part_of(batch, cut(batch, 3, config.seed)[0])
    before = weights_of(context.model)
    assert train(context, config, batch)["parity/tokens"] == first.num_loss_tokens
    context, config = learner(strict=True)
    with pytest.raises(RunError, match=f"disagree on {first.num_loss_tokens} tokens"):
        train(context, config, batch)
    assert_equal(weights_of(context.model), before)
