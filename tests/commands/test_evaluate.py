"""`rl eval`: what it plays, what it says, what it leaves behind."""

import asyncio
import json
import signal

import psutil
import pytest

from rl.commands import evaluate
from rl.commands.evaluate import (
    compare,
    eval_part,
    evaluations_only,
    finished_report,
    write_report,
)
from rl.commands.options import PolicySource
from rl.config.orchestrator import EvalConfig
from rl.launch.children import Children
from rl.main import subcommand
from rl.system.errors import RunError
from rl.wire.rollouts import Rollout
from rl.wire.worker_messages import Ready
from tests import jsonl
from tests.commands.driver import ENVIRONMENTS, rl, start, with_server
from tests.commands.servers import Endpoint
from tests.flags import made
from tests.orchestrator.stub_inference import StubInference
from tests.waiting import until
from tests.web import serving

SAY_DIGIT = ("--orchestrator.environment.id", "say-digit")


def part(rewards, tasks=None, **fields):
    """A policy's part of a report from {task: [rewards]}. `tasks`: what each number stands for."""
    results = [
        (task, [Rollout(reward=one, episode=i, **fields) for i, one in enumerate(each)])
        for task, each in rewards.items()
    ]
    tasks = tasks or [{"prompt": f"task {number}"} for number in range(max(rewards) + 1)]
    return eval_part(EvalConfig(id="e"), "eval", {"temperature": 1.0}, results, tasks)


def policy(name, rewards, **fields):
    return {
        "policy": name,
        "policy_version": None,
        "model": "",
        "files": name,
        "evals": {"e": part(rewards, **fields)},
    }


def test_what_is_evaluated():
    config = made("--orchestrator.environment.id a/x --orchestrator.environment.args.n 3")
    derived = evaluations_only(config, 5, 2, quick=False).orchestrator
    assert derived.environment == []
    assert [(one.id, one.args, one.num_examples, one.samples) for one in derived.eval] == [
        ("a/x", {"n": 3}, 5, 2)
    ]
    quick = evaluations_only(config, None, None, quick=True)
    assert (
        quick.orchestrator.eval[0].num_examples,
        quick.orchestrator.sampling.max_tokens,
        quick.name[-6:],
    ) == (4, 32, "-quick")
    config = made(
        "--orchestrator.environment.id x --orchestrator.eval.id y --orchestrator.eval.samples 4"
    )
    assert [
        (one.id, one.samples)
        for one in evaluations_only(config, None, None, quick=False).orchestrator.eval
    ] == [("y", 4)]


def test_two_policies_side_by_side(tmp_path, capsys):
    ours = policy("new", {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [1.0, 1.0]}, metrics={"m": 2.0})
    theirs = policy("old", {0: [0.0, 0.0], 1: [0.0, 0.0]})
    config = made("--orchestrator.environment.id e")
    report = write_report(tmp_path / "o", config, [ours, theirs])
    gap = report["comparison"]["e"]["reward_mean"]
    assert (gap["mean"], gap["low"], gap["high"], gap["num_examples"]) == (0.75, 0.5, 1.0, 2)
    assert report["comparison"]["e"]["pass@2"]["mean"] == 1.0
    assert json.loads((tmp_path / "o" / "report.json").read_text()) == json.loads(
        json.dumps(report)
    )
    lines = (tmp_path / "o" / "report.md").read_text().splitlines()
    assert (
        "| e (3 x 2) | reward_mean | 0.833 ± 0.167 | 0.000 ± 0.000 | +0.750 | +0.500 to +1.000 |"
        in lines
    )
    assert "|  | m | 2.000 | - |  |  |" in lines
    assert "3 and 2 examples; the 2 that both have are compared" in capsys.readouterr().err
    assert finished_report(str(tmp_path / "o"))["policy"] == "new (o)"
    with pytest.raises(RunError, match="no examples in common"):
        write_report(tmp_path / "p", config, [ours, policy("other", {7: [1.0]})])


def test_tasks_are_paired_by_their_content_and_not_by_their_place():
    """Regression: a changed row was compared with the one that stood there before."""

    def tasks(*answers, system):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "say"}]
        return [
            {"prompt": messages, "answer": answer, "example_id": number}
            for number, answer in enumerate(answers)
        ]

    ours = part({0: [1.0], 1: [0.5], 2: [0.25], 3: [0.0]}, tasks("a", "b", "a", "c", system="x"))
    theirs = part({0: [9.0], 1: [0.25], 2: [1.0]}, tasks("new", "a", "a", system="y"))
    gap = compare(ours, theirs, 0)["reward_mean"]
    assert (gap.mean, gap.num_examples) == ((1.0 - 0.25 + 0.25 - 1.0) / 2, 2)


def test_pass_at_k_is_compared_where_both_have_enough_samples():
    found = compare(part({0: [1.0, 0.0, 0.0, 0.0]}), part({0: [0.0, 1.0]}), 0)
    assert {name: gap.mean for name, gap in found.items()} == {
        "reward_mean": -0.25,
        "pass@1": -0.25,
        "pass@2": -0.5,
    }


def test_what_is_no_report(tmp_path):
    assert finished_report("owner/model") is None
    (tmp_path / "x.json").write_text("{}")
    for path in (tmp_path / "x.json", tmp_path / "nowhere.json"):
        with pytest.raises(RunError, match="not a report of `rl eval`"):
            finished_report(str(path))


def test_two_models_of_an_endpoint(tmp_path):
    with serving(Endpoint("good", "bad")) as server:
        flags = (
            *SAY_DIGIT,
            "--samples 2 --output o --orchestrator.eval.sampling.temperature 0 --seed 1",
        )
        code, out, err = rl(
            tmp_path,
            "eval",
            *flags,
            "--policy",
            f"{server.url}#good",
            "--compare",
            f"{server.url}#bad",
        )
        assert code == 0, err
        assert {body["model"] for body in server.asked} == {"good", "bad"}
        assert {body["temperature"] for body in server.asked} == {0}
        assert len(server.asked) == 2 * 2 * 2
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [one["evals"]["say-digit"]["metrics"]["reward_mean"] for one in report["policies"]] == [
        1.0,
        0.0,
    ]
    assert report["comparison"]["say-digit"]["pass@2"] == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "num_examples": 2,
    }
    lines = jsonl.read(tmp_path / "o" / "good" / "say-digit.jsonl")
    assert [(line["task"], line["rollout"], line["reward"], line["outcome"]) for line in lines] == [
        (0, 0, 1.0, "finished"),
        (0, 1, 1.0, "finished"),
        (1, 0, 1.0, "finished"),
        (1, 1, 1.0, "finished"),
    ]
    assert lines[2]["messages"][-1] == {"role": "assistant", "content": "1"}
    assert "+1.000 to +1.000" in out
    assert "say-digit (2 x 2)" in out
    assert "rollouts in good/, bad/" in out
    assert not list(tmp_path.glob("o/server"))


def test_servers_of_ours_that_run_already_and_an_earlier_report(tmp_path, model):
    (tmp_path / "e").mkdir()
    rows = [{"question": f"say {digit}", "answer": str(digit)} for digit in range(2)]
    tasks = [{"prompt": [{"role": "user", "content": row["question"]}]} | row for row in rows]
    earlier = {"policies": [policy("old", {0: [0.0], 1: [0.0]}, tasks=tasks)]}
    earlier["policies"][0]["evals"] = {"say-digit": earlier["policies"][0]["evals"]["e"]}
    (tmp_path / "e" / "report.json").write_text(json.dumps(earlier))
    with serving(StubInference(model, tmp_path / "status.json", skill=1.0)):
        address = json.loads((tmp_path / "status.json").read_text())["address"]
        flags = (
            f"--model.name {model} --model.max_model_len 256 --orchestrator.sampling.max_tokens 8",
        )
        code, out, err = rl(
            tmp_path,
            "eval",
            *SAY_DIGIT,
            *flags,
            "--orchestrator.inference_urls",
            f'["{address}"]',
            "--compare e/report.json",
        )
    assert code == 0, err
    assert "old (e)" in out
    assert "+1.000" in out
    assert "warning: eval say-digit: the two policies differ in environment" in err
    (report,) = tmp_path.glob("outputs/eval-say-digit-*/*/report.json")
    assert (
        json.loads(report.read_text())["policies"][0]["evals"]["say-digit"]["metrics"][
            "length_mean"
        ]
        == 2.0
    )


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--orchestrator.environment.id", "nope"), 1, "`rl env install owner/nope`"),
        ((*SAY_DIGIT, "--policy", "outputs/x/y"), 2, "no such run or model folder"),
        ((*SAY_DIGIT, "--compare", "x.json"), 1, "not a report"),
        ((*SAY_DIGIT, "--policy", "http://127.0.0.1:9/v1"), 1, "no answer"),
    ],
)
def test_faults_are_told_before_anything_starts(args, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    monkeypatch.setattr(Children, "stop_on_signals", lambda _: None)
    assert subcommand("eval", [*args], Children()) == code
    err = capsys.readouterr().err
    assert err.startswith("rl eval: ") and said in err
    assert not list(tmp_path.iterdir())


def test_rows_without_held_out_ones_are_played_greedily_and_compared_with_those_of_a_report(
    tmp_path,
):
    """Regression: training rows counted as held out, temperature 0 was refused, and changed rows
    were compared by their place."""
    (tmp_path / "rewards.py").write_text(
        "def exact(completion, answer):\n    return float(completion[-1]['content'] == answer)\n"
    )
    flags = (
        "--orchestrator.environment.dataset rows.jsonl --orchestrator.environment.reward rewards.py:exact --orchestrator.sampling.temperature 0",
    )
    with serving(Endpoint("good")) as server:
        for digits, options in (("13", ()), ("23", ("--compare", "13"))):
            rows = [{"prompt": f"say {digit}", "answer": digit} for digit in digits]
            (tmp_path / "rows.jsonl").write_text(jsonl.text(*rows))
            words = ("--policy", server.url, "--output", digits, *options)
            code, out, err = rl(tmp_path, "eval", *flags, *words)
            assert code == 0 and "rows (2 x 1, training examples)" in out, err
            assert (
                "its environment has no eval examples, so its training examples are played" in err
            )
    assert [body["temperature"] for body in server.asked] == [0.0] * 4
    assert "warning: eval rows: 2 and 2 examples; the 1 that both have are compared" in err


def test_evaluations_that_share_workers_are_kept_apart(monkeypatch, tmp_path):
    """Two of one environment, as different as their sampling."""
    monkeypatch.setattr(
        evaluate, "eval_workers", lambda config: dict.fromkeys(("cool", "hot"), "shared")
    )

    class Session:
        ready = {"shared": Ready(4, 2)}

        async def tasks(self, env, split, limit):
            return [{"prompt": str(number)} for number in range(limit)]

        async def play(self, label, jobs, concurrency):
            for job in jobs:
                yield job, [Rollout(reward=job.sampling["temperature"], completion_tokens=1)]

    evals = (
        '[{id = "e", name = "cool", sampling = {temperature = 0.25}}, {id = "e", name = "hot", '
        "sampling = {temperature = 0.75}}]"
    )
    config = made("--orchestrator.environment.id x --orchestrator.eval", evals)
    session = Session()
    session.config = config
    parts = asyncio.run(evaluate.evaluate_policy(session, PolicySource("p"), tmp_path, None))
    rewards = {label: part["metrics"]["reward_mean"] for label, part in parts.items()}
    assert rewards == {"cool": 0.25, "hot": 0.75}
    assert [part["num_examples"] for part in parts.values()] == [2, 2]


def test_two_evaluations_of_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.time, "strftime", lambda _: "20260101-000000")
    names = [evaluate.new_folder(tmp_path / "eval-m").name for _ in range(3)]
    assert names == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]


def test_rollouts_that_all_fail_end_it(tmp_path):
    with serving(Endpoint("good")) as server:
        flags = (
            *SAY_DIGIT,
            "--orchestrator.environment.args.fail always --orchestrator.rollout_retries 0",
        )
        code, _, err = rl(tmp_path, "eval", *flags, "--policy", server.url)
    assert code == 1
    assert "all of the first 2 rollouts failed" in err
    assert "ZeroDivisionError: broken environment" in err


def test_a_server_that_dies_or_does_not_come_up(tmp_path, model):
    flags = (
        *SAY_DIGIT,
        f"--model.name {model} --model.max_model_len 256 --orchestrator.sampling.max_tokens 8",
    )
    code, _, err = rl(
        tmp_path, "eval", *flags, code=with_server("import sys; sys.exit('no memory')")
    )
    assert code == 1
    assert "rl eval: inference ended with exit code 1. The end of its log:\n  | no memory" in err
    slow = "import time; time.sleep(600)"
    code, _, err = rl(
        tmp_path, "eval", *flags, "--inference.startup_timeout_s 1", code=with_server(slow)
    )
    assert code == 1 and "inference is not ready after inference.startup_timeout_s = 1 s" in err
    assert not list(tmp_path.rglob(".server.*"))
    (tmp_path / "empty").mkdir()
    code, _, err = rl(tmp_path, "eval", *SAY_DIGIT, "--policy empty")
    assert code == 1
    assert f"{tmp_path}/empty is not a complete Hugging Face model, it lacks config.json" in err


def test_ctrl_c_leaves_nobody(tmp_path, model):
    flags = (
        *SAY_DIGIT,
        f"--model.name {model} --model.max_model_len 256 --orchestrator.sampling.max_tokens 8",
    )
    process = start(tmp_path, "eval", *flags, code=with_server("import time; time.sleep(600)"))
    logs = until(lambda: list(tmp_path.glob("outputs/*/*/logs/worker-*")), 60)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "SIGINT: stopping" in err, err
    assert logs and below and not any(one.is_running() for one in below)
