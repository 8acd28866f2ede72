import random

import msgspec
import pytest

from rl.orchestrator.batches.contents import group_samples, join_spans
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turn, pack_logprobs, unpack_logprobs
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


def sample_of(chain, group, rollout_id, advantage, scores):
    token_ids, mask, logprobs, teacher = [], [], [], []
    for one in chain:
        new = one.prompt_ids[len(token_ids) :]
        token_ids += new + one.completion_ids
        mask += [False] * len(new) + [True] * len(one.completion_ids)
        logprobs += [0.0] * len(new) + one.logprobs
        teacher += [0.0] * len(new) + unpack_logprobs(scores.get(id(one), b""))
    return aligned_sample(
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        advantages=[advantage if sampled else 0.0 for sampled in mask],
        policy_versions=join_spans([span for one in chain for span in one.policy_versions]),
        env=group.env,
        group_id=group.group_id,
        rollout_id=rollout_id,
        temperature=group.temperature,
        teacher_logprobs=teacher if any(scores.get(id(one)) for one in chain) else None,
    )


def random_turns(draw):
    """A conversation whose prompts continue an earlier turn, a part of one, or nothing; few
    different ids, for many coincidences."""
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
