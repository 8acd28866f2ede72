"""Every kind of credit: comparison with float64 NumPy, and properties that must hold for any
rewards."""

import numpy as np
import pytest

from rl.config.orchestrator import (
    DrGrpoConfig,
    GrpoConfig,
    MaxRlConfig,
    NoCreditConfig,
    ReinforcePlusPlusConfig,
    RlooConfig,
)
from rl.orchestrator.groups.credit import (
    group_advantages,
    length_penalties,
    max_rl,
    reinforce_pp,
)

KINDS = [
    DrGrpoConfig(),
    GrpoConfig(),
    RlooConfig(),
    MaxRlConfig(),
    ReinforcePlusPlusConfig(group_baseline=True),
]


def random_groups(number=200):
    generator = np.random.default_rng(0)
    for i in range(number):
        n = int(generator.integers(2, 17))
        rewards = generator.normal(size=n) if i % 2 else generator.integers(0, 3, size=n) / 2
        yield rewards.tolist()


def test_what_has_no_spread_and_what_has_no_mean():
    assert max_rl([1.0, -2.0]) == [0.0, 0.0]  # no mean to divide by
    assert group_advantages([1.0, 0.0], NoCreditConfig()) == [0.0, 0.0]
    assert reinforce_pp([[0.1] * 3, [0.1] * 5], False) == [[0.0] * 3, [0.0] * 5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rewards",
    [
        *([0.7 + 0.2 + 0.1, 1.0], [0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2 - 0.3, 0.0]),
        *([0.1], [1 / 3] * 7, [1e-17] * 2, [-0.7] * 7),
    ],
)
def test_the_rounding_of_sums_is_no_signal(kind, rewards):
    """0.7 + 0.2 + 0.1 is 0.9999999999999999: GRPO made advantages of it that passed for signal."""
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)


def test_float64_numpy_agrees():
    for rewards in random_groups():
        r = np.array(rewards)
        n, equal = len(r), np.ptp(r) == 0
        wanted = {
            "dr_grpo": r - r.mean(),
            "grpo": (r - r.mean()) / (np.std(r, ddof=1) + 1e-4),
            "rloo": np.array([r[i] - np.delete(r, i).mean() for i in range(n)]),
            "max_rl": (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r,
            "reinforce_pp": r - r.mean(),
        }
        for config in KINDS:
            np.testing.assert_allclose(
                group_advantages(rewards, config),
                0 * r if equal else wanted[config.type],
                rtol=1e-9,
                atol=1e-12,
            )
    groups = list(random_groups(20))
    for group_baseline in (False, True):
        based = [np.array(group) - (np.mean(group) if group_baseline else 0.0) for group in groups]
        b = np.concatenate(based)
        wanted = (b - b.mean()) / (np.std(b, ddof=1) + 1e-8)
        np.testing.assert_allclose(
            np.concatenate(reinforce_pp(groups, group_baseline)), wanted, rtol=1e-9, atol=1e-12
        )


def test_length_penalty():
    assert length_penalties([1.0, 1.0, 0.0, 0.0], [10, 40, 20, 0], 0.2) == [
        0.2 * 0.5 * 0.25,
        0.2 * 0.5,
        0.2 * 0.5 * 0.5,
        0.0,
    ]
    assert length_penalties([3.0, 5.0], [1, 2], 0.1) == [0.05, 0.1]  # the pass rate is at most 1
    assert length_penalties([0.0, -1.0], [1, 2], 0.1) == [0.0, 0.0]  # short failures gain nothing
    assert (
        length_penalties([1.0, 0.0], [1, 2], 0.0)
        == [0.0, 0.0]
        == length_penalties([1.0, 0.0], [0, 0], 0.5)
    )
