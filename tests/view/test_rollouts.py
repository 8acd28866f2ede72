"""The sentence that says why a rollout was trained or not."""

import pytest

from rl.orchestrator.groups.group_credit import Rules, credit_group
from rl.records.run import Run
from rl.view.rollouts import explanation, row_of
from rl.wire.rollouts import Group
from tests.records.made import make_run, rollout, write_step


def explained(place, groups, **settings):
    """The explanations of all rollouts of the groups, which step 1 settles."""
    run_dir = make_run(place / "run", **settings)
    write_step(run_dir, 1, groups)
    run = Run(run_dir.root)
    of_group = [
        [row_of(one) for one in run.rollouts(group_id=group.group_id).sorted("rollout_id")]
        for group in groups
    ]
    return [explanation(row, rows, run) for rows in of_group for row in rows]


def of_agents(group_id, *rewards, trainable=("solver", "rival")):
    """A judged group of two episodes with a solver, a rival and a judge each; their rewards in
    this order."""
    agents = ["solver", "rival", "judge"] * 2
    rollouts = [
        rollout(reward, episode=i // 3, agent=agent, trainable=agent in trainable)
        for i, (agent, reward) in enumerate(zip(agents, rewards, strict=True))
    ]
    return credit_group(Group(group_id=group_id, env="sums", task=0, rollouts=rollouts), Rules())


def test_a_reward_is_set_beside_those_that_credit_compared_it_with(tmp_path):
    """Regression: the mean was over all agents, so that the better of two solvers was said to be
    below it."""
    mixed = of_agents(1, 0.0, 8.0, 9.0, 1.0, 6.0, 9.0)
    equal = of_agents(2, 1.0, 5.0, 9.0, 1.0, 5.0, 7.0)
    said = explained(tmp_path, [mixed, equal])
    for place, advantage, side, agent in (
        (0, "-0.500", "below", "solver in its group, 0.500"),
        (3, "+0.500", "above", "solver in its group, 0.500"),
        (4, "-1.000", "below", "rival in its group, 7.000"),
    ):
        trained = f"Trained in step 1 with advantage {advantage}: its reward is {side} the mean of"
        assert said[place] == f"{trained} agent {agent}."
    assert said[2] == "Not trained: its agent is not trained."
    for place, agent in ((6, "solver in its group are 1"), (7, "rival in its group are 5")):
        words = f"Not trained: all 2 rewards of agent {agent}, so no answer was better"
        assert said[place].startswith(words)


@pytest.mark.parametrize(
    "max_lag, reason",
    [
        (0, "with max_lag = 0 a batch has tokens of the newest version only"),
        (1, "it is older than orchestrator.max_off_policy_steps allows"),
    ],
)
def test_the_setting_that_made_a_rollout_stale_is_named(tmp_path, max_lag, reason):
    """Regression: on-policy, max_off_policy_steps was named, which has no effect there."""
    old = of_agents(1, 0.0, 8.0, 9.0, 1.0, 6.0, 9.0)
    old.why = "stale"
    assert explained(tmp_path, [old], max_lag=max_lag)[0].startswith(f"Not trained: {reason}")
