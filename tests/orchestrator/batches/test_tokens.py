"""Tokens of settled groups: what was sampled is trained, or dropped for a reason."""

import pytest

from rl.orchestrator.batches.contents import group_samples, token_metrics
from rl.wire.rollouts import Group, Rollout
from rl.wire.turns import Turns
from tests.orchestrator.made import turn


def group(why=None, *rollouts):
    """Returns a group with one rollout of 2 turns, 3 + 5 tokens of prompts, of which 1 + 4 were
    cached, and 2 + 1 sampled ones."""
    played = Rollout(
        turns=[
            turn([1, 2, 3], [4, 5], num_cached=1),
            turn([1, 2, 3, 4, 5], [6], num_cached=4),
        ]
    )
    every = [played, *rollouts]
    return Group(
        group_id=0, env="e", task=0, rollouts=every, advantages=[1.0] * len(every), why=why
    )


def test_what_was_sampled_is_trained_or_dropped_for_a_reason():
    groups = [
        group(),
        group("no_signal"),
        group("stale"),
        group("surplus"),
        group("filtered"),
        # a failure of its own, the answer of another agent, and one that is cut off
        group(
            None,
            Rollout(turns=[turn([1], [2] * 7)], error="it raised", cause="reward"),
            Rollout(turns=[turn([1], [2] * 11)], trainable=False),
            Rollout(
                turns=[turn([1], [2] * 13)],
                truncated=True,
                retried={"prefilled": 10, "cached": 20, "sampled": 30},
            ),
            Rollout(overlong=True),
        ),
    ]
    metrics = token_metrics(groups, mask_truncated=True)
    assert metrics == {
        "tokens/prefilled": 6 * 3 + 3 + 10,
        "tokens/cached": 6 * 5 + 20,
        "tokens/sampled": 6 * 3 + 7 + 11 + 13 + 30,
        "tokens/dropped_no_signal": 3,
        "tokens/dropped_stale": 3,
        "tokens/dropped_surplus": 3,
        "tokens/dropped_filtered": 3,
        "tokens/dropped_reward": 7,
        "tokens/dropped_not_trainable": 11,
        "tokens/dropped_truncated": 13,
        "tokens/dropped_retried": 30,
    }
    trained = [
        sample for played in (groups[0], groups[-1]) for sample in group_samples(played, True)
    ]
    dropped = sum(count for name, count in metrics.items() if "dropped" in name)
    assert sum(sample.num_trained for sample in trained) == metrics["tokens/sampled"] - dropped == 6


def test_no_more_of_a_prompt_is_cached_than_it_has():
    turns = Turns.of([turn([1, 2], [3], num_cached=2)])
    assert turns.usage == {"prefilled": 0, "cached": 2, "sampled": 1}
    assert turns[0].num_cached == 2
    for wrong in (-1, 3):
        turns.answers[0].num_cached = wrong
        with pytest.raises(ValueError, match="more tokens of a prompt were cached than it has"):
            Turns(turns.chains, turns.answers)
