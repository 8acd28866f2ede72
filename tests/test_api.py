"""`import rl` in a script or notebook: train, evaluate, and the notebook of docs/."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import rl
from rl import api
from rl.commands.record import Recorder
from rl.config.command_line import build, parse_args
from rl.config.run import RLConfig
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.numbers import write_token_log
from rl.system.errors import ConfigError, RunError
from tests.envs.stub_policy import StubPolicy, StubServers
from tests.records.made import group, make_run, sample, write_samples, write_step

ENV = {"id": "sums", "args": {"digits": [1, 2], "name": 'a "b"'}}
TABLES = {
    "model": {"name": "some/model"},
    "orchestrator": {"environment": [ENV]},
    "trainer": {"optim": {"lr": 2e-6}},
}


def test_a_configuration_from_python_is_the_one_of_the_command_line(tmp_path):
    settings = {
        "trainer__loss__type": "clip",
        "steps": 7,
        "trainer__optim__betas": [0.8, 0.9],
        "trainer__checkpoint__interval_s": float("inf"),
    }
    found = build(parse_args(api.arguments(TABLES, settings, tmp_path)))
    optim = found.trainer.optim
    assert (optim.lr, found.max_steps, optim.betas) == (2e-6, 7, (0.8, 0.9))
    assert (found.trainer.loss.type, found.trainer.checkpoint.interval_s) == ("clip", float("inf"))
    assert found.orchestrator.environment[0].args == ENV["args"]
    config = RLConfig.model_validate(TABLES)
    assert build(parse_args(api.arguments(config, {}, tmp_path))) == config
    given = api.arguments(
        "run.toml",
        {"orchestrator__environment": {"id": "x", "weight": 2.0}, "name": "12"},
        tmp_path,
    )
    assert given == [
        "@",
        "run.toml",
        "--orchestrator.environment",
        '{"id" = "x", "weight" = 2.0}',
        "--name",
        '"12"',
    ]
    with pytest.raises(ConfigError, match="is not a valid setting"):
        api.arguments(None, {"steps": None}, tmp_path)


def test_all_faults_of_a_configuration_are_one_exception():
    with pytest.raises(ConfigError) as error:
        rl.train(
            {"trainer": {"optim": {"lr": -1.0, "rate": 2}}, "orchestrator": {"environment": "e"}}
        )
    assert "trainer.optim.lr" in str(error.value) and "trainer.optim.rate" in str(error.value)


def test_the_run_that_comes_back_is_the_one_that_was_made(tmp_path, monkeypatch):
    """A trial has a name of its own."""
    given = []
    monkeypatch.setattr(
        api,
        "run_command",
        lambda args: (
            given.append(args[2:]),
            make_run(tmp_path / "x"),
            make_run(tmp_path / "x-quick"),
        ),
    )
    tables = TABLES | {"name": "x", "output_dir": str(tmp_path)}
    assert rl.train(tables).root == tmp_path / "x"
    assert rl.train(tables, quick=True).root == tmp_path / "x-quick"
    rl.train(tables, resume=True)
    rl.train(tables, resume=0, clean=True)
    assert given == [[], ["--quick"], ["--resume"], ["--clean", "--resume=0"]]


def test_a_run_that_fails_says_why(tmp_path, capfd):
    with pytest.raises(RunError) as error:
        rl.train(
            {
                "model": {"name": "./nowhere"},
                "output_dir": str(tmp_path),
                "orchestrator": {"environment": ENV | {"id": "missing-env"}},
            }
        )
    said = next(line for line in str(error.value).splitlines() if line.startswith("rl: "))
    # a notebook would have it twice
    assert "missing-env" in str(error.value) and said not in capfd.readouterr().out
    with pytest.raises(ConfigError, match="outputs/none@best: no such run or model folder"):
        rl.evaluate("outputs/none@best")
    with pytest.raises(RunError, match=r"(?s)rl eval ended with \d+:.*@99: "):
        rl.evaluate(
            f"{make_run(tmp_path / 'x').root}@99",
            orchestrator__environment={"id": str(Path("environments/reverse_text").absolute())},
        )


def test_an_interrupt_reaches_the_command_once_and_waits_for_its_end(tmp_path, monkeypatch, capfd):
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport signal, sys, time\n"
        "def stop(*_): print('stopped', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGINT, stop)\nprint('up', *sys.argv[1:], "
        "flush=True)\ntime.sleep(30)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(api, "PYTHON", [str(program)])

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        api,
        "print",
        lambda text, **options: interrupt() if text.startswith("up") else print(text, **options),
        raising=False,
    )
    with pytest.raises(KeyboardInterrupt):
        api.run_command(["--dry-run"])
    assert capfd.readouterr().out == "stopped\n"


def test_the_notebook_of_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = make_run(tmp_path / "outputs" / "quickstart")
    for step in (1, 2):
        write_step(
            run_dir,
            step,
            [group(2 * step, [0.0, 1.0], version=step - 1), group(2 * step + 1, [0.0, 0.0])],
        )
        write_samples(run_dir, step, [sample(2 * step, i) for i in range(2)])
        MetricsLog(run_dir.metrics, "orchestrator").write(step, {"reward/mean": step / 4})
        MetricsLog(run_dir.metrics, "trainer").write(step, {"loss/mean": 0.0})
    write_token_log(
        run_dir.tokens(2),
        {
            "trainer_logprobs": np.full(6, -0.75, np.float32),
            "entropies": np.ones(6, np.float32),
            "flags": np.zeros(6, np.uint8),
        },
    )
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads(Path("docs/python.ipynb").read_text())
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert all(
        cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"
    ), "stored as it was executed"
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StubServers, "close", lambda self: asyncio.sleep(0), raising=False)
    sampling = {"max_tokens": 64, "temperature": 1.0}
    monkeypatch.setattr(
        api, "record", lambda policy, output: Recorder(StubPolicy(), sampling, policy, Path(output))
    )
    names: dict[str, object] = {}
    for cell in cells:
        exec(compile(cell, "python.ipynb", "exec"), names)
    assert capsys.readouterr().out.startswith(
        "2 steps, reward 0.250 -> 0.500\n<8 rollouts> {'trained': 4, 'no_signal': 4}\n"
    )
    assert len(Path("rollouts.jsonl").read_text().splitlines()) == 8
    assert len(cells) == 8 and np.allclose(names["sample"].ratio[2:], np.exp(-0.25))
