"""Packing against each sample alone; and several optimizer steps a batch against plain steps on its
parts, with the clipped losses against float64 in an unpacked model.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from rl.config.loss import LossConfig
from rl.config.run import RLConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import prepare
from rl.trainer.data.micro_batch import micro_batch_tokens
from rl.trainer.data.packing import (
    Layout,
    cut,
    minibatch_weights,
    pack,
    path_cost,
    plan,
    range_sum,
    range_tokens,
    sort_samples,
)
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer
from rl.trainer.train import TrainContext, train_step
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.parity import LIMITS
from tests.trainer import loss_formulas as formulas
from tests.trainer.layouts import gradients_of, weights_of
from tests.trainer.policies import learner
from tests.trainer.samples import (
    assert_equal,
    make_batch,
    make_sample,
    plain_scores,
    truncated,
    with_kept,
)
from tests.wire.samples import aligned, aligned_sample

A, B, C, D, E = range(10, 15)


def batch_of(*samples):
    return TrainBatch(step=1, samples=list(samples))


def packed(batch, *, ranks=1, rank=0, max_tokens=4096):
    return pack(batch, list(range(1, len(batch.samples) + 1)), Layout(rank, ranks, max_tokens, 64))


def test_branches_of_multi_turn_rollouts_share_their_history():
    """A rollout cut into samples (its context was compacted, or a sub-agent branched off)
    repeats its history in each of them."""
    turns = list(range(100, 140))
    first = make_sample([*turns, 1], [7, 7])
    second = make_sample([*turns, 1, 7, 7, 2], [8, 8, 8])
    third = make_sample([*turns, 3, 3], [9], rollout=1)
    # inputs alone: 42 + 46 + 42 = 130; in the tree: 40 turns, then 1 7 7 2 8 8 and 3 3
    result = packed(batch_of(first, second, third))
    assert result.shared_token_fraction == 1 - (40 + 6 + 2) / 130
    assert result.micro_batches[0].position_ids.tolist() == [*range(46), 40, 41]


def random_batch(rng: random.Random) -> TrainBatch:
    """Few tokens and lengths, so that everything happens: equal samples, prefixes of each other,
    gaps in the loss, no loss at all."""
    samples = []
    for _ in range(rng.randint(1, 14)):
        length = rng.randint(1, 9)
        mask = [False] + [rng.random() < 0.5 for _ in range(length - 1)]
        trained = sum(mask)
        new = rng.randint(0, trained)
        samples.append(
            aligned_sample(
                token_ids=[rng.randint(1, 2) for _ in range(length)],
                loss_mask=mask,
                logprobs=[rng.uniform(-3, 0) for _ in range(length)],
                advantages=[rng.uniform(-1, 1) for _ in range(length)],
                policy_versions=[VersionSpan(3, trained - new), VersionSpan(4, new)],
                env=rng.choice(["x", "y"]),
                group_id=rng.randint(0, 2),
                rollout_id=0,
                temperature=rng.choice([1.0, 0.5]),
                teacher_logprobs=[rng.uniform(-3, 0) for _ in range(length)]
                if rng.random() < 0.3
                else None,
            )
        )
    return truncated(TrainBatch(step=5, samples=samples), rng.randrange(100))


def expected_tokens(batch: TrainBatch) -> list[tuple]:
    """Every loss token, by definition: what comes before it, and what the loss needs."""
    found = []
    for place, sample in enumerate(batch.samples):
        s = aligned(sample)
        versions = iter(
            [span.policy_version for span in s.policy_versions for _ in range(span.num_tokens)]
        )
        kept, sets = sample.kept, iter(())
        if kept is not None:
            sets = iter(np.split(kept.ids, kept.counts.cumsum()[:-1]))
        for t in (t for t, mask in enumerate(s.loss_mask) if mask):
            teacher = s.teacher_logprobs[t] if s.teacher_logprobs else None
            values = [
                np.float32(x)
                for x in (s.logprobs[t], s.advantages[t], place + 1, sample.temperature)
            ]
            context = tuple(s.token_ids[:t])
            found.append(
                (
                    place,
                    context,
                    s.token_ids[t],
                    *values,
                    batch.envs.index(sample.env),
                    next(versions) == 4,
                    teacher and np.float32(teacher),
                    list(next(sets, ())),
                )
            )
    return sorted(found, key=repr)


def packed_tokens(row) -> list[tuple]:
    """The same out of a micro batch: what comes before a token is what its predictor sees."""
    found = []
    for n in range(len(row.targets)):
        predictor = int(row.predictors[row.predictor_of[n]])
        seen = [j for j in range(predictor + 1) if predictor < row.subtree_ends[j]]
        assert [int(row.position_ids[j]) for j in seen] == list(range(len(seen)))
        place = int(row.sequences[n])
        teacher = (
            None
            if row.teacher_logprobs is None or row.teacher_logprobs[n].isnan()
            else row.teacher_logprobs[n].numpy()[()]
        )
        values = [
            x.numpy()[()]
            for x in (
                row.logprobs[n],
                row.advantages[n],
                row.weights[n],
                row.temperatures[row.predictor_of[n]],
            )
        ]
        context = tuple(row.input_ids[seen].tolist())
        found.append(
            (
                place,
                context,
                int(row.targets[n]),
                *values,
                int(row.envs[n]),
                bool(row.lag_zero[n]),
                teacher,
                [] if row.kept is None else row.kept[1, row.kept[0] == n].tolist(),
            )
        )
    return found


@settings(derandomize=True, database=None, max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([5, 12, 100]))
def test_every_loss_token_is_there_once_behind_its_own_tokens(rng, ranks, max_tokens):
    batch = random_batch(rng)
    results = [
        packed(batch, ranks=ranks, rank=rank, max_tokens=max_tokens) for rank in range(ranks)
    ]
    assert len({len(result.micro_batches) for result in results}) == 1
    assert len({result.shared_token_fraction for result in results}) == 1
    rows = [row for result in results for row in result.micro_batches]
    assert sorted(
        (token for row in rows for token in packed_tokens(row)), key=repr
    ) == expected_tokens(batch)
    longest = max(len(s.token_ids) for s in batch.samples)
    for row in rows:
        assert len(row.input_ids) <= max(max_tokens, longest)
        assert row.predictors.tolist() == sorted(
            set(row.predictors.tolist())
        ) and row.predictor_of.tolist() == sorted(row.predictor_of.tolist())
        assert len(row.predictors) == len(row.temperatures) >= 1
        assert row.kept is None or row.kept[0].tolist() == sorted(row.kept[0].tolist())
    assert sum(len(result.micro_batches[0].targets) > 0 for result in results) == min(
        ranks, len(sort_samples(batch).items)
    )


@pytest.mark.parametrize(
    "sets",
    [
        [[7, 8], [7]],
        [[7, 8, 7], [8]],
        [[7, 9, 9], []],
        [[7, -1], [8]],
        [[7], None],
        [[7], [8, 300]],
    ],
    ids=["not its own", "its own twice", "another twice", "negative", "too many", "beyond"],
)
def test_kept_sets_that_no_sampler_can_have_are_refused(world, sets):
    """They would be a wrong number in silence, and beyond the model a device's assertion."""
    batch = batch_of(with_kept(make_sample([A], [7, 8], group=3, rollout=2), sets))
    with pytest.raises(RunError, match=r"group 3, rollout 2|kept id of 300, but the model has 259"):
        prepare(batch, RLConfig(), world, 64, vocab_size=259)


def costs(batch, ranks, max_tokens):
    ordered, layout = sort_samples(batch), Layout(0, ranks, max_tokens, 64)
    assigned = plan(ordered, layout)
    whole, shared = path_cost(ordered.lengths, 64), path_cost(ordered.shared, 64)
    each = [[range_sum(whole, shared, part) for part in parts] for parts in assigned]
    return ordered, layout, assigned, each


def test_a_large_group_is_cut_at_the_price_of_its_prompt():
    batch = batch_of(
        *(make_sample([A, B, C, D, E, A], [20 + i, 5, 5], rollout=i) for i in range(4))
    )
    ordered, _, assigned, _ = costs(batch, 1, 11)
    # 6 prompt tokens, 2 an answer: 14 in one tree, 10 + 10 in two
    assert assigned == [[(0, 2), (2, 4)]] and [
        range_tokens(ordered, part) for part in assigned[0]
    ] == [10, 10]
    assert packed(batch, max_tokens=11).shared_token_fraction == 1 - 20 / 32
    assert [
        len(row.input_ids)
        for row in packed(batch_of(make_sample([A] * 10, [B])), max_tokens=4).micro_batches
    ] == [10]


def test_no_rank_is_idle_where_there_are_samples():
    one_group = batch_of(*(make_sample([A] * 30, [20 + i] * 9, rollout=i) for i in range(8)))
    for ranks in (2, 3, 8):
        _, _, assigned, cost = costs(one_group, ranks, 4096)
        assert all(len(parts) == 1 for parts in assigned) and min(map(min, cost)) > 0
        # 8 answers for 3 ranks: 3 + 3 + 2
        assert max(map(sum, cost)) < 1.35 * sum(map(sum, cost)) / ranks
    (idle,) = packed(batch_of(make_sample([A], [B])), ranks=2, rank=1).micro_batches
    assert idle.input_ids.tolist() == idle.predictors.tolist() == [0]
    assert idle.targets.numel() == 0 and idle.temperatures.tolist() == [1.0]
    assert idle.envs.dtype == torch.int64


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_micro_batches_are_full_balanced_and_fall_in_cost(ranks):
    batch = make_batch(3, groups=64, group_size=8, prompt=40, answer=60)
    ordered, layout, assigned, cost = costs(batch, ranks, 512)
    assert all(row == sorted(row, reverse=True) for row in cost)
    assert max(map(sum, cost)) <= 1.02 * sum(map(sum, cost)) / ranks
    waited = sum(max(column) for column in zip(*cost, strict=True))
    assert waited <= 1.05 * sum(map(sum, cost)) / ranks
    tokens = [range_tokens(ordered, part) for parts in assigned for part in parts]
    assert max(tokens) <= 512 and sum(tokens) >= 0.7 * 512 * len(tokens)
    assert assigned == plan(ordered, layout)


def test_a_pass_on_a_gpu_is_larger_by_default():
    recomputes = TrainerConfig(activation_checkpointing="full")
    for trainer, mode, expected in (
        (TrainerConfig(), "flex", [4096, 4096]),  # activations of more would not fit
        *((recomputes, mode, [4096, 16384]) for mode in ("blocks", "flex", "unpacked")),
        (recomputes, "eager", [4096, 4096]),  # its masks and scores are dense
        (TrainerConfig(micro_batch_tokens=100), "eager", [100, 100]),
    ):
        devices = map(torch.device, ("cpu", "cuda"))
        assert [micro_batch_tokens(trainer, device, mode) for device in devices] == expected


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
