import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config.trainer import TrainerConfig
from rl.trainer.data.balance import Layout, path_cost, plan, range_sum, range_tokens
from rl.trainer.data.micro_batch import micro_batch_tokens
from rl.trainer.data.packing import pack
from rl.trainer.data.prefix_tree import sort_samples
from rl.wire.messages import TrainBatch, VersionSpan
from tests.trainer.samples import make_batch, make_sample
from tests.wire.samples import aligned, aligned_sample

A, B, C, D, E = 10, 11, 12, 13, 14


def batch_of(*samples):
    return TrainBatch(step=1, samples=list(samples))


def packed(batch, *, ranks=1, rank=0, max_tokens=4096):
    return pack(batch, list(range(1, len(batch.samples) + 1)), Layout(rank, ranks, max_tokens, 64))


def test_branches_of_multi_turn_rollouts_share_their_history():
    """A rollout cut into samples (its context was compacted, or a sub-agent branched off)
    repeats its history in each of them."""
    turns = list(range(100, 140))
    first = make_sample([*turns, 1], [7, 7], rollout=0)
    second = make_sample([*turns, 1, 7, 7, 2], [8, 8, 8], rollout=0)
    third = make_sample([*turns, 3, 3], [9], rollout=1)
    # inputs alone: 42 + 46 + 42 = 130; in the tree: 40 turns, then 1 7 7 2 8 8 and 3 3
    result = packed(batch_of(first, second, third))
    assert result.shared_token_fraction == 1 - (40 + 6 + 2) / 130
    assert result.micro_batches[0].position_ids.tolist() == [*range(46), 40, 41]
    assert (
        packed(
            batch_of(make_sample([A, B], [C, D]), make_sample([A, B], [E, D]))
        ).shared_token_fraction
        == 1 - 4 / 6
    )


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
    return TrainBatch(step=5, samples=samples)


def expected_tokens(batch: TrainBatch) -> list[tuple]:
    """Every loss token, by definition: what comes before it, and what the loss needs."""
    found = []
    for place, sample in enumerate(batch.samples):
        s = aligned(sample)
        versions = iter(
            [span.policy_version for span in s.policy_versions for _ in range(span.num_tokens)]
        )
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
    assert sum(len(result.micro_batches[0].targets) > 0 for result in results) == min(
        ranks, len(sort_samples(batch).items)
    )


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
    idle = packed(batch_of(make_sample([A], [B])), ranks=2, rank=1).micro_batches
    assert len(idle) == 1 and idle[0].input_ids.tolist() == [0] and idle[0].targets.numel() == 0
    assert (
        idle[0].predictors.tolist() == [0]
        and idle[0].temperatures.tolist() == [1.0]
        and idle[0].envs.dtype == torch.int64
    )


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
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    recomputes = TrainerConfig(activation_checkpointing="full")
    keeps = TrainerConfig()  # activations of more would not fit
    assert [micro_batch_tokens(keeps, device, "flex") for device in (cpu, gpu)] == [4096, 4096]
    for mode in ("blocks", "flex", "unpacked"):
        assert [micro_batch_tokens(recomputes, device, mode) for device in (cpu, gpu)] == [
            4096,
            16384,
        ]
    # its masks and scores are dense
    assert [micro_batch_tokens(recomputes, device, "eager") for device in (cpu, gpu)] == [
        4096,
        4096,
    ]
    assert [
        micro_batch_tokens(TrainerConfig(micro_batch_tokens=100), device, "eager")
        for device in (cpu, gpu)
    ] == [100, 100]
