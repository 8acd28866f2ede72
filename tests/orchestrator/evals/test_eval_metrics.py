"""The statistics of evaluations, with numbers worked out by hand."""

import json
import math

import pytest

from rl.orchestrator.evals.eval_metrics import (
    difference,
    episodes,
    eval_metrics,
    example_rewards,
    pass_at_k,
    write_eval,
)
from rl.wire.rollouts import Rollout


def rollouts(*rewards, **fields):
    return [
        Rollout(reward=reward, episode=i, completion_tokens=10, **fields)
        for i, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (4, 2, 2, 5 / 6),  # 1 - 1 / 6
        (4, 3, 2, 1.0),  # two of which both fail cannot be drawn
        (10, 3, 5, 1 - 21 / 252),
        (4, 1, 4, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_a_perfect_sum_passes():
    assert eval_metrics("e", [(0, rollouts(0.7 + 0.2 + 0.1, 0.999))])["eval/e/pass@1"] == 0.5


def test_numbers_of_an_evaluation():
    metrics = eval_metrics(
        "e",
        [
            (0, rollouts(1.0, 0.0, 0.0, 0.0)),
            (1, rollouts(1.0, 1.0, 0.0, 0.5)),
            (7, rollouts(0, 0, 0, 0)),
        ],
    )
    expected = {
        "eval/e/reward_mean": 0.875 / 3,  # of 0.25, 0.625 and 0
        "eval/e/reward_mean_stderr": math.sqrt(19) / 24,
        "eval/e/avg@4": 0.875 / 3,
        "eval/e/pass@1": 0.25,  # of 1/4, 2/4, 0
        "eval/e/pass@1_stderr": 0.25 / math.sqrt(3),
        "eval/e/pass@2": 4 / 9,  # of 1/2, 5/6, 0
        "eval/e/pass@2_stderr": 0.24216105,
        "eval/e/pass@4": 2 / 3,
        "eval/e/pass@4_stderr": 1 / 3,
        "eval/e/length_mean": 10.0,
        "eval/e/errored": 0.0,
        "eval/e/truncated": 0.0,
    }
    assert set(metrics) == set(expected)
    assert metrics == pytest.approx(expected)


def test_a_failed_rollout_is_a_reward_of_zero_and_is_counted():
    failed = Rollout(reward=1.0, episode=1, error="boom", cause="environment", metrics={"m": 9.0})
    results = [
        (0, [*rollouts(1.0, metrics={"m": 1.0}), failed]),
        (1, rollouts(1.0, 0.0, truncated=True, metrics={"m": 2.0})),
    ]
    metrics = eval_metrics("e", results)
    assert metrics["eval/e/reward_mean"] == 0.5
    assert metrics["eval/e/pass@2"] == 1.0
    assert metrics["eval/e/pass@1"] == 0.5
    assert metrics["eval/e/errored"] == 0.25 and metrics["eval/e/truncated"] == 0.5
    assert metrics["eval/e/m"] == pytest.approx(5 / 3) and metrics["eval/e/length_mean"] == 7.5


def test_one_example_has_no_standard_error_and_an_endpoint_that_does_not_say_it_no_length():
    metrics = eval_metrics("e", [(0, [Rollout(reward=0.5)])])
    assert metrics["eval/e/reward_mean"] == 0.5
    assert not any(name.endswith(("_stderr", "length_mean")) for name in metrics)


def test_an_episode_of_several_agents_counts_once():
    group = [
        Rollout(reward=1.0, episode=0, agent="a"),
        Rollout(reward=0.5, episode=0, agent="b"),
        Rollout(reward=-9.0, episode=0, agent="judge", trainable=False),
        Rollout(reward=1.0, episode=1, agent="a"),
        Rollout(reward=1.0, episode=1, agent="b", error="boom"),
        Rollout(reward=0.25, episode=2, agent="judge", trainable=False),
    ]
    assert [tuple(play) for play in episodes(group)] == [(0.75, False), (0.5, True), (0.25, False)]
    metrics = eval_metrics("e", [(0, group)])
    assert metrics["eval/e/avg@3"] == 0.5
    assert metrics["eval/e/errored"] == pytest.approx(1 / 3)
    assert metrics["eval/e/pass@1"] == 0.0


def test_each_agent_has_its_own_mean():
    """In a zero-sum game the mean over both is 0 whoever wins."""

    def game(won, **fields):
        return [Rollout(reward=won, agent="first"), Rollout(reward=-won, agent="second", **fields)]

    metrics = eval_metrics(
        "duel", [(0, game(1.0)), (1, game(1.0)), (2, game(-1.0)), (3, game(-1.0, error="boom"))]
    )
    assert metrics["eval/duel/agent_first"] == 0.0 and metrics[
        "eval/duel/agent_first_stderr"
    ] == pytest.approx(math.sqrt(1 / 3))
    assert metrics["eval/duel/agent_second"] == -0.25  # of -1, -1, 1, and 0 for the one that failed
    assert not [name for name in eval_metrics("e", [(0, rollouts(1.0))]) if "agent" in name]


def test_difference_is_paired():
    # The two differ by 0.5 on every example, however much the examples differ: no doubt about it.
    ours, theirs = {0: 0.5, 1: 1.0, 2: 0.75}, {0: 0.0, 1: 0.5, 2: 0.25}
    assert difference(ours, theirs, seed=0) == (0.5, 0.5, 0.5, 3)
    assert difference({0: 1.0, 5: 0.0}, {0: 0.0, 6: 1.0}, seed=0) == (1.0, 1.0, 1.0, 1)


def test_interval_of_a_difference_is_that_of_a_mean():
    # 100 differences of +1 and 300 of 0: mean 0.25, standard error sqrt(0.25 * 0.75 / 400) =
    # 0.02165, so about 0.25 -+ 0.0424.
    ours = {task: float(task < 100) for task in range(400)}
    found = difference(ours, dict.fromkeys(range(400), 0.0), seed=3)
    assert found.mean == 0.25
    assert found.low == pytest.approx(0.2076, abs=0.005)
    assert found.high == pytest.approx(0.2924, abs=0.005)
    assert found == difference(ours, dict.fromkeys(range(400), 0.0), seed=3)
    assert found != difference(ours, dict.fromkeys(range(400), 0.0), seed=4)


def test_what_is_written(tmp_path):
    failed = Rollout(episode=1, error="boom", cause="timeout", stop="error")
    said = [{"role": "assistant", "content": "2"}]
    results = [
        (
            4,
            [
                Rollout(
                    reward=1.0, text=said, metrics={"m": 2.0}, stop="max_turns", completion_tokens=3
                ),
                failed,
            ],
        )
    ]
    path = tmp_path / "evals" / "000007" / "e.jsonl"
    write_eval(path, 7, "e", results)
    first, second = map(json.loads, path.read_bytes().splitlines())
    assert first == {
        "policy_version": 7,
        "env": "e",
        "task": 4,
        "rollout": 0,
        "agent": "agent",
        "messages": said,
        "reward": 1.0,
        "metrics": {"m": 2.0},
        "outcome": "finished",
        "stop": "max_turns",
        "truncated": False,
        "num_tokens": 3,
        "num_turns": 0,
        "versions": [],
    }
    assert (second["rollout"], second["outcome"], second["error"], second["reward"]) == (
        1,
        "timeout",
        "boom",
        None,
    )
    assert example_rewards(results) == {4: 0.5}
