import random

import msgspec
import pytest

from rl.orchestrator.batches.samples import group_samples, join_spans
from rl.wire.messages import TrainingSample, VersionSpan
from rl.wire.rollouts import Group, Rollout, Turn


def turn(prompt, completion, version=0):
    spans = [VersionSpan(version, len(completion))]
    return Turn(
        prompt_ids=prompt, completion_ids=completion, logprobs=[-0.1] * len(completion), policy_versions=spans, finish_reason="stop"
    )


def test_turns_that_continue_each_other_are_one_sample():
    rollout = Rollout(turns=[turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9, 9], [7], 6)], reward=1.0)
    (sample,) = group_samples(Group(group_id=8, env="e", task=0, rollouts=[rollout], advantages=[0.5], temperature=0.7))
    assert sample.token_ids == [1, 2, 3, 4, 9, 9, 7]
    assert sample.loss_mask == [False, False, True, True, False, False, True]
    assert sample.logprobs == [0.0, 0.0, -0.1, -0.1, 0.0, 0.0, -0.1]
    assert sample.advantages == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.5]
    assert sample.policy_versions == [VersionSpan(5, 2), VersionSpan(6, 1)]
    assert (sample.group_id, sample.rollout_id, sample.temperature) == (8, 0, 0.7)


def test_rewritten_history_starts_a_new_sample_and_interleaved_chains_are_kept_apart():
    a1, b1 = turn([1], [2]), turn([5], [6])
    a2, b2 = turn([1, 2, 3], [4]), turn([5, 6, 7], [8])
    rewritten = turn([1, 3], [4])
    turns = Rollout(turns=[a1, b1, a2, b2, rewritten]).turns
    assert [list(turns)[i] for i in (0, 1, 2, 3, 4)] == [a1, b1, a2, b2, rewritten]
    assert [answer.chain for answer in turns.answers] == [0, 1, 0, 1, 2] and [turns.ids(i).tolist() for i in range(3)] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [1, 3, 4],
    ]


def merge_whole_prompts(turns):
    """Makes chains from turns with their whole prompts, straight from the definition."""
    chains = []
    for turn in turns:
        for chain in chains:
            before = chain[-1].token_ids
            if turn.prompt_ids[: len(before)] == before:
                chain.append(turn)
                break
        else:
            chains.append([turn])
    return chains


def sample_of(chain, group, rollout_id, advantage):
    token_ids, mask, logprobs, teacher = [], [], [], []
    for turn in chain:
        new = turn.prompt_ids[len(token_ids) :]
        token_ids += new + turn.completion_ids
        mask += [False] * len(new) + [True] * len(turn.completion_ids)
        logprobs += [0.0] * len(new) + turn.logprobs
        teacher += [0.0] * len(new) + (turn.teacher_logprobs or [])
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=logprobs,
        advantages=[advantage if sampled else 0.0 for sampled in mask],
        policy_versions=join_spans([span for turn in chain for span in turn.policy_versions]),
        env=group.env,
        group_id=group.group_id,
        rollout_id=rollout_id,
        temperature=group.temperature,
        teacher_logprobs=teacher if any(turn.teacher_logprobs for turn in chain) else None,
    )


def random_turns(draw, with_teacher):
    """A conversation whose prompts continue an earlier turn, a part of one, or nothing; few different ids, for many coincidences."""
    turns = []
    for _ in range(draw.randrange(1, 14)):
        before = draw.choice(turns).token_ids if turns and draw.random() < 0.85 else []
        kept = before[: draw.randrange(len(before) + 1)] if draw.random() < 0.3 else before
        prompt = [*kept, *(draw.randrange(2) for _ in range(draw.randrange(4)))] or [draw.randrange(2)]
        count = draw.randrange(4)
        spans, left = [], count
        while left:
            spans.append(VersionSpan(draw.randrange(3), draw.randrange(left + 1)))
            left -= spans[-1].num_tokens
        scores = [[draw.uniform(-9, 0) for _ in range(count)] for _ in range(2)]
        answer = {"completion_ids": [draw.randrange(2) for _ in range(count)], "logprobs": scores[0], "policy_versions": spans}
        teacher = {"teacher_logprobs": scores[1]} if with_teacher else {}
        turns.append(Turn(prompt_ids=prompt, finish_reason=draw.choice(["stop", "length"]), **answer, **teacher))
    return turns


@pytest.mark.parametrize("with_teacher", [False, True])
def test_samples_of_branching_conversations_are_those_of_their_whole_prompts(with_teacher):
    """Bit for bit, also after serialisation; and every turn is recovered unchanged."""
    for seed in range(400):
        turns = random_turns(random.Random(seed), with_teacher)
        group = Group(group_id=seed, env="e", task=0, rollouts=[Rollout(turns=turns)], advantages=[0.25], temperature=0.7)
        group = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=Group)
        expected = [sample_of(chain, group, 0, 0.25) for chain in merge_whole_prompts(turns)]
        expected = [sample for sample in expected if any(sample.loss_mask)]
        assert msgspec.msgpack.encode(list(group_samples(group))) == msgspec.msgpack.encode(expected), seed
        found = group.rollouts[0].turns
        assert list(found) == turns and found[-1] == turns[-1] and found[1:] == turns[1:] and len(found) == len(turns)


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


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        ({"chains": [[b"abc"]]}, "is cut short"),
        ({"chains": [[b"", 0, 0]]}, "does not continue an earlier one"),
        ({"chains": [[b"abcd"], [b"", 0, 2]]}, "more tokens than its base has"),
        ({"chains": [[b"abcd" * 2]], "answers": [[1, 1, b"12345678", [[0, 1]], "stop"]]}, "is not in a chain"),
        ({"chains": [[b"abcd" * 2]], "answers": [[0, 1, b"1234567", [[0, 1]], "stop"]]}, "an answer is cut short"),
        ({"chains": [[b"abcd" * 2]], "answers": [[0, 2, b"12345678", [[0, 1]], "stop"]]}, "outside of its chain"),
        ({"chains": [[b"abcd" * 2]], "answers": [[0, 0, b"12345678", [[0, 1]], "stop"]]}, "has no prompt"),
        ({"chains": [[b"abcd" * 2]], "answers": [[0, 1, b"12345678", [[0, 2]], "stop"]]}, "differ in number"),
        ({"chains": [[b"abcd" * 2]], "answers": [[0, 1, b"12345678", [[0, 1]], "stop", b""]]}, "teacher logprobs differ in number"),
    ],
)
def test_turns_that_do_not_fit_together_are_no_message(turns, what):
    """They would crash the orchestrator when the batch is formed."""
    with pytest.raises(msgspec.ValidationError, match=what):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"turns": turns}), type=Rollout)


def test_rollout_without_a_sampled_token_has_no_sample():
    group = Group(group_id=0, env="e", task=0, rollouts=[Rollout(), Rollout(turns=[turn([1], [])])], advantages=[1.0, -1.0])
    assert list(group_samples(group, True)) == []


def test_spans_are_joined():
    spans = [VersionSpan(1, 2), VersionSpan(1, 3), VersionSpan(2, 0), VersionSpan(2, 1), VersionSpan(1, 1)]
    assert join_spans(spans) == [VersionSpan(1, 5), VersionSpan(2, 1), VersionSpan(1, 1)]


def test_teacher_logprobs_stand_at_their_tokens():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [7]), turn([5], [6])]
    turns[0].teacher_logprobs, turns[1].teacher_logprobs = [-1.0, -2.0], [-3.0]
    merged, other = group_samples(Group(group_id=0, env="e", task=0, rollouts=[Rollout(turns=turns)], advantages=[0.0]))
    assert merged.teacher_logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, -3.0] and other.teacher_logprobs is None
