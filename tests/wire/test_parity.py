"""The limits, and the reported likely cause of a disagreement."""

import math
import random

import pytest

from rl.wire.parity import (
    LIMITS,
    ScoredToken,
    likely_cause,
    parity_of,
    parity_warning,
)

EXACT, ROUNDED = LIMITS["float32"], LIMITS["bfloat16"]


def tokens(difference, temperature=1.0, positions=range(50)):
    """Differences of alternating sign."""
    return [
        ScoredToken(position, temperature, difference * (-1) ** position) for position in positions
    ]


def test_literal_numbers():
    found = parity_of([0.1, -0.2, 0.0])
    kls = [math.exp(0.1) - 1.1, math.exp(-0.2) - 0.8, 0.0]
    assert found.tokens == 3 and found.largest == 0.2
    assert found.mean == pytest.approx(0.1) and found.kl == pytest.approx(sum(kls) / 3)
    assert found.kl_error == pytest.approx(0.0055849, abs=1e-6)  # stdev(kls) / sqrt(3)


def test_one_token_and_infinite_differences_are_numbers():
    assert parity_of([0.0]).kl_error == 0.0
    assert math.isfinite(parity_of([1e9, -math.inf]).kl)


@pytest.mark.parametrize(
    ("difference", "limit", "within"),
    [
        (1e-5, EXACT, True),
        (2e-4, EXACT, False),
        (0.035, ROUNDED, True),
        (0.1, ROUNDED, False),
        (0.5, ROUNDED, False),
    ],
)
def test_limits(difference, limit, within):
    assert (
        parity_of([token.difference for token in tokens(difference, positions=range(400))]).within(
            limit
        )
        == within
    )


def test_few_noisy_tokens_are_not_held_against_it():
    """Log-normal differences with KL 1.6e-3: a mean over eight tokens may exceed 2e-3, and must
    not be reported as a fault."""
    rng = random.Random(0)
    faults = sum(
        not parity_of([rng.gauss(0, 0.056) for _ in range(8)]).within(ROUNDED) for _ in range(500)
    )
    assert faults == 0
    assert not parity_of([rng.gauss(0, 0.15) for _ in range(200)]).within(ROUNDED)


def test_the_tail_of_rounding_is_no_fault_but_a_wrong_expert_or_token_is():
    """Of 2,551 tokens of a Qwen3-MoE in float32 seven had more than 1e-4 nats by rounding alone."""
    rounding = [1e-5] * 2544 + [1.7e-4] * 7
    edges = [0.04] * 2 + [1e-5] * 2549  # as of a router near a tie, or at the ends of blocks
    expert = [3e-3] * 300 + [1e-5] * 2251  # chosen at every eighth token
    assert parity_of(rounding).within(EXACT)
    assert parity_of(edges).mean < EXACT.mean and not parity_of(edges).within(EXACT)
    wrong = parity_of(expert)
    assert wrong.kl < EXACT.kl and not wrong.within(EXACT)
    assert wrong.complaint(EXACT).startswith(
        "trainer and inference disagree on 2551 tokens of the same policy version: kl 5.3e-07, "
        "difference 0.00036 nats on average, 0.003 at most (limits: kl 1e-06, mean |d| 0.0001, "
        "max |d| 0.01); "
    )


def test_causes():
    limit = EXACT
    good, bad = tokens(1e-6), tokens(0.2)
    assert "temperature" in likely_cause(good + tokens(0.2, 0.7), limit, None)
    late = tokens(1e-6, positions=range(64)) + tokens(0.2, positions=range(64, 200))
    assert "from 64 on differ: the sliding window" in likely_cause(late, limit, 64)
    assert "positions are computed differently" in likely_cause(
        tokens(1e-6, positions=range(100)) + bad_from(100), limit, None
    )
    assert "the weights differ" in likely_cause(tokens(2.0) + tokens(2.0, 0.7), limit, None)
    assert "different arithmetic" in likely_cause(bad + tokens(0.2, 0.7), limit, None)


def bad_from(start):
    return tokens(0.2, positions=range(start, 2 * start))


def test_that_nothing_is_compared_is_told_from_the_first_checkpoint_on():
    """It was told after three, so a run with fewer said nothing."""
    said = [
        parity_warning({"parity/unjudged": float(count)}, LIMITS["float32"]) for count in range(6)
    ]
    assert [bool(text) for text in said] == [False, True, True, False, True, False]
    assert "trainer and inference were not compared before this checkpoint, so" in said[1]
    assert "a lower max_lag" in said[1]
    assert "trainer and inference were not compared before the last 4 checkpoints, so" in said[4]
    line = {
        "parity/agrees": 0.0,
        "parity/tokens": 64.0,
        "parity/mean": 0.1,
        "parity/max": 0.7,
        "parity/kl": 0.02,
    }
    assert parity_warning(line, LIMITS["float32"]).startswith(
        "trainer and inference disagree on 64 tokens"
    )
    assert parity_warning(line | {"parity/agrees": 1.0}, LIMITS["float32"]) == ""
