"""Environments out of rows and a reward function, and every way in which a user can get them
wrong."""

import json

import datasets
import pytest
from huggingface_hub import constants

from rl.config.outside import rows_fault
from rl.envs.load import load
from rl.models.hub import load_table
from rl.system.errors import RunError
from rl.system.functions import load_function
from rl.wire.worker_messages import EnvSpec
from tests.envs.stub_policy import StubPolicy, played
from tests.models.conversations import assistant, system, user
from tests.raised import run_error

REWARDS = """
from beside import half

def exact(completion, answer) -> float:
    return half(completion[-1]["content"] == answer)

def asks(completion, reference):
    return 1.0
"""


ROW = {"prompt": "a", "answer": "1"}
TEXT, IMAGE = (
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
)
ASKED = [user("a")]


def asking(content):
    return [{"prompt": [user(content)]}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "beside.py").write_text("def half(value):\n    return 0.5 * value\n")
    write(
        tmp_path / "rows.jsonl",
        [
            {"question": f"say {i}", "answer": str(i), "info": {"level": i}, "difficulty": 0.5}
            for i in range(3)
        ],
    )
    return tmp_path


def write(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )


def made(reward="my_rewards.py:exact", dataset="rows.jsonl", reply="1", **spec):
    return load(
        EnvSpec(name="rows", dataset=dataset, reward=reward, **spec),
        StubPolicy(lambda prompt: reply),
    )


def test_rows_are_played(folder):
    env = made(system_prompt="Digits.")
    assert (env.kind, env.num_tasks("train"), env.num_tasks("eval")) == (
        "classic SingleTurnEnv",
        3,
        0,
    )
    (rollout,) = played(env, task=1)
    assert rollout.reward == 0.5 and [message["content"] for message in rollout.messages] == [
        "Digits.",
        "say 1",
        "1",
    ]
    assert env.describe()["reward functions"] == {"exact": 1.0}
    task = env.task("train", 2)
    assert task["info"] == {"level": 2}
    assert task["difficulty"] == 0.5
    assert task["prompt"][0]["content"] == "Digits."


def test_prompts_of_every_kind_and_rows_of_their_own_for_evaluation(folder):
    chat = [system("Own."), user("a")]
    tools = [
        user("b"),
        assistant("c"),
        user("d"),
    ]
    write(
        folder / "mixed.jsonl",
        [
            {"prompt": "text", "answer": "1"},
            "",
            {"prompt": chat, "more": 1, "answer": 1},
            {"prompt": tools, "info": {"x": [1]}, "answer": 2.5},
        ],
    )
    env = made(dataset="rows.jsonl", eval_dataset="mixed.jsonl", system_prompt="Given.")
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (3, 3)
    prompts = [[message["content"] for message in env.task("eval", i)["prompt"]] for i in range(3)]
    assert prompts == [["Given.", "text"], ["Own.", "a"], ["Given.", "b", "c", "d"]]
    assert env.task("eval", 2)["info"] == {"x": [1]} and env.task("eval", 1)["more"] == 1


def called(name, arguments):
    call = {"function": {"name": name, "arguments": arguments}}
    return assistant("", tool_calls=[call])


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["[" * 9999], r"bad\.jsonl:1: not JSON \(maximum recursion depth"),
        ([ROW, "", "[1]"], r"bad\.jsonl:3: a list; write one object a line"),
        ([{"prompt": 3}], r"bad\.jsonl:1: prompt: a number; give text or a list of messages"),
        (
            [{"prompt": [{"content": "a"}]}],
            r"bad\.jsonl:1: prompt\[0\]: not a chat message: it needs a role",
        ),
        (
            asking(None),
            r"bad\.jsonl:1: prompt\[0\]\.content: null; give text",
        ),
        (
            asking(["a"]),
            r"bad\.jsonl:1: prompt\[0\]\.content: a list with 'a'; give text, or parts",
        ),
        (
            asking([TEXT, IMAGE]),
            r"1: prompt\[0\]\.content: a list with {'type': 'image_url', .*; give text",
        ),
        (
            asking([{"type": "text"}]),
            r"1: prompt\[0\]\.content: a list with {'type': 'text'}; give",
        ),
        (
            [{"prompt": json.dumps(ASKED)}],
            r"bad\.jsonl:1: prompt: a text that spells a list of messages; give the list itself",
        ),
        (
            [{"question": str(ASKED)}],
            r"bad\.jsonl:1: question: a text that spells a list of messages; give the list itself",
        ),
        (
            [
                {
                    "prompt": [
                        user("a"),
                        assistant("It is"),
                    ],
                    "answer": "1",
                }
            ],
            r"bad\.jsonl:1: prompt: ends with the assistant's words, which are not continued",
        ),
        (
            [{"prompt": [called("f", "a=1"), user("a")], "answer": "1"}],
            r"bad\.jsonl:1: prompt\[0\]: the arguments of f are a text; give an object",
        ),
        ([ROW, ROW | {"info": "see page 3"}], r"bad\.jsonl:2: info: a text that is not JSON"),
        (
            [ROW | {"info": {"task": "t"}}],
            r"bad\.jsonl:1: info\.task: verifiers takes it for the whole task",
        ),
        (
            [ROW, '{"prompt": "\\ud83d", "answer": "1"}'],
            r"bad\.jsonl:2: prompt: \\ud83d is half of a character",
        ),
        (
            ['{"prompt": "a", "answer": "1", "answer": "2"}'],
            r"bad\.jsonl:1: the key 'answer' twice in one object",
        ),
        (
            [*[ROW] * 119, {"prompt": "a"}],
            r"bad\.jsonl:120: reward my_rewards\.py:exact \(.*\) asks for answer, which is "
            r"not a column of",
        ),
    ],
)
def test_faults_of_rows_name_the_line(folder, rows, text):
    write(folder / "bad.jsonl", rows)
    with run_error(text):
        made(dataset="bad.jsonl")


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (
            "my_rewards.py:asks",
            r"rows\.jsonl:1: reward .*asks for reference, which is not a column of "
            r"rows\.jsonl; it can ask for answer",
        ),
        (
            "broken.py:f",
            r"raised ZeroDivisionError: division by zero \(at /.*broken\.py:2\); correct it",
        ),
    ],
)
def test_faults_of_functions_name_the_place(folder, reward, text):
    (folder / "broken.py").write_text("a = 0\nb = 1 / a\nf = print\n")
    with run_error(text):
        made(reward)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            {"dataset": "missing.jsonl"},
            r"dataset missing\.jsonl is not a file \(/.*missing\.jsonl\); give a JSONL, CSV or "
            r"Parquet file, or owner/name",
        ),
        ({"dataset": "rows"}, r"dataset rows is not a file"),
        ({"reward": None}, r"dataset rows\.jsonl needs a reward function; give reward ="),
        ({"args": {"a": 1}}, r"args are for environments with an id; leave out a"),
        ({"dataset": None}, r"environment rows has neither id nor dataset"),
    ],
)
def test_faults_of_the_settings(folder, spec, text):
    with run_error(text):
        made(**spec)


def test_a_dataset_of_the_hub(folder, monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        assert subset is None
        asked.append((name, split))
        if split == "none":
            raise ValueError("Unknown split")
        column = "text" if split == "odd" else "question"
        return datasets.Dataset.from_list([{column: "say 1", "answer": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("rl.models.hub.hub_fault", lambda: "")
    env = made(dataset="owner/name", eval_dataset="owner/name:test[:10]")
    assert asked == [("owner/name", "train"), ("owner/name", "test[:10]")]
    assert played(env)[0].reward == 0.5
    with run_error(r"owner/name:none raised ValueError: Unknown split .*check name and split"):
        made(dataset="owner/name:none")
    with run_error("owner/name:odd row 0: no prompt or question, only text, answer"):
        made(dataset="owner/name:odd")


@pytest.mark.parametrize("name", ["tasks [1].csv", "tasks [1].parquet"])
def test_a_table_is_played(folder, name):
    """Regression: both were said to be no JSON."""
    if name.endswith("csv"):
        (folder / name).write_text("prompt,answer\na,1\nb,02\n")
    else:
        rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "02"}]
        datasets.Dataset.from_list(rows).to_parquet(folder / name)
    assert rows_fault(name) == ""
    env = made(dataset=name)
    assert [env.task("train", number)["answer"] for number in range(2)] == ["1", "02"]
    (folder / name).write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"tasks \[1\].* (give CSV in UTF-8|check the file)"):
        made(dataset=name)


def test_a_hub_out_of_reach_is_told(folder, monkeypatch):
    """tests/models/test_hub.py has the silent one."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with run_error(
        r"http://127\.0\.0\.1:9 does not answer .*: check the network, or give a JSONL file"
    ):
        made(dataset="nobody/nothing")


SEEN = """
import asyncio

def sees(task, state, completion, **columns):
    SEEN.append((task, state["info"], columns))
    return 1.0

def lists(completions, answer, example_id, **kwargs):
    SEEN.append((len(completions), answer, example_id, sorted(kwargs)))
    return [float(len(completion[-1]["content"]) + given) for completion, given in zip(completions, answer)]

async def waits(completions, answers):
    await asyncio.sleep(0)
    return [float(max(map(float, given))) for given in answers]

def shadowed(completion, state):
    return 1.0

def anything(completion, **kwargs):
    return 1.0

SEEN = []
"""


@pytest.fixture
def seen(folder):
    (folder / "seen.py").write_text(SEEN)

    def values(rows, reward, task=0, **options):
        write(folder / "given.jsonl", rows)
        env = made(f"seen.py:{reward}", dataset="given.jsonl", **options)
        rollouts = played(env, task=task, **({"num_episodes": 2} if env.scores_groups else {}))
        return env, rollouts, load_function("reward", f"seen.py:{reward}").__globals__["SEEN"]

    return values


def test_values_arrive_as_they_were_written(seen):
    """A typed table gave rows the keys and the types of each other: 7 beside 2.5 came as 7.0,
    one call's city as the other's null."""
    calls = [
        {"id": "c", "type": "function", "function": {"name": "find", "arguments": arguments}}
        for arguments in ({"city": "Malmö"}, {"x": [1, None]})
    ]
    rows = [
        {
            "prompt": [
                user("a"),
                assistant(None, tool_calls=[call]),
                user("b"),
            ],
            "answer": answer,
            "example_id": f"id-{answer}",
            "task": "t",
            "parser": {"deep": [answer]},
            "zip": "02108",
            "info": {"schema": schema, "tools": [{"x": answer}]},
        }
        for call, answer, schema in zip(
            calls, (7, 2.5), ({"type": "object"}, {"enum": [None, 1]}), strict=True
        )
    ]
    for number, row in enumerate(rows):
        env, (rollout,), known = seen(rows, "sees", task=number)
        task, info, columns = known[-1]
        assert task == "t" and info == row["info"] and rollout.reward == 1.0
        assert {key: columns[key] for key in ("answer", "example_id", "parser", "zip")} == {
            key: row[key] for key in ("answer", "example_id", "parser", "zip")
        }
        assert type(columns["answer"]) is type(row["answer"])
        (call,) = rollout.messages[1]["tool_calls"]
        assert (
            json.loads(call["function"]["arguments"])
            == row["prompt"][1]["tool_calls"][0]["function"]["arguments"]
        )
        assert "\\u" not in call["function"]["arguments"]
        shown = env.task("train", number)
        assert {key: shown[key] for key in row if key != "prompt"} == {
            key: row[key] for key in row if key != "prompt"
        }


def test_reward_functions_of_trl_score_lists(seen):
    """They get columns as lists, one value for each completion. `answer` was no list, and every
    rollout failed."""
    _, rollouts, known = seen(
        [{"prompt": "a", "answer": 3, "example_id": "x", "level": 1}], "lists", reply="ab"
    )
    assert [rollout.reward for rollout in rollouts] == [5.0, 5.0]
    count, answer, ids, others = known[-1]
    assert (count, answer, ids) == (2, [3, 3], ["x", "x"]) and {"prompts", "level", "info"} <= {
        *others
    }
    _, rollouts, _ = seen([{"prompt": "a", "answers": [1, 2]}], "waits")
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]


@pytest.mark.parametrize("reward", ["shadowed", "anything"])
def test_a_column_that_a_function_cannot_be_given_is_refused_by_name(seen, reward):
    with run_error(
        r"given\.jsonl:2: reward functions get verifiers' own `state`; give that column "
        r"another name"
    ):
        seen([ROW, ROW | {"state": "Ohio"}], reward)
    seen([ROW], reward)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_files_of_a_data_set_keep_their_values(tmp_path, kind):
    """Of a data set on the hub, whose files `datasets` reads: cells of CSV are text, and objects
    of JSON lines are apart."""
    if kind == "csv":
        (tmp_path / "train.csv").write_text("prompt,answer,zip\nNone,NA,02108\nb,True,1e5\n")
        wanted = [
            {"prompt": "None", "answer": "NA", "zip": "02108"},
            {"prompt": "b", "answer": "True", "zip": "1e5"},
        ]
    else:
        wanted = [
            {"prompt": "a", "answer": 7, "x": {"city": None}},
            {"prompt": "b", "answer": 2.5, "x": {"town": "2024-01-01"}},
        ]
        write(tmp_path / "train.jsonl", wanted)
    rows = list(load_table(str(tmp_path), "train"))
    assert rows == wanted and [type(row["answer"]) for row in rows] == [
        type(row["answer"]) for row in wanted
    ]
