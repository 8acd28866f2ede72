from rl.messages import TrainBatch, VersionSpan
from rl.orchestrator.admission import MAX_REFILL
from rl.orchestrator.batches import batch_metrics, choose, judge, rollout_line
from rl.orchestrator.rollouts import Group, Rollout, Turn
from rl.orchestrator.samples import group_samples
from rl.orchestrator.signal import Signal


def rollout(reward, version=0, error=None, tokens=2, **options):
    turns = [
        Turn(
            prompt_ids=[1],
            completion_ids=[2] * tokens,
            logprobs=[-1.0] * tokens,
            policy_versions=[VersionSpan(version, tokens)],
            finish_reason="stop",
        )
    ]
    return Rollout(turns=turns, reward=reward, error=error, cause="environment" if error else None, metrics={"m": reward * 2}, **options)


def group(group_id, *rewards, env="e", **options):
    rollouts = [rollout(reward, episode=i, **options) for i, reward in enumerate(rewards)]
    return judge(Group(group_id=group_id, env=env, task=0, rollouts=rollouts))


def test_judge_names_the_reason():
    assert (group(0, 1.0, 0.0).why, group(0, 1.0, 0.0).advantages) == (None, [0.5, -0.5])
    assert group(0, 1.0, 1.0).why == "no_signal"
    assert group(0, 1.0, 0.0, tokens=0).why == "empty"
    assert group(0, 1.0, 0.0, tokens=0, overlong=True).why == "overlong"
    partly = judge(Group(group_id=0, env="e", task=0, rollouts=[rollout(1.0), rollout(0.0, error="boom")]))
    assert (partly.why, partly.advantages) == ("error", [0.0, 0.0])


def test_a_partial_group_is_trained_only_if_that_is_wanted():
    rollouts = [rollout(1.0), rollout(0.0, episode=1), rollout(0.5, episode=2, error="boom")]
    assert judge(Group(group_id=0, env="e", task=0, rollouts=rollouts)).why == "error"
    kept = judge(Group(group_id=0, env="e", task=0, rollouts=rollouts), keep_partial=True)
    assert (kept.why, kept.advantages) == (None, [0.5, -0.5, 0.0])
    assert [sample.rollout_id for sample in group_samples(kept)] == [0, 1]
    alone = Group(group_id=0, env="e", task=0, rollouts=rollouts[1:])
    assert judge(alone, keep_partial=True).why == "error"  # nothing to compare it with


def test_groups_without_signal_fill_their_place_if_they_are_not_replaced():
    silent = Group(group_id=0, env="e", task=0, rollouts=[rollout(1.0), rollout(1.0, episode=1)])
    kept = judge(silent, replace_no_signal=False)
    assert (kept.why, kept.advantages, len(group_samples(kept))) == (None, [0.0, 0.0], 2)
    assert batch_metrics(TrainBatch(step=1, samples=[]), [kept])["rollouts/zero_advantage"] == 1.0
    signal = Signal()
    signal.note(kept)
    assert signal.silent == [("e", 1.0)] * 2 and signal.solved()
    signal.note(group(1, 0.0, 1.0))
    assert signal.silent == [] and signal.ranges == {"e": (0.0, 1.0)}


def test_agents_are_compared_with_their_like_and_some_are_not_trained():
    parts = [("solver", True, 1.0), ("judge", False, 7.0), ("rival", True, 4.0)]
    rollouts = [
        rollout(reward * (episode + 1), episode=episode, agent=agent, trainable=trainable)
        for episode in range(2)
        for agent, trainable, reward in parts
    ]
    judged = judge(Group(group_id=0, env="e", task=0, rollouts=rollouts))
    assert judged.num_episodes == 2
    assert judged.advantages == [-0.5, 0.0, -2.0, 0.5, 0.0, 2.0]
    assert [sample.rollout_id for sample in group_samples(judged)] == [0, 2, 3, 5]
    lines = [rollout_line(judged, i, 1) for i in range(6)]
    assert [line["why"] for line in lines] == [None, "not_trainable", None, None, "not_trainable", None]


def test_every_end_of_a_rollout_has_its_own_name():
    kinds = {
        "finished": rollout(1.0),
        "truncated": rollout(1.0, truncated=True),
        "overlong": rollout(0.0, tokens=0, overlong=True),
        "empty": rollout(0.0, tokens=0),
        "timeout": Rollout(error="late", cause="timeout"),
        "failed": rollout(0.0, error="boom"),
    }
    whole = Group(group_id=0, env="e", task=0, rollouts=list(kinds.values())[:4], advantages=[1.0, -1.0, 0.0, 0.0])
    assert [rollout_line(whole, i, 1)["outcome"] for i in range(4)] == ["finished", "truncated", "overlong", "empty"]
    assert [rollout_line(whole, i, 1)["why"] for i in range(4)] == [None, None, "overlong", "empty"]
    assert [rollout_line(whole, i, 1, mask_truncated=True)["why"] for i in range(2)] == [None, "truncated"]
    assert [sample.rollout_id for sample in group_samples(whole, mask_truncated=True)] == [0]
    failed = judge(Group(group_id=0, env="e", task=0, rollouts=list(kinds.values())))
    lines = [rollout_line(failed, i, 1) for i in range(6)]
    assert [line["outcome"] for line in lines] == list(kinds)
    assert [line["why"] for line in lines] == ["error"] * 4 + ["timeout", "environment"]
    metrics = batch_metrics(TrainBatch(step=1, samples=[]), [failed])
    assert [metrics[f"rollouts/{kind}"] for kind in ("overlong", "empty", "timeout", "errored")] == [1 / 6, 1 / 6, 1 / 6, 2 / 6]
    assert (metrics["rollouts/e/failed_timeout"], metrics["rollouts/e/failed_environment"]) == (1, 1)


def test_turns_that_could_not_be_merged_are_counted():
    turns = [rollout(1.0).turns[0] for _ in range(3)]
    turns[1].prompt_ids = [1, 2, 2, 5]  # continues the first
    turns[2].prompt_ids = [1, 7]
    metrics = batch_metrics(TrainBatch(step=1, samples=[]), [Group(group_id=0, env="e", task=0, rollouts=[Rollout(turns=turns)])])
    assert metrics["rollouts/unmerged_turns"] == 0.5


def test_oldest_groups_first_and_not_before_the_batch_is_full():
    groups = [group(5, 1.0, 0.0), group(3, 1.0, 0.0), group(4, 1.0, 1.0)]
    assert choose(groups, 6, 0) is None
    assert [g.group_id for g in choose([*groups, group(1, 0.0, 1.0)], 4, 5)] == [1, 3]
    assert [g.group_id for g in choose([*groups, group(1, 0.0, 1.0, 0.5)], 4, 5)] == [1, 3]  # one rollout more than asked for


def test_short_batch_after_three_batches_worth_of_groups():
    silent = [group(i, 0.0, 0.0) for i in range(MAX_REFILL * 2)]
    assert choose(silent, 4, 0) is None
    assert [g.group_id for g in choose([*silent[1:], group(9, 1.0, 0.0)], 4, 0)] == [9]


def test_no_short_batch_while_groups_are_playing():
    finished = [*(group(i, 0.0, 0.0) for i in range(MAX_REFILL * 2 - 1)), group(9, 1.0, 0.0)]
    assert choose(finished, 4, 1) is None


def test_metrics_count_every_rollout_and_lag_by_token():
    used, silent, failed = group(0, 1.0, 0.0, version=2), group(1, 1.0, 1.0), group(2, 0.0, 0.0, error="x")
    newer = group(3, 0.0, 1.0, version=3, tokens=6)
    batch = TrainBatch(step=4, samples=[*group_samples(used), *group_samples(newer)])
    metrics = batch_metrics(batch, [used, newer, silent, failed])
    assert metrics["reward/mean"] == 4 / 6 and metrics["reward/e/m"] == 8 / 6
    assert (metrics["lag/max"], metrics["lag/mean"]) == (1, 4 / 16)
    assert (metrics["rollouts/errored"], metrics["rollouts/zero_advantage"], metrics["rollouts/trained"]) == (0.25, 0.25, 4)
    assert metrics["rollouts/length_mean"] == (2 * 4 + 6 * 2) / 6
