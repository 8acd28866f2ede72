import re

import pytest

from tests.environments.playing import load, play, prompts_of

EASY = {"task": "gcd", "max_value": 20, "count": 30, "eval_count": 10}


def test_scored_by_reasoning_gyms_own_verifier():
    env = load("reasoning-tasks", **EASY)
    row = env.get_dataset().to_list()[3]
    for reply, score in [
        (row["answer"], 1.0),
        (f" {row['answer']}\n", 1.0),
        (str(int(row["answer"]) + 1), 0.0),
        ("", 0.0),
    ]:
        output, _ = play(env, row, reply)
        assert output["reward"] == pytest.approx(score, abs=0.05)
        assert output["metrics"]["exact"] == float(score == 1.0)


def test_a_task_that_repeats_itself_has_no_held_out_question_in_training():
    """Of 40 held-out pairs up to 20, 30 were in the training set, and 2 more in the other order."""
    env = load("reasoning-tasks", task="gcd", max_value=20, any_order=True, shots=5, count=150)
    train, held_out = env.get_dataset().to_list(), env.get_eval_dataset().to_list()
    shown = [message["content"] for message in train[0]["prompt"][1:-1:2]]
    texts = [*prompts_of(train), *prompts_of(held_out), *shown]
    pairs = [frozenset(re.findall(r"\d+", text)) for text in texts]
    assert len(set(pairs)) == len(pairs) == 195
    with pytest.raises(
        RuntimeError,
        match=r"gcd with .* has 2\d\d different questions, and 443 are needed .*lower count",
    ):
        load("reasoning-tasks", task="gcd", max_value=20, any_order=True)
    rows = load("reasoning-tasks", task="ab").get_dataset().to_list()
    assert len({*prompts_of(rows)}) == 400, "the same words in another order are another question"
