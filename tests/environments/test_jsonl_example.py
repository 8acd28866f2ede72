import json

from tests.environments.playing import ENVIRONMENTS, on_path

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
