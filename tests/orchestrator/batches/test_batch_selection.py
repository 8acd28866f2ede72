import json
import math

import msgspec
import pytest

from rl.config.orchestrator import (
    MaxRlConfig,
    OrchestratorConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from rl.config.run import RLConfig
from rl.orchestrator.batches.batch_files import (
    BatchFiles,
    OrchestratorState,
    decode_state,
)
from rl.orchestrator.batches.contents import batch_metrics, group_samples
from rl.orchestrator.batches.early_stop import RewardHistory, only_failures
from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.orchestrator.pipeline import choose, warnings_about
from rl.orchestrator.tasks.task_source import TaskRef, TaskState
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch
from rl.wire.messages import TrainBatch, VersionSpan
from rl.wire.rollouts import Group, Rollout, rollout_line
from rl.wire.turns import pack_ids
from tests.orchestrator.made import turn


def rollout(reward, version=0, error=None, tokens=2, **options):
    turns = [turn(completion=[2] * tokens, version=version)]
    return Rollout(
        turns=turns,
        reward=reward,
        error=error,
        cause="environment" if error else None,
        metrics={"m": reward * 2},
        **options,
    )


def group_of(*rollouts, **fields):
    return Group(**{"group_id": 0, "env": "e", "task": 0, "rollouts": [*rollouts]} | fields)


def group(group_id, *rewards, env="e", rules=None, **options):
    rollouts = [rollout(reward, episode=i, **options) for i, reward in enumerate(rewards)]
    return credit_group(group_of(*rollouts, group_id=group_id, env=env), rules or Rules())


def test_judge_names_the_reason():
    assert group(0, 1.0, 0.0, tokens=0).why == "empty"
    assert group(0, 1.0, 0.0, tokens=0, overlong=True).why == "overlong"
    masked = Rules(mask_truncated=True)
    assert group(0, 1.0, 0.0, truncated=True).why is None
    assert group(0, 1.0, 0.0, truncated=True, rules=masked).why == "truncated"
    one_is_whole = group_of(rollout(1.0, truncated=True), rollout(0.0, episode=1))
    assert credit_group(one_is_whole, masked).why is None
    assert group(1, 1.0, 1.0, tokens=0, rules=Rules(has_teacher=True)).why == "empty"


def test_groups_without_signal_fill_their_place_if_they_are_not_replaced():
    silent = group_of(rollout(1.0), rollout(1.0, episode=1))
    kept = credit_group(silent, Rules(replace_no_signal=False))
    assert (kept.why, kept.advantages, len(list(group_samples(kept)))) == (None, [0.0, 0.0], 2)
    assert batch_metrics(1, [kept])["rollouts/zero_advantage"] == 1.0
    history = RewardHistory()
    history.add(kept)
    assert history.without_signal == [("e", 1.0)] * 2 and history.is_solved()
    history.add(group(1, 0.0, 1.0))
    assert history.without_signal == [] and history.ranges == {"e": (0.0, 1.0)}


def test_agents_are_compared_with_their_like_and_some_are_not_trained():
    parts = [("solver", True, 1.0), ("judge", False, 7.0), ("rival", True, 4.0)]
    rollouts = [
        rollout(reward * (episode + 1), episode=episode, agent=agent, trainable=trainable)
        for episode in range(2)
        for agent, trainable, reward in parts
    ]
    judged = credit_group(group_of(*rollouts), Rules())
    assert judged.num_episodes == 2
    assert judged.advantages == [-0.5, 0.0, -2.0, 0.5, 0.0, 2.0]
    assert [sample.rollout_id for sample in group_samples(judged)] == [0, 2, 3, 5]
    lines = [rollout_line(judged, i, 1) for i in range(6)]
    assert [line["why"] for line in lines] == [
        None,
        "not_trainable",
        None,
        None,
        "not_trainable",
        None,
    ]
    judged.why = "stale"
    assert [rollout_line(judged, i, 1).get("trainable") for i in range(3)] == [None, False, None]


def test_every_end_of_a_rollout_has_its_own_name():
    kinds = {
        "finished": rollout(1.0),
        "truncated": rollout(1.0, truncated=True),
        "overlong": rollout(0.0, tokens=0, overlong=True),
        "empty": rollout(0.0, tokens=0),
        "timeout": Rollout(error="late", cause="timeout"),
        "failed": rollout(0.0, error="boom"),
    }
    whole = group_of(*[*kinds.values()][:4], advantages=[1.0, -1.0, 0.0, 0.0])
    assert [rollout_line(whole, i, 1)["outcome"] for i in range(4)] == [
        "finished",
        "truncated",
        "overlong",
        "empty",
    ]
    assert [rollout_line(whole, i, 1)["why"] for i in range(4)] == [None, None, "overlong", "empty"]
    assert [rollout_line(whole, i, 1, mask_truncated=True)["why"] for i in range(2)] == [
        None,
        "truncated",
    ]
    assert [sample.rollout_id for sample in group_samples(whole, mask_truncated=True)] == [0]
    failed = credit_group(group_of(*kinds.values()), Rules())
    lines = [rollout_line(failed, i, 1) for i in range(6)]
    assert [line["outcome"] for line in lines] == list(kinds)
    assert [line["why"] for line in lines] == ["error"] * 4 + ["timeout", "environment"]
    assert [line["reward"] is line["advantage"] is None for line in lines] == [False] * 4 + [
        True
    ] * 2
    metrics = batch_metrics(1, [failed])
    assert [
        metrics[f"rollouts/{kind}"] for kind in ("overlong", "empty", "timeout", "errored")
    ] == [1 / 6, 1 / 6, 1 / 6, 2 / 6]
    assert (metrics["rollouts/e/failed_timeout"], metrics["rollouts/e/failed_environment"]) == (
        1,
        1,
    )


def test_turns_that_could_not_be_merged_are_counted():
    turns = [rollout(1.0).turns[0] for _ in range(3)]
    turns[1].packed_prompt = pack_ids([1, 2, 2, 5])  # continues the first
    turns[2].packed_prompt = pack_ids([1, 7])
    metrics = batch_metrics(1, [group_of(Rollout(turns=turns))])
    assert metrics["rollouts/unmerged_turns"] == 0.5


def silent(count):
    return [group(i, 0.0, 0.0) for i in range(count)]


def trainable(*numbers):
    return [group(number, 1.0, 0.0) for number in numbers]


@pytest.mark.parametrize(
    ("finished", "num_playing", "max_refill", "before", "chosen"),
    [
        ([*trainable(5), group(4, 1.0, 1.0)], 0, 3, math.inf, None),  # not full
        ([*trainable(5, 3, 1), group(4, 1.0, 1.0)], 5, 3, math.inf, [1, 3]),  # the oldest first
        # one rollout more than asked for
        ([*trainable(5, 3), group(1, 0.0, 1.0, 0.5)], 5, 3, math.inf, [1, 3]),
        (trainable(1, 3, 4), 2, 3, 2, None),  # group 2, which started before, is playing
        (trainable(1, 3, 4), 2, 3, 4, [1, 3]),
        (silent(6), 0, 3, math.inf, None),
        # short, after three batches' worth of groups
        ([*silent(5), *trainable(9)], 0, 3, math.inf, [9]),
        ([*silent(5), *trainable(9)], 1, 3, math.inf, None),  # not while one is playing
        ([*silent(1), *trainable(1)], 0, 1, math.inf, [1]),
        ([*silent(1), *trainable(1)], 0, 2, math.inf, None),
    ],
)
def test_which_groups_are_the_next_batch(finished, num_playing, max_refill, before, chosen):
    found = choose(finished, 4, num_playing, max_refill, before)
    assert (found and [one.group_id for one in found]) == chosen


def test_metrics_count_every_rollout_and_lag_by_token():
    used, silent, failed = (
        group(0, 1.0, 0.0, version=2),
        group(1, 1.0, 1.0),
        group(2, 0.0, 0.0, error="x"),
    )
    newer = group(3, 0.0, 1.0, version=3, tokens=6)
    # no token is that old
    used.rollouts[0].turns.answers[0].policy_versions.append(VersionSpan(0, 0))
    metrics = batch_metrics(4, [used, newer, silent, failed])
    assert metrics["reward/mean"] == 4 / 6 and metrics["reward/e/m"] == 8 / 6
    assert (metrics["lag/max"], metrics["lag/mean"]) == (1, 4 / 16)
    assert (
        metrics["rollouts/errored"],
        metrics["rollouts/zero_advantage"],
        metrics["rollouts/trained"],
    ) == (0.25, 0.25, 4)
    assert metrics["rollouts/length_mean"] == (2 * 4 + 6 * 2) / 6


def test_each_environment_is_counted_also_one_of_which_nothing_is_left():
    used, failed = group(0, 1.0, 0.0), group(1, 0.0, 0.0, env="f", error="x")
    metrics = batch_metrics(1, [used, failed], envs=["e", "f", "g"])
    assert {
        env: (metrics[f"rollouts/{env}/finished"], metrics[f"rollouts/{env}/trained"])
        for env in "efg"
    } == {"e": (2, 2), "f": (2, 0), "g": (0, 0)}


def test_no_metric_of_an_environment_takes_the_place_of_one_of_ours():
    some = group(0, 1.0, 0.0)
    values = {"mean": 1000.0, "length_penalty": 7.0, "agent_agent": 5.0, "errored": 3.0}
    for rollout in some.rollouts:
        rollout.metrics = values | {"means": 2.0}
    metrics = batch_metrics(1, [some])
    assert {
        name.removeprefix("reward/e/"): value
        for name, value in metrics.items()
        if name.startswith("reward/e/")
    } == {
        "mean": 0.5,
        "means": 2.0,
        **{f"own_{name}": value for name, value in values.items()},
    }
    (warning,) = warnings_about(some)
    assert (warning.about, warning.env) == ("renamed", "e")
    assert "agent_agent as own_agent_agent" in warning.text and "means" not in warning.text


def test_a_length_penalty_gives_equal_rewards_a_signal_and_leaves_the_reward_alone():
    rules = Rules(RlooConfig(length_penalty=0.5))
    rollouts = [rollout(1.0, tokens=tokens, episode=i) for i, tokens in enumerate((4, 2, 0))]
    judged = credit_group(group_of(*rollouts), rules)
    assert (judged.why, judged.penalties, judged.advantages) == (
        None,
        [0.5, 0.25, 0.0],
        [-0.375, 0.0, 0.375],
    )
    assert group(1, 0.0, 0.0, rules=rules).why == "no_signal"
    metrics = batch_metrics(1, [judged, group(1, 0.0, rules=rules)])
    assert metrics["reward/e/mean"] == 0.75 and metrics["reward/e/length_penalty"] == 0.75 / 4
    assert rollout_line(judged, 0, 1)["reward"] == 1.0
    assert "reward/e/length_penalty" not in batch_metrics(1, [group(0, 1.0, 0.0)])


def test_reinforce_pp_is_final_when_the_batch_is_chosen_each_environment_for_itself(run_dir):
    rules = {
        "a": Rules(ReinforcePlusPlusConfig()),
        "b": Rules(ReinforcePlusPlusConfig(group_baseline=True)),
        "c": Rules(),
    }
    used = [
        group(i, *rewards, env=env, rules=rules[env])
        for i, (env, rewards) in enumerate(
            [
                ("a", (1.0, 1.0)),
                ("a", (0.0, 0.0)),
                ("b", (10.0, 20.0)),
                ("b", (5.0, 5.0, 5.0)),
                ("c", (1.0, 0.0)),
            ]
        )
    ]
    assert [g.why for g in used] == [None, None, None, "no_signal", None] and [
        g.signal for g in used
    ] == [None, None, True, False, True]
    dropped = [used.pop(3)]
    state = OrchestratorState(
        tasks=TaskState(next_group=5, issued={}, in_flight=[]),
        settled=[0],
        pending=[TaskRef(7, "e", 1)],
    )
    files = BatchFiles(run_dir, OrchestratorConfig(), rules)
    files.commit(1, [*used, *dropped], state, {})
    content = decode_batch(run_dir.batch(1).read_bytes(), "x")
    batch = content.batch
    a, b = 0.5 / (1 / 3) ** 0.5, 5 / 50**0.5
    assert [sample.advantages[-1] for sample in batch.samples] == pytest.approx(
        [a, a, -a, -a, -b, b, 0.5, -0.5], rel=1e-7
    )
    assert batch == TrainBatch(
        step=1, samples=[sample for group in used for sample in group_samples(group)]
    )
    assert decode_state(content.state).pending == [TaskRef(7, "e", 1)]
    lines = [json.loads(line) for line in run_dir.rollouts(1).read_bytes().splitlines()]
    assert [line["advantage"] for line in lines[:8]] == [
        sample.spans[-1].advantage for sample in batch.samples
    ]
    assert [line["advantage"] for line in lines[8:]] == [0.0] * 3
    metrics = batch_metrics(1, [*used, *dropped])
    assert metrics["rollouts/replaced_groups"] == metrics["rollouts/b/replaced_groups"] == 1
    assert "rollouts/a/replaced_groups" not in metrics


def test_what_was_begun_beyond_a_batch_is_counted_and_in_no_mean():
    """The surplus groups that finish are biased towards quick ones, or are of an older version."""
    used, surplus = [group(0, 1.0, 0.0)], group(1, 1.0, 1.0, 1.0, tokens=9)
    surplus.why = "surplus"
    alone, both = batch_metrics(1, used), batch_metrics(1, [*used, surplus])
    assert (alone["rollouts/finished"], both["rollouts/finished"], both["rollouts/e/finished"]) == (
        2,
        5,
        5,
    )
    assert {name for name in both if both[name] != alone[name]} == {
        "rollouts/finished",
        "rollouts/e/finished",
    }
    # nor does it count towards the next batch's refills
    assert choose([*used, surplus], 4, 0, 1) is None


def test_without_a_group_baseline_rewards_that_stay_the_same_are_silent():
    rules, history = Rules(ReinforcePlusPlusConfig()), RewardHistory()
    for i in range(3):
        history.add(group(i, 1.0, 1.0, rules=rules))
    assert history.without_signal == [("e", 1.0)] * 6 and history.is_solved()
    history.add(group(3, 0.0, 0.0, rules=rules))  # equal to each other, but not to earlier rewards
    assert history.without_signal == []


def test_patience_is_counted_in_episodes_like_the_batch():
    """Regression: rollouts were counted, so that with two trained agents a run ended after half
    of the batches that it should wait for."""
    agents = [
        rollout(1.0, episode=i // 2, agent=agent) for i, agent in enumerate(("solver", "rival") * 2)
    ]
    history = RewardHistory()
    history.add(credit_group(group_of(*agents), Rules()))
    assert (len(history.without_signal), history.episodes) == (4, 2)
    history = msgspec.msgpack.decode(msgspec.msgpack.encode(history), type=RewardHistory)
    history.add(group(1, 1.0, 1.0, 1.0))
    assert (len(history.without_signal), history.episodes) == (7, 5)
    history.add(group(2, 0.0, 1.0))
    assert (history.without_signal, history.episodes) == ([], 0)


@pytest.mark.parametrize("reward", [1.0, 1.8])
def test_a_reward_that_was_never_another_one_is_no_proof_of_success(reward):
    """Regression: for the most common fault of a reward function, a constant, the run reported
    that it was solved."""
    history = RewardHistory()
    history.add(group(0, reward, reward))
    said = f"nothing to learn: since the first rollout, e has given no reward other than {reward:g}"
    assert history.is_solved() and history.success() == (
        f"{said}. Either the task is that easy, or the reward is wrong",
        "doubtful",
    )
    history.add(group(1, 0.0, reward))
    history.add(group(2, reward, reward))
    assert history.success() == (
        "solved: the last 2 rollouts all have the highest reward (rewards of e: 2 times "
        f"{reward:g})",
        "early",
    )
    mixed = RewardHistory(without_signal=[("np", 0.5), ("exit", 1.0), ("np", 0.25), ("np", 0.5)])
    assert (
        mixed.histogram() == "rewards of exit: 1 times 1; rewards of np: 1 times 0.25, 2 times 0.5"
    )


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [group(0, 0.0, 0.0)],
            "Either no answer is right, or the reward function misses the right ones. Read "
            "ten answers: ",
        ),
        (
            [group(0, 0.5, 0.5, truncated=True)],
            "The reward function does not tell answers apart: call it with a right and with "
            "a wrong answer",
        ),
        (
            [group(0, 0.0, 0.0), group(1, 0.5, 0.5)],
            "Raise group_size or temperature, or take tasks of which the model solves some",
        ),
        (
            [group(0, *[0.0] * 9, truncated=True), group(1, 0.0)],
            "90% of the answers were cut off: raise orchestrator.sampling.max_tokens = 16; "
            "if they run on at any length, ",
        ),
        (
            [group(0, 0.0, 0.0), group(1, 0.0, 1.0), group(2, 0.0, 0.0, truncated=True)],
            "The mean reward was 0.250 before, and is 0.000 now: the policy has collapsed; "
            "start over with a tenth of trainer.optim.lr =",
        ),
        # a lucky one is no fall
        (
            [group(0, *[0.0] * 30), group(1, 0.0, 1.0), group(2, 0.0, 0.0)],
            "Either no answer is right, ",
        ),
        # certain, not collapsed
        (
            [group(0, 0.0, 1.0), group(1, 1.0, 1.0), group(2, 0.0, 0.0)],
            "Raise group_size or temperature, ",
        ),
    ],
)
def test_a_run_without_signal_ends_with_the_remedy_for_its_cause(groups, said):
    """Regression: every such run was asked whether its task is too hard, also if all answers
    were cut off or the policy had collapsed."""
    history, sampling = RewardHistory(), {"max_tokens": 16}
    for one in groups:
        history.add(one)
    config = RLConfig.model_validate(
        {
            "orchestrator": {"environment": [{"id": "e"}], "sampling": sampling},
            "trainer": {"optim": {"lr": 0.5}},
        }
    )
    assert history.diagnosis(config).partition("). ")[2].startswith(said)


def test_only_failures():
    failed, good = group(0, 1.0, 0.0, error="boom"), group(1, 1.0, 0.0)
    assert (
        only_failures([good, failed, failed], 4)
        == "the last 2 groups all failed; the newest error:\nboom"
    )
    cut = group(2, 1.0, 0.0, truncated=True, rules=Rules(mask_truncated=True))
    said = only_failures([good, cut, cut], 4)
    assert said.startswith("every answer in the last 2 groups was truncated")
    assert "raise orchestrator.sampling.max_tokens" in said
    assert only_failures([good, cut, failed], 4).endswith(
        "the newest error:\nboom"
    ) and not only_failures([cut, good], 0)
    # the most common reason
    assert only_failures([cut, failed, cut], 4).startswith(
        "every answer in 2 of the last 3 groups was truncated"
    )
    assert (
        only_failures([failed, failed, good], 0)
        == ""
        == only_failures([good, failed], 4)
        == only_failures([], 0)
    )


def test_a_state_without_the_newer_fields_is_still_read():
    old = {
        "tasks": {"next_group": 3, "issued": {"e": 3}, "in_flight": [[2, "e", 1]]},
        "settled": [0],
        "signal": {"silent": [], "ranges": {}},
    }
    state = decode_state(msgspec.Raw(msgspec.msgpack.encode(old)))
    assert (state.tasks.skipped, state.tasks.rates, state.pending) == ({}, {}, [])


def test_max_rl_refuses_a_reward_below_zero():
    """Regression: a mean near 0 made advantages of 4e9, and one below it was no signal."""
    with pytest.raises(RunError, match=r"a reward of -0.5, but .*max_rl divides by their mean"):
        group(0, 1.0, -0.5, rules=Rules(MaxRlConfig()))
    assert group(0, 1.0, 0.0, rules=Rules(MaxRlConfig())).advantages == [1.0, -1.0]
