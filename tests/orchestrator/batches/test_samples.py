import random

import msgspec
import pytest

from rl.orchestrator.batches.contents import batch_metrics, group_samples, join_spans
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Group, Rollout, why_left_out
from rl.wire.turns import Turn, pack_kept, pack_logprobs, unpack_kept, unpack_logprobs
from tests.orchestrator.made import turn
from tests.wire.samples import aligned, aligned_sample


def merge_whole_prompts(turns):
    """Makes chains from turns with their whole prompts, straight from the definition."""
    chains = []
    for one in turns:
        for chain in chains:
            before = chain[-1].token_ids
            if one.prompt_ids[: len(before)] == before:
                chain.append(one)
                break
        else:
            chains.append([one])
    return chains


def sets_of(one):
    return unpack_kept(one.kept) if one.kept else [[]] * len(one.completion_ids)


def sample_of(chain, group, rollout_id, advantage, scores):
    token_ids, mask, logprobs, teacher, kept = [], [], [], [], []
    for one in chain:
        sets = sets_of(one)
        new = one.prompt_ids[len(token_ids) :]
        token_ids += new + one.completion_ids

        mask += [False] * len(new) + [ids is not None for ids in sets]
        kept += [[]] * len(new) + sets
        logprobs += [0.0] * len(new) + one.logprobs
        teacher += [0.0] * len(new) + unpack_logprobs(scores.get(id(one), b""))
    return aligned_sample(
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        advantages=[advantage if sampled else 0.0 for sampled in mask],
        policy_versions=[
            VersionSpan(version, 1)
            for version, is_trained in zip(
                [
                    span.policy_version
                    for one in chain
                    for span in one.policy_versions
                    for _ in range(span.num_tokens)
                ],
                [ids is not None for one in chain for ids in sets_of(one)],
                strict=True,
            )
            if is_trained
        ],
        env=group.env,
        group_id=group.group_id,
        rollout_id=rollout_id,
        temperature=group.temperature,
        teacher_logprobs=teacher if any(scores.get(id(one)) for one in chain) else None,
        kept=kept if any(one.kept for one in chain) else None,
    )


def random_turns(draw):
    """A conversation whose prompts continue an earlier turn, a part of one, or nothing; few
    different ids, for many coincidences. In some turns sampling keeps the whole vocabulary, some
    ids, or too many."""
    turns = []
    for _ in range(draw.randrange(1, 14)):
        before = draw.choice(turns).token_ids if turns and draw.random() < 0.85 else []
        kept = before[: draw.randrange(len(before) + 1)] if draw.random() < 0.3 else before
        prompt = [*kept, *(draw.randrange(2) for _ in range(draw.randrange(4)))] or [
            draw.randrange(2)
        ]
        count = draw.randrange(4)
        spans, left = [], count
        while left:
            spans.append(VersionSpan(draw.randrange(3), draw.randrange(left + 1)))
            left -= spans[-1].num_tokens
        answer = {
            "completion_ids": [draw.randrange(2) for _ in range(count)],
            "logprobs": [draw.uniform(-9, 0) for _ in range(count)],
            "policy_versions": spans,
            "finish_reason": draw.choice(["stop", "length"]),
        }
        sets = [draw.choice([[], None, [id, 7]]) for id in answer["completion_ids"]]
        answer["kept"] = pack_kept(sets) if draw.random() < 0.5 else None
        turns.append(Turn.of(prompt, **answer))
    return turns


@pytest.mark.parametrize("with_teacher", [False, True])
def test_samples_of_branching_conversations_are_those_of_their_whole_prompts(with_teacher):
    """Bit for bit, also after serialisation; and every turn is recovered unchanged."""
    for seed in range(400):
        turns, scores = random_turns(random.Random(seed)), {}
        rollout = Rollout(turns=turns)
        for one, answer in zip(turns, rollout.turns.answers if with_teacher else [], strict=False):
            scores[id(one)] = answer.teacher_logprobs = pack_logprobs(
                [number / 7 for number in one.completion_ids]
            )
        group = Group(
            group_id=seed,
            env="e",
            task=0,
            rollouts=[rollout],
            advantages=[0.25],
            temperature=0.7,
        )
        group = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=Group)
        expected = [
            sample_of(chain, group, 0, 0.25, scores) for chain in merge_whole_prompts(turns)
        ]
        expected = [sample for sample in expected if sample.spans]
        assert list(map(aligned, group_samples(group))) == list(map(aligned, expected)), seed
        found = group.rollouts[0].turns
        assert list(found) == turns and found[-1] == turns[-1] and len(found) == len(turns)


def test_tokens_of_which_too_many_were_kept_are_counted_and_alone_make_a_rollout_untrained():
    some = turn([1], [2, 3, 4], kept=pack_kept([None, [3, 5], []]))
    none = turn([1], [2, 3], kept=pack_kept([None, None]))
    whole = turn([1], [2, 3], kept=pack_kept([[], []]))
    assert whole.kept is None
    rollouts = [Rollout(turns=[one]) for one in (some, none, whole)]
    assert [why_left_out(rollout, False) for rollout in rollouts] == [None, "kept_overflow", None]
    group = Group(group_id=0, env="e", task=0, rollouts=rollouts, advantages=[1.0, -1.0, 2.0])
    metrics = batch_metrics(1, [group])
    assert (metrics["tokens/kept_overflow"], metrics["tokens/kept_mean"]) == (3, 2.0)
    assert [sample.rollout_id for sample in group_samples(group)] == [0, 2]


def test_a_rollout_is_linear_in_its_tokens_whether_history_is_kept_or_rewritten():
    for kept in (1.0, 0.5):
        history, turns, distinct = [7], [], 1
        for number in range(300):
            answer = [number] * 100
            turns.append(turn(history, answer, number // 100))
            new = answer[: int(100 * kept)] + [5] * 100
            history = history + new
            distinct += 100 + 100
        size = len(msgspec.msgpack.encode(Rollout(turns=turns)))
        assert size < 12 * distinct


def answered(chain, first, logprobs, *more):
    """Turns of one answer, in a chain of two tokens."""
    return {"chains": [[b"abcd" * 2]], "answers": [[chain, first, logprobs, *more]]}


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        ({"chains": [[b"abc"]]}, "is cut short"),
        ({"chains": [[b"", 0, 0]]}, "does not continue an earlier one"),
        ({"chains": [[b"abcd"], [b"", 0, 2]]}, "more tokens than its base has"),
        (
            answered(1, 1, b"1234", [[0, 1]], "stop"),
            "is not in a chain",
        ),
        (
            answered(0, 1, b"1234567", [[0, 1]], "stop"),
            "an answer is cut short",
        ),
        (
            answered(0, 2, b"1234", [[0, 1]], "stop"),
            "outside of its chain",
        ),
        (
            answered(0, 0, b"1234", [[0, 1]], "stop"),
            "has no prompt",
        ),
        (
            answered(0, 1, b"1234", [[0, 2]], "stop"),
            "differ in number",
        ),
        (
            answered(0, 1, b"1234", [[0, 1]], "stop", b""),
            "teacher logprobs differ in number",
        ),
    ],
)
def test_turns_that_do_not_fit_together_are_no_message(turns, what):
    """They would crash the orchestrator when the batch is formed."""
    with pytest.raises(msgspec.ValidationError, match=what):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"turns": turns}), type=Rollout)


def test_spans_are_joined():
    spans = [
        VersionSpan(1, 2),
        VersionSpan(1, 3),
        VersionSpan(2, 0),
        VersionSpan(2, 1),
        VersionSpan(1, 1),
    ]
    assert join_spans(spans) == [VersionSpan(1, 5), VersionSpan(2, 1), VersionSpan(1, 1)]
