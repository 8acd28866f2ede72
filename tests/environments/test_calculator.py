import json

import pytest

from tests.environments.playing import call, check_splits, load, on_path, play


@pytest.fixture(scope="module")
def env():
    return load("calculator")


@pytest.fixture
def row(env):
    return env.get_dataset().to_list()[0] | {
        "prompt": [{"role": "user", "content": "What is 47 * 38?"}],
        "answer": "1786",
    }


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([call({"expression": "47 * 38"}), "1786"], 1.0),
        ([call({"expression": "47*38"}), "The result is 1786."], 1.0),
        ([call({"expression": "47 * 38"}), "1785"], 0.5),
        ([call({"expression": "47 + 38"}), "85"], 0.2),
        ([call({"expression": "47 + 38"}), call({"expression": "47 * 38"}), "1786"], 1.0),
        ([call({"expression": "1786"}), "1786"], 0.7),  # calculated without the tool
        (["1786"], 0.0),  # never called
        ([call({"expression": "hello"}), "1786"], 0.0),
        ([call({"expr": "47 * 38"}), "1786"], 0.0),
        ([call({"expression": 1786}), "1786"], 0.0),
        ([call("{not json"), "1786"], 0.0),
        ([call("[1]"), "1786"], 0.0),
        ([call({"expression": "47 * 38"}, name="calc"), "1786"], 0.0),
        ([call({"expression": "47 * 38"})] * 3, 0.5),  # never answered
    ],
)
def test_calls_and_answers_are_graded(env, row, answers, reward):
    output, _ = play(env, row, *answers)
    assert output["reward"] == pytest.approx(reward)


def test_the_tool():
    on_path("calculator")
    from calculator import calculate

    for expression, value in {
        "12 * 7": "84",
        "-(3 - 5)": "2",
        "84 / 2": "42",
        "7 / 2": "3.5",
        "7 // 2 + 7 % 4": "6",
        "1e3": "1000",
    }.items():
        assert calculate(expression) == value
    for bad in [
        "2 ** 99",
        "__import__('os')",
        "x",
        "1 / 0",
        "(",
        "",
        "'a' * 9",
        "True + 1",
        "1 if 1 else 2",
        "1" * 101,
        "[1]",
        "~1",
        "\0",
    ]:
        with pytest.raises(ValueError, match=r"only numbers|cannot be calculated|longer than"):
            calculate(bad)


def test_solved_examples_are_turns_of_the_prompt(env):
    prompt = env.get_dataset().to_list()[0]["prompt"]
    roles = " ".join(message["role"] for message in prompt)
    assert roles == "system" + " user assistant tool assistant" * 3 + " user"
    shown = json.loads(prompt[2]["tool_calls"][0]["arguments"])["expression"]
    assert prompt[1]["content"] == f"What is {shown}?"
    assert prompt[3]["content"] == prompt[4]["content"]
    assert prompt[2]["tool_calls"][0]["id"] == prompt[3]["tool_call_id"]
    assert len(load("calculator", examples=0).get_dataset().to_list()[0]["prompt"]) == 2


def test_splits_and_difficulty():
    check_splits("calculator")
    check_splits("calculator", operators="+", max_operand=20)
    row = (
        load("calculator", operators="-", terms=3, count=5, eval_count=2).get_dataset().to_list()[0]
    )
    assert row["prompt"][-1]["content"].count("-") == 2
    for args, message in [
        ({"operators": "/"}, "use some of"),
        ({"max_operand": 3}, "different questions were found"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            load("calculator", **args)
