import pytest

from tests.environments.playing import check_splits, load, play

ANSWERS = ["bird, lemon, tree", "apple, bird, lemon, tree"]
INFO = {"later": ["Add these and sort: apple"], "answers": ANSWERS}


def test_every_turn_is_graded():
    env = load("sort-words")
    row = env.get_dataset().to_list()[0] | {"info": INFO}
    for replies, reward, exact, last in [
        (ANSWERS, 1.0, 1.0, 1.0),
        (["Bird, Lemon, Tree", "- apple\n- bird\n- lemon\n- tree"], 1.0, 1.0, 1.0),
        (["bird, tree, lemon", ANSWERS[1]], (4 / 6 + 1) / 2, 0.5, 1.0),
        ([ANSWERS[0], "apple, bird, lemon"], (1 + 6 / 7) / 2, 0.5, 6 / 7),
        ([ANSWERS[0], "apple, bird, lemon, tree, zoo"], (1 + 8 / 9) / 2, 0.5, 8 / 9),
        (["", ""], 0.0, 0.0, 0.0),
    ]:
        output, client = play(env, row, *replies)
        assert output["reward"] == pytest.approx(reward), replies
        assert output["metrics"]["share_exact"] == exact
        assert output["metrics"]["last_turn"] == pytest.approx(last)
        assert output["stop_condition"] == "max_turns_reached" and len(output["trajectory"]) == 2
        assert client.prompts[1][-1] == {"role": "user", "content": INFO["later"][0]}


@pytest.mark.parametrize("kind", ["words", "numbers"])
def test_three_turns_bring_everything_together(kind):
    env = load("sort-words", kind=kind, num_turns=3, items_per_turn=4, count=20, eval_count=4)
    row = env.get_dataset().to_list()[0]
    asked = [row["prompt"][-1]["content"], *row["info"]["later"]]
    items = [item for question in asked for item in question.split(": ")[1].split(", ")]
    assert len(items) == 12
    assert row["info"]["answers"][-1].split(", ") == sorted(
        items, key=int if kind == "numbers" else str
    )
    output, _ = play(env, row, *row["info"]["answers"])
    assert output["reward"] == 1.0 and len(output["trajectory"]) == 3


def test_splits():
    check_splits("sort-words")
    check_splits("sort-words", kind="numbers", num_turns=1)
    with pytest.raises(RuntimeError, match="use one of words, numbers"):
        load("sort-words", kind="letters")
