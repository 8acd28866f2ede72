"""docs/functions.md: its functions for rollouts and its configuration, as they stand there, in
one run; loss/test_common.py has the loss."""

import json
import re
from pathlib import Path

import pytest

from rl.run_dir.metrics import read_metrics
from tests.flags import made
from tests.orchestrator.test_orchestrator import lines, play

PAGE = Path("docs/functions.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of the page, beside tasks that the stub of inference can play."""
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / re.match(r"# (my_\w+\.py)\n", code)[1]).write_text(code)
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "run.toml").write_text(settings)
    rows = [{"prompt": f"say {digit}", "answer": str(digit)} for digit in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_functions_of_the_page_in_one_run(folder, model):
    flags = (
        "@ run.toml --name r --model.max_model_len 256 --orchestrator.sampling.max_tokens 8 "
        "--model.dtype float32 --orchestrator.eval.interval 2 --orchestrator.eval.num_examples 2 "
        "--max_lag 0 --orchestrator.environment.eval_dataset tasks.jsonl"
    )
    config = made(*flags.split()).with_absolute_paths()
    play(config, model)
    rollouts = [line for step in (1, 2) for line in lines(config.run_dir.rollouts(step))]
    groups: dict[int, list[dict]] = {}
    for line in rollouts:
        assert line["metrics"]["exact"] == line["reward"]
        # the stub answers with a digit
        assert (line["metrics"]["characters"], line["metrics"]["number"]) == (1, 1.0)
        groups.setdefault(line["group_id"], []).append(line)
    for group in groups.values():
        rewards = [line["reward"] for line in group]
        median = sum(sorted(rewards)[1:3]) / 2
        assert [line["advantage"] for line in group] == [
            (gap if gap > 0 else 0.5 * gap) for gap in (r - median for r in rewards)
        ]
        answers = [line["messages"][-1]["content"] for line in group]
        if group[0]["why"] not in ("no_signal", "surplus"):
            assert [line["why"] for line in group] == [
                None if answer not in answers[:i] else "filtered"
                for i, answer in enumerate(answers)
            ]
    metrics = read_metrics(config.run_dir.metrics)
    for step in (1, 2):
        assert metrics[step, "orchestrator"]["rollouts/filtered"] > 0
        assert metrics[step, "orchestrator"]["reward/tasks/characters"] == 1
    assert metrics[2, "eval"]["eval/tasks/number"] == 1.0
