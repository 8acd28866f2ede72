from rl.messages import TrainBatch, VersionSpan
from rl.orchestrator.batches import MAX_REFILL, batch_metrics, choose, judge, room, write_eval
from rl.orchestrator.rollouts import Group, Rollout, Turn
from rl.orchestrator.samples import group_samples


def rollout(reward, version=0, error=None, tokens=2):
    turns = [
        Turn(
            prompt_ids=[1],
            completion_ids=[2] * tokens,
            logprobs=[-1.0] * tokens,
            policy_versions=[VersionSpan(version, tokens)],
            finish_reason="stop",
        )
    ]
    return Rollout(turns=turns, reward=reward, error=error, metrics={"m": reward * 2})


def group(group_id, *rewards, **options):
    return judge(Group(group_id=group_id, env="e", task=0, rollouts=[rollout(reward, **options) for reward in rewards]))


def test_judge_names_the_reason():
    assert (group(0, 1.0, 0.0).why, group(0, 1.0, 0.0).advantages) == (None, [0.5, -0.5])
    assert group(0, 1.0, 1.0).why == "no_signal"
    assert group(0, 1.0, 0.0, tokens=0).why == "empty"
    partly = judge(Group(group_id=0, env="e", task=0, rollouts=[rollout(1.0), rollout(0.0, error="boom")]))
    assert (partly.why, partly.advantages) == ("error", [0.0, 0.0])


def test_oldest_groups_first_and_not_before_the_batch_is_full():
    groups = [group(5, 1.0, 0.0), group(3, 1.0, 0.0), group(4, 1.0, 1.0)]
    assert choose(groups, 3, 0) is None
    assert [g.group_id for g in choose([*groups, group(1, 0.0, 1.0)], 2, 5)] == [1, 3]


def test_short_batch_after_three_batches_worth_of_groups():
    silent = [group(i, 0.0, 0.0) for i in range(MAX_REFILL * 2)]
    assert choose(silent, 2, 0) is None
    assert [g.group_id for g in choose([*silent[1:], group(9, 1.0, 0.0)], 2, 0)] == [9]


def test_no_short_batch_while_groups_are_playing():
    finished = [*(group(i, 0.0, 0.0) for i in range(MAX_REFILL * 2 - 1)), group(9, 1.0, 0.0)]
    assert choose(finished, 2, 1) is None


def test_room_is_what_batches_lack_and_ends_with_the_refills():
    signal, silent = [group(0, 1.0, 0.0)], [group(i, 0.0, 0.0) for i in range(1, 40)]
    assert room([], 4, 0, 1) == 4 and room([], 4, 3, 2) == 5 and room(signal, 4, 3, 1) == 0
    assert room(signal + silent[:3], 4, 0, 1) == 3  # replaced
    assert room(signal + silent[:9], 4, 1, 1) == 1  # 12 groups for a batch of 4 at most
    assert room(signal + silent[:9], 4, 2, 1) == 0
    assert room(silent, 4, 0, 1) == 4  # nothing to train on yet
    assert room(signal, 4, 0, -1) < 0


def test_metrics_count_every_rollout_and_lag_by_token():
    used, silent, failed = group(0, 1.0, 0.0, version=2), group(1, 1.0, 1.0), group(2, 0.0, 0.0, error="x")
    newer = group(3, 0.0, 1.0, version=3, tokens=6)
    batch = TrainBatch(step=4, samples=[*group_samples(used, 1.0), *group_samples(newer, 1.0)])
    metrics = batch_metrics(batch, [used, newer, silent, failed], 2)
    assert metrics["reward/mean"] == 4 / 6 and metrics["reward/e/m"] == 8 / 6
    assert (metrics["lag/max"], metrics["lag/mean"]) == (1, 4 / 16)
    assert (metrics["rollouts/errored"], metrics["rollouts/zero_advantage"], metrics["rollouts/trained"]) == (0.25, 0.25, 4)
    assert metrics["rollouts/length_mean"] == (2 * 4 + 6 * 2) / 6


def test_eval_counts_failures_as_zero(tmp_path):
    results = [(0, [rollout(1.0), rollout(0.0)]), (1, [rollout(1.0, error="x"), rollout(0.0)])]
    metrics = write_eval(tmp_path / "000003" / "e.jsonl", 3, "e", results)
    assert metrics["eval/e/reward_mean"] == 0.25 and metrics["eval/e/pass@2"] == 0.5 and metrics["eval/e/errored"] == 0.25
    assert len((tmp_path / "000003" / "e.jsonl").read_text().splitlines()) == 4
