import pytest

from tests.environments.playing import check_splits, load, play, prompts_of


def test_a_reply_is_scored_by_its_likeness():
    env = load("reverse-text")
    row = env.get_dataset().to_list()[0] | {"answer": "revir"}
    for reply, likeness, exact in [
        ("revir", 1.0, 1.0),
        (" Revir\n", 1.0, 1.0),
        ("river", 0.6, 0.0),  # "rir", of five and five characters
        ("revi", 8 / 9, 0.0),
        ("The answer is revir", 10 / 24, 0.0),
        ("", 0.0, 0.0),
        ("zzz", 0.0, 0.0),
    ]:
        output, _ = play(env, row, reply)
        assert output["reward"] == pytest.approx(likeness), reply
        assert output["metrics"]["exact"] == exact


def test_the_answer_is_the_text_reversed_after_solved_examples():
    row = load("reverse-text").get_dataset().to_list()[0]
    assert row["prompt"][-1]["content"].endswith(" " + row["answer"][::-1])
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * 3 + ["user"]
    assert row["prompt"][1]["content"] == "bat"
    (alone,) = load("reverse-text", examples=0).get_dataset().to_list()[0]["prompt"]
    assert alone == row["prompt"][-1]


def test_splits_and_lengths():
    check_splits("reverse-text")
    env = load("reverse-text", min_length=10, max_length=14, count=50, eval_count=5)
    rows = env.get_dataset().to_list()
    assert len(rows) == 50 and all(10 <= len(row["answer"]) <= 14 for row in rows)
    fewer = load("reverse-text", min_length=10, max_length=14, count=3, eval_count=5)
    assert prompts_of(fewer.get_eval_dataset().to_list()) == prompts_of(
        env.get_eval_dataset().to_list()
    )


def test_more_words_are_for_training_alone():
    few, many = (
        load("reverse-text", more_words=more, count=count)
        for more, count in ((False, 120), (True, 1600))
    )
    held_out = prompts_of(few.get_eval_dataset().to_list())
    assert prompts_of(many.get_eval_dataset().to_list()) == held_out
    training = {*prompts_of(many.get_dataset().to_list())}
    assert len(training) == 1600 and training.isdisjoint(held_out)
