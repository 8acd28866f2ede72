import json
import re
from pathlib import Path

from tests.environments.playing import ENVIRONMENTS, load, on_path, play

FOLDER = ENVIRONMENTS / "jsonl_example"


def test_rows_are_what_the_script_writes():
    on_path("jsonl_example")
    from generate_tasks import tasks

    rows = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text().splitlines()]
    assert rows == tasks() and len(rows) == len({row["prompt"] for row in rows}) == 100
    assert all(set(row) == {"prompt", "answer"} and row["answer"] in row["prompt"] for row in rows)


def test_exact():
    on_path("jsonl_example")
    from rewards import exact

    for reply, reward in [("63", 1.0), (" 63.\n", 1.0), ("64", 0.0), ("It is 63", 0.0), ("", 0.0), (None, 0.0)]:
        assert exact([{"role": "assistant", "content": reply}], "63", task={}) == reward
    assert exact([], "63") == 0.0


def test_the_environment_of_the_documentation(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n([^`]*def load_environment[^`]*)```", Path("docs/environments.md").read_text())
    (tmp_path / "documented_env.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = load("documented-env", largest=9)
    row, *others = env.get_dataset().to_list()
    assert (len(others), [held_out["answer"] for held_out in env.get_eval_dataset().to_list()]) == (7, ["5", "10"])
    assert row["prompt"][-1]["content"] == "Which number comes after 0?" and len(row["prompt"]) == 5
    for reply, reward in [("1", 1.0), (" 1\n", 1.0), ("It is 1", 0.0), ("", 0.0)]:
        assert play(env, row, reply)[0]["reward"] == reward
