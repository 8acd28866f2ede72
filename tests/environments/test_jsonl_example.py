import ast
import json
import re
from pathlib import Path

from tests.environments.playing import ENVIRONMENTS, call, load, on_path, play

FOLDER = ENVIRONMENTS / "jsonl_example"


def test_rows_are_what_the_script_writes():
    on_path("jsonl_example")
    from generate_tasks import tasks

    rows = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text().splitlines()]
    assert rows == tasks() and len(rows) == len({row["prompt"] for row in rows}) == 100
    assert all(set(row) == {"prompt", "answer"} and row["answer"] in row["prompt"] for row in rows)


def documented():
    """The environments of the documentation: one without and one with a tool."""
    return re.findall(
        r"```python\n([^`]*def load_environment[^`]*)```", Path("docs/environments.md").read_text()
    )


def test_the_environment_of_the_documentation(tmp_path, monkeypatch):
    code, _ = documented()
    (tmp_path / "documented_env.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = load("documented-env", largest=9)
    row, *others = env.get_dataset().to_list()
    assert len(others) == 7 and [*env.get_eval_dataset()["answer"]] == ["5", "10"]
    assert row["prompt"][-1]["content"] == "Which number comes after 0?" and len(row["prompt"]) == 5
    for reply, reward in [("1", 1.0), (" 1\n", 1.0), ("It is 1", 0.0), ("", 0.0)]:
        assert play(env, row, reply)[0]["reward"] == reward


def test_the_tool_of_the_documentation_and_the_shape_of_its_calls(tmp_path, monkeypatch):
    text = Path("docs/environments.md").read_text()
    (tmp_path / "documented_tool.py").write_text(documented()[1])
    monkeypatch.syspath_prepend(tmp_path)
    env = load("documented-tool")
    row = env.get_dataset().to_list()[0] | {
        "prompt": [{"role": "user", "content": "What is 12 + 7?"}],
        "answer": "19",
    }
    for answers, reward in [
        ([call({"a": 12, "b": 7}, "add"), "19"], 1.0),
        ([call({"a": 12, "b": 8}, "add"), "20"], 0.0),
        ([call("[1]", "add"), "19"], 0.5),
        (["19"], 0.5),
    ]:
        output, _ = play(env, row, *answers)
        assert output["reward"] == reward, answers
    output, _ = play(env, row, call({"a": 12, "b": 7}, "add"), "19")
    (shown,) = re.findall(r"```python\n(\[\n    \{\s*\"role\".*?\])\n```", text, re.DOTALL)
    played = [
        {key: value for key, value in dict(message).items() if value is not None}
        for message in output["completion"]
    ]
    # as verifiers writes them; rewards get them as shown
    played[0]["tool_calls"] = [json.loads(text) for text in played[0]["tool_calls"]]
    expected = ast.literal_eval(shown)
    expected[0]["tool_calls"][0]["id"] = expected[1]["tool_call_id"] = "call_1"
    fields = ("role", "content", "tool_calls", "tool_call_id")
    assert [
        {key: message[key] for key in fields if key in message} for message in played
    ] == expected
