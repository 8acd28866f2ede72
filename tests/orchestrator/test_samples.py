from rl.orchestrator.samples import group_samples, join_spans, merge_turns
from rl.wire.messages import VersionSpan
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
    assert merge_turns([a1, b1, a2, b2, rewritten]) == [[a1, a2], [b1, b2], [rewritten]]


def test_rollout_without_a_sampled_token_has_no_sample():
    group = Group(group_id=0, env="e", task=0, rollouts=[Rollout(), Rollout(turns=[turn([1], [])])], advantages=[1.0, -1.0])
    assert group_samples(group, 1.0) == []


def test_spans_are_joined():
    spans = [VersionSpan(1, 2), VersionSpan(1, 3), VersionSpan(2, 0), VersionSpan(2, 1), VersionSpan(1, 1)]
    assert join_spans(spans) == [VersionSpan(1, 5), VersionSpan(2, 1), VersionSpan(1, 1)]


def test_teacher_logprobs_stand_at_their_tokens():
    turns = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9], [7]), turn([5], [6])]
    turns[0].teacher_logprobs, turns[1].teacher_logprobs = [-1.0, -2.0], [-3.0]
    merged, other = group_samples(Group(group_id=0, env="e", task=0, rollouts=[Rollout(turns=turns)], advantages=[0.0]))
    assert merged.teacher_logprobs == [0.0, 0.0, -1.0, -2.0, 0.0, -3.0] and other.teacher_logprobs is None
