import pytest

from rl.orchestrator.advantage import group_mean


def test_group_mean():
    assert group_mean([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_mean([2.0, 0.5]) == [0.75, -0.75]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-17])
def test_equal_rewards_give_exactly_zero(reward):
    assert group_mean([reward] * 7) == [0.0] * 7
