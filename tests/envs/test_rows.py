"""Environments out of rows and a reward function, and every way in which a user can get them wrong."""

import json

import datasets
import pytest
from huggingface_hub import constants

from rl.envs.classic.rows import read
from rl.envs.load import load
from rl.system.errors import RunError
from rl.wire.worker_messages import EnvSpec
from tests.envs.stub_policy import StubPolicy, played

REWARDS = """
from beside import half

def exact(completion, answer) -> float:
    return half(completion[-1]["content"] == answer)

def level(info, difficulty):
    return info["level"] + difficulty

def longest(completions) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]

def asks(completion, reference):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("def half(value):\n    return 0.5 * value\n")
    write(tmp_path / "rows.jsonl", [{"question": f"say {i}", "answer": str(i), "info": {"level": i}, "difficulty": 0.5} for i in range(3)])
    return tmp_path


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def made(reward="my_rewards.py:exact", dataset="rows.jsonl", reply="1", **spec):
    return load(EnvSpec(name="rows", dataset=dataset, reward=reward, **spec), StubPolicy(lambda prompt: reply))


def test_rows_are_played(folder):
    env = made(system_prompt="Digits.")
    assert (env.kind, env.num_tasks("train"), env.num_tasks("eval")) == ("classic SingleTurnEnv", 3, 3)
    (rollout,) = played(env, task=1)
    assert rollout.reward == 0.5 and [message["content"] for message in rollout.messages] == ["Digits.", "say 1", "1"]
    assert env.describe()["reward functions"] == {"exact": 1.0}
    task = env.task("train", 2)
    assert task["info"] == {"level": 2} and task["difficulty"] == 0.5 and task["prompt"][0]["content"] == "Digits."


def test_columns_and_info_reach_the_function_and_groups_are_scored(folder):
    assert played(made("my_rewards.py:level"), task=2)[0].reward == 2.5
    env = made("my_rewards:longest", reply="abc")
    assert env.scores_groups and [rollout.reward for rollout in played(env, num_episodes=2)] == [3.0, 3.0]


def test_prompts_of_every_kind_and_rows_of_their_own_for_evaluation(folder):
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "a"}]
    tools = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    write(
        folder / "mixed.jsonl", [{"prompt": "text", "answer": "1"}, "", {"prompt": chat, "more": 1}, {"prompt": tools, "info": {"x": [1]}}]
    )
    env = made(dataset="rows.jsonl", eval_dataset="mixed.jsonl", system_prompt="Given.")
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (3, 3)
    prompts = [[message["content"] for message in env.task("eval", i)["prompt"]] for i in range(3)]
    assert prompts == [["Given.", "text"], ["Own.", "a"], ["Given.", "b", "c", "d"]]
    assert env.task("eval", 2)["info"] == {"x": [1]} and env.task("eval", 1)["more"] == 1


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["[" * 9999], r"bad\.jsonl:1: not JSON \(maximum recursion depth"),
        (["{"], r"bad\.jsonl:1: not JSON \(Expecting property name .*\); write one object a line, like"),
        ([{"prompt": "a"}, "", "[1]"], r"bad\.jsonl:3: a list; write one object a line"),
        ([{"prompt": "a"}, {"text": "b"}], r"bad\.jsonl:2: no prompt or question, only text"),
        ([{"prompt": 3}], r"bad\.jsonl:1: the prompt is neither text nor a list of messages"),
        ([{"prompt": [{"content": "a"}]}], r"bad\.jsonl:1: the prompt is neither text nor"),
        (
            [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": "x"}],
            r"bad\.jsonl:2: answer is a text, but a number in .*bad\.jsonl:1",
        ),
        ([{"prompt": "a", "x": [1]}, {"prompt": "a", "x": ["b"]}], r"bad\.jsonl raised ArrowInvalid.*one type per column"),
        ([{"prompt": "a", "task": "t"}], r"bad\.jsonl:1: verifiers reserves the column `task` for itself"),
        ([], r"bad\.jsonl has no rows; write one JSON object per line"),
    ],
)
def test_faults_of_rows_name_the_line(folder, rows, text):
    write(folder / "bad.jsonl", rows)
    with pytest.raises(RunError, match=text):
        made(dataset="bad.jsonl")


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (
            "my_rewards.py:exakt",
            r"reward my_rewards\.py:exakt names no function: .*my_rewards\.py has no function exakt; did you mean exact\?",
        ),
        ("my_rewards.py:asks", r"asks for reference, which is not a column of rows\.jsonl; it can ask for answer, completion, difficulty"),
        ("broken.py:f", r"raised ZeroDivisionError: division by zero \(at /.*broken\.py:2\); correct it"),
    ],
)
def test_faults_of_functions_name_the_place(folder, reward, text):
    (folder / "broken.py").write_text("a = 0\nb = 1 / a\nf = print\n")
    with pytest.raises(RunError, match=text):
        made(reward)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"dataset": "missing.jsonl"}, r"dataset missing\.jsonl is not a file \(/.*missing\.jsonl\); give a JSONL file, or owner/name"),
        ({"dataset": "rows"}, r"dataset rows is not a file"),
        ({"reward": None}, r"dataset rows\.jsonl needs a reward function; give reward ="),
        ({"args": {"a": 1}}, r"args are for environments with an id; leave out a"),
        ({"dataset": None}, r"environment rows has neither id nor dataset"),
    ],
)
def test_faults_of_the_settings(folder, spec, text):
    with pytest.raises(RunError, match=text):
        made(**spec)


def test_a_dataset_of_the_hub(folder, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if split == "none":
            raise ValueError("Unknown split")
        column = "text" if split == "odd" else "question"
        return datasets.Dataset.from_list([{column: "say 1", "answer": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("rl.models.hub.hub_fault", lambda: "")
    env = made(dataset="owner/name", eval_dataset="owner/name:test[:10]")
    assert asked == [("owner/name", "train"), ("owner/name", "test[:10]")] and played(env)[0].reward == 0.5
    with pytest.raises(RunError, match=r"owner/name:none raised ValueError: Unknown split .*check name and split"):
        made(dataset="owner/name:none")
    with pytest.raises(RunError, match="owner/name:odd has no column prompt or question; its columns are text, answer"):
        made(dataset="owner/name:odd")


def test_a_hub_out_of_reach_is_told(monkeypatch):
    """tests/models/test_hub.py has the silent one."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9 does not answer .*: check the network, or give a JSONL file"):
        read("nobody/nothing")
