import pytest

from tests.environments.playing import load, play


@pytest.mark.parametrize(
    ("replies", "reward", "found", "allowed"),
    [
        (["14"], 1.0, 1.0, 1.0),
        (["16", "My guess is 8.", "12", "14"], 1.0, 1.0, 1.0),
        (["16", "24", "8", "14"], 0.6 + 0.4 * 3 / 4, 1.0, 3 / 4),  # 24 after "lower"
        (["16"] * 7, 0.4 / 7, 0.0, 1 / 7),  # the same again is not allowed
        (["1", "2", "3", "4", "5", "6", "7"], 0.4, 0.0, 1.0),
        # -3 is read as 3
        (["no", "", "100", "-3", "13", "15", "14"], 0.6 + 0.4 * 4 / 7, 1.0, 4 / 7),
    ],
)
def test_the_answers_must_be_used(replies, reward, found, allowed):
    env = load("guess-number")
    row = env.get_dataset().to_list()[0] | {"info": {"number": 14, "most": 31}}
    output, client = play(env, row, *replies)
    assert output["reward"] == pytest.approx(reward)
    assert output["metrics"]["found"] == found
    assert output["metrics"]["allowed"] == pytest.approx(allowed)
    assert len(output["trajectory"]) == len(replies) == output["metrics"]["num_guesses"]
    said = [prompt[-1]["content"] for prompt in client.prompts]
    assert said[0] == "I think of a number from 1 to 31. You have 7 guesses. Say one number."
    assert set(said[1:]) <= {"higher", "lower", "Say one number."}


def numbers(**args):
    """Of training, and of evaluation: prompts do not say them."""
    env = load("guess-number", **args)
    return [
        [row["info"]["number"] for row in data.to_list()]
        for data in (env.get_dataset(), env.get_eval_dataset())
    ]


def test_splits():
    train, held_out = numbers()
    assert len(held_out) == 8 and sorted(train + held_out) == list(range(1, 32))
    assert not {16, 8, 12, 14} & {*held_out}, "they are in the prompt's game"
    assert numbers() == [train, held_out] and numbers(seed=1)[1] != held_out
    with pytest.raises(RuntimeError, match="most must be at least 31"):
        load("guess-number", most=10)
    with pytest.raises(RuntimeError, match="max_guesses 4"):
        load("guess-number", max_guesses=3)
