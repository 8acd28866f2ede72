"""Which results of a worker are accepted, and which are rejected as impossible."""

import math

import msgspec
import pytest

from rl.orchestrator.workers.pool_worker import validate_played
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import MAX_NAME, Rollout, unfit
from rl.wire.worker_messages import Played, PlayOrder, PolicySpec, ServerSet
from tests.orchestrator import light_worker, made

POLICY = PolicySpec(max_model_len=8, vocab_size=10)


def turn(prompt=(1, 2), completion=(9, 3), **changes):
    return made.turn(prompt, completion, 4, **{"logprobs": [-1.0, 0.0]} | changes)


def of(**changes):
    return {"turns": [turn(**changes)]}


def rollouts(count=3, **changes):
    return [
        Rollout(turns=[turn()], episode=i, reward=0.5, metrics={"a": 1.0}) for i in range(count - 1)
    ] + [msgspec.structs.replace(Rollout(turns=[turn()], episode=count - 1), **changes)]


def judged(
    played,
    unfinished=0,
    finished=frozenset(),
    newest=4,
    split="train",
):
    """Returns why the message is rejected."""
    order, server_set = (
        PlayOrder(7, split, 0, 3, {}, 0, sorted(finished)),
        ServerSet([], [], 0, newest),
    )
    try:
        validate_played(Played(7, played, unfinished), order, POLICY, server_set)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def test_what_workers_send_is_taken():
    assert judged(rollouts()) == ""
    assert (
        judged(rollouts()[:1], unfinished=2)
        == judged(rollouts()[1:], finished={0})
        == judged([], finished={0, 1, 2})
        == ""
    )
    two_agents = [
        msgspec.structs.replace(rollout, agent=agent)
        for rollout in rollouts()
        for agent in ("a", "b")
    ]
    assert (
        judged(two_agents)
        == judged(rollouts(turns=[]))
        == judged(rollouts(error="x", turns=[turn(logprobs=[math.nan, 0.0])]))
        == ""
    )


@pytest.mark.parametrize(
    ("played", "unfinished", "finished", "why"),
    [
        ([], 0, set(), "0 unfinished episodes of a group of 3, of which 3 are left"),
        (rollouts(), -1, set(), "-1 unfinished episodes of a group of 3, of which 0 are left"),
        (rollouts()[:1], 0, set(), "0 unfinished episodes of a group of 3, of which 2 are left"),
        (rollouts()[:1], 10**9, set(), "1000000000 unfinished"),
        (rollouts(), 0, {2}, "episode 2 of a group of 3, of which 1 were finished"),
        (rollouts(4), 0, set(), "episode 3 of a group of 3, of which 0 were finished"),
    ],
)
def test_episodes_are_those_that_were_ordered_and_each_once(played, unfinished, finished, why):
    assert why in judged(played, unfinished, finished)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'[{"content": "a"}]\n{"reward": 1}', "messages with the end of a line"),
        (b'[{"content": "a"}', "messages that are not JSON"),
        (b'{"content": "a"}', "messages that are not JSON"),
        (b'[{"content": "\xff"}]', "messages that are not JSON"),
        (b"[" * 100_000, "messages that are not JSON"),
    ],
)
def test_text_that_would_be_another_line_of_a_file_is_refused(text, why):
    """It is copied into rollouts/*.jsonl as it came."""
    assert (
        why in judged(rollouts(text=text))
        and judged(rollouts(text=b'[{"content": "a\\nb", "x": [{}]}]')) == ""
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reward": math.nan}, "rollout 2: the reward is nan, not a number of at most 1e+18"),
        ({"reward": 1e200}, "the reward is 1e+200"),
        ({"metrics": {"b": -math.inf}}, "metric 'b' is -inf"),
        ({"metrics": {"a\nb": 1.0}}, "'a\\nb' is not a valid name: 1 to 200 printable characters"),
        ({"metrics": {"": 1.0}}, "'' is not a valid name"),
        ({"agent": "x" * (MAX_NAME + 1)}, "is not a valid name"),
        ({"reward": math.nan, "error": "x"}, "the reward is nan"),
        (of(completion=[10, 3]), "token ids 1 to 10; the model's are 0 to 9"),
        (of(completion=[3, -5]), "token ids -5 to 3"),
        (of(prompt=[1] * 7), "9 tokens; model.max_model_len = 8"),
        (of(logprobs=[-1.0, math.nan]), "the log-probability nan"),
        (of(logprobs=[-1.0, -math.inf]), "the log-probability -inf"),
        (of(logprobs=[-1.0, 0.25]), "the log-probability 0.25"),
        (
            of(policy_versions=[VersionSpan(3, 1), VersionSpan(5, 1)]),
            "tokens of version 5; the newest is 4",
        ),
    ],
)
def test_nothing_gets_in_that_the_served_model_cannot_have_made(changes, why):
    assert why in judged(rollouts(**changes))


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.01])
def test_an_evaluation_trains_no_log_probability_and_does_not_mind_one(value):
    """Regression: a worker lets one through there, and the pool ended it for that again and
    again."""
    played = rollouts(turns=[turn(logprobs=[-1.0, value])])
    assert judged(played, split="eval") == "" and "the log-probability" in judged(played)
    assert "tokens of version 5" in judged(
        rollouts(turns=[turn(policy_versions=[VersionSpan(5, 2)])]), split="eval"
    )


def test_an_unknown_vocabulary_and_unknown_versions_are_no_limit():
    policy = PolicySpec(max_model_len=8)
    played = Played(7, rollouts(turns=[turn(completion=[3, 10**6])]))
    validate_played(played, PlayOrder(7, "train", 0, 3, {}, 0), policy, None)


def test_a_worker_of_ours_fails_such_a_rollout_itself():
    from rl.envs.worker import refuse_unfit

    huge, odd = (
        Rollout(reward=1e200, metrics={"a": 1.0}),
        Rollout(reward=1.0, agent="a\n", error="before", cause="timeout"),
    )
    refuse_unfit(huge)
    refuse_unfit(odd)
    assert (huge.cause, huge.error, huge.reward) == (
        "reward",
        "the reward is 1e+200, not a number of at most 1e+18",
        0.0,
    )
    assert (odd.cause, odd.error, odd.agent) == ("timeout", "before", "agent")
    assert unfit(huge) == unfit(odd) == ""


def test_a_worker_that_lies_is_ended_and_its_group_given_up_after_three(tmp_path, monkeypatch):
    """Regression: when any number was believed, the run waited forever for the rest of the
    group."""
    monkeypatch.setattr("rl.orchestrator.workers.pool.RESTART_S", 0.05)

    async def work(pool):
        return await light_worker.play(pool, 0, 3), pool.rejected.count

    played, count = light_worker.run(tmp_path, monkeypatch, work, lies=True)
    assert [rollout.cause for rollout in played] == ["worker"] * 3 and count >= 3
    assert "it sent an invalid message (-1 unfinished episodes" in played[0].error
