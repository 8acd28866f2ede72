"""A run directory as an object: numbers, versions, events, logs, problems, and what `import rl`
costs."""

import json
import subprocess
import sys

import pytest

import rl
from rl.records.run import Run
from rl.run_dir.metrics import Merger, MetricsLog, cut_metrics
from rl.system.errors import ConfigError, RunError
from tests.records.made import group, make_run, note, write_step


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_run(tmp_path / "outputs" / "x")


def test_numbers_are_columns_that_follow_the_files(run_dir):
    run = Run(run_dir.root)
    trainer, orchestrator = (
        MetricsLog(run_dir.metrics, name) for name in ("trainer", "orchestrator")
    )
    assert run.metrics(kind="columns")["step"].tolist() == [] and run.step == 0
    trainer.write(1, {"loss/mean": 0.5, "time/step": 2.0})
    orchestrator.write(1, {"reward/mean": 0.25})
    assert run.curve("loss/mean")[1].tolist() == [0.5]  # not merged yet
    merger = Merger(run_dir.metrics)
    merger.merge()
    trainer.write(2, {"loss/mean": float("nan"), "optim/lr": 1e-6})
    trainer.write(1, {"loss/mean": 0.75})
    merger.merge()
    table = run.metrics("trainer")
    assert table.step.tolist() == [1, 2] and "reward/mean" not in table.columns
    assert table["time/step"].isna().tolist() == [False, True]
    assert [values.tolist() for values in run.curve("loss/mean")] == [[1], [0.75]] and run.step == 2
    assert run.metrics(kind="columns")["source"].tolist() == ["orchestrator", "trainer", "trainer"]
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 3, "time": 1, "source": "trainer", "loss/me')
    assert run.step == 2
    for name in ("lag/mean", "eval/held-out/reward_mean"):
        assert not len(run.curve(name)[0])
    for method, name, words in (
        (run.curve, "reward/meen", "there is no such metric; similar: reward/mean"),
        (run.metrics, "trianer", "give trainer, orchestrator, eval, rl, or None for all"),
    ):
        with pytest.raises(RunError, match=f"{name}'?: {words}"):
            method(name)
    cut_metrics(run_dir.metrics, 1)
    assert run.step == 1 and run.curve("optim/lr")[0].tolist() == []


def test_what_happened_and_who_said_what(run_dir):
    run = Run(run_dir.root)
    assert (run.events, run.logs, run.end, run.status, run.origin) == ([], {}, None, {}, None)
    note(run_dir, 1.0, "death", "trainer", reason="killed")
    run_dir.logs.mkdir()
    for name, text in (
        ("trainer-1", "one\n"),
        ("trainer-2", "two\n\nthree\n"),
        ("worker-0-1", "w\n"),
    ):
        (run_dir.logs / f"{name}.log").write_text(text)
    assert [event.reason for event in run.events] == ["killed"]
    attempts = {name: [*logs] for name, logs in run.logs.items()}
    assert attempts == {"trainer": [1, 2], "worker-0": [1]}
    assert run.log("trainer") == ["two", "three"] and run.log("trainer", attempt=1) == ["one"]
    assert run.log("trainer", lines=1) == ["three"]
    with pytest.raises(RunError, match="the trainer has no attempt 3; there are 1, 2"):
        run.log("trainer", attempt=3)
    words = r"the inference has no log in .* which has those of: trainer, worker-0"
    with pytest.raises(RunError, match=words):
        run.log("inference")


def test_problems_come_with_their_evidence(run_dir):
    log = MetricsLog(run_dir.metrics, "orchestrator")
    for step in range(1, 18):
        log.write(step, {"reward/mean": 0.1, "rollouts/errored": 0.5, "rollouts/truncated": 0.4})
    write_step(run_dir, 1, [group(0, [0.0, 1.0])])
    run_dir.rollouts(1).write_text("damaged")
    run_dir.batches.mkdir()
    run_dir.batch(1).write_bytes(b"rl1")
    found = {problem.text.split(" (")[0]: problem for problem in Run(run_dir.root).problems}
    errored = found["50% of the rollouts failed"]
    truncated = found["40% of the answers were cut off"]
    flat = "the reward does not rise: 0.100 in the first 4 steps, 0.100 in the last 4."
    assert (errored.metrics, errored.why) == (("rollouts/errored",), "error")
    assert not errored.serious and found[flat].metrics == ("reward/mean",)
    assert (truncated.metrics, truncated.why) == (("rollouts/truncated",), None)
    damaged = [problem.files for problem in found.values() if problem.serious and problem.files]
    assert (run_dir.batch(1),) in damaged and (run_dir.rollouts(1),) in damaged


def test_a_run_is_opened_by_its_directory_or_its_name(run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x", "outputs/x", "outputs/x/config.toml", run_dir.root):
        assert rl.open(name).root == run_dir.root
    assert rl.open("x").config.max_steps == 9
    with pytest.raises(ConfigError, match=r"not a run of rl|no such run"):
        rl.open("outputs/y")
    for name, words in (
        ("outputs", "outputs: not a run of rl; it contains the runs x"),
        ("", "the name of the run is empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            rl.open(name)
    with pytest.raises(RunError, match="not a run directory"):
        Run(tmp_path)
    run_dir.config.write_text("nonsense = 1\n")
    with pytest.raises(RunError, match=r"was not written by this version of rl"):
        _ = rl.open("x").config
    assert len(rl.open("x").rollouts()) == 0  # all else can be read


def test_reading_a_run_loads_neither_torch_nor_tables(run_dir):
    write_step(run_dir, 1, [group(0, [0.0, 1.0])])
    heavy = ("torch", "vllm", "transformers", "pandas", "verifiers", "matplotlib")
    code = (
        f"import rl, sys; run = rl.open({str(run_dir.root)!r}); print(len(run.rollouts()), "
        "run.rollouts()[0].text[:4], "
        f"len(run.metrics(kind='columns')), len(run.problems), *[name for name in {heavy} if "
        "name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 user 3 1\n"


def test_numbers_that_fit_nowhere_are_of_no_rollout(tmp_path):
    run_dir = make_run(tmp_path)
    run_dir.rollouts_dir.mkdir()
    line = {"messages": [], "reward": 1.0, "env": "a", "task": 1, "group_id": 1}
    for step, more in enumerate(
        ({"step": 10**30}, {"num_tokens": 2**62}, {"group_id": 2**63}, {"versions": [2**40]}),
        start=901,
    ):
        run_dir.rollouts(step).write_text(json.dumps(line | more) + "\n")
    run_dir.rollouts(905).write_text(
        json.dumps(line | {"step": 905, "metrics": {"m": 10**400}}) + "\n"
    )
    run = Run(run_dir.root)
    assert len(run.rollouts(step=905)) == 1
    assert sorted(path.name for path in run.damaged) == [
        f"{step:06d}.jsonl" for step in range(901, 905)
    ]
