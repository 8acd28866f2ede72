"""Starting a run on a cluster, with an engine that only notes what it is told."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.cluster import submit as module
from rl.cluster.submit import cancel, dry_run, start, submit
from rl.config.command_line import CommandLine, to_toml
from rl.config.run import RLConfig
from rl.run_dir.nodes import Nodes, RunOver
from rl.system.errors import ConfigError, RunError
from tests.cluster.configs import run_config


def make(tmp_path, **cluster):
    return run_config(tmp_path, cluster)


@pytest.fixture
def engine(monkeypatch):
    found = SimpleNamespace(told=[], wrong=[])
    found.faults = lambda config: iter(found.wrong)
    found.render = lambda config, run_dir: (
        f"script of {run_dir.root.name}, {config.orchestrator.host}"
    )
    found.stays = lambda config: False
    found.submit = lambda config, run_dir: ["12", "13"]
    found.active = lambda jobs, config: found.queued
    found.queued = []
    found.cancel = lambda jobs, config: found.told.append(jobs)
    monkeypatch.setattr(module, "engine_of", lambda config: found)
    monkeypatch.setattr(module, "watch", lambda *_, **__: 7)
    monkeypatch.setattr(module, "engine_named", lambda name: found)
    return found


def test_a_run_is_submitted_recorded_and_followed(engine, tmp_path, capsys):
    config = make(tmp_path, engine="slurm")
    nodes = Nodes(config.run_dir)
    nodes.write(nodes.over_path, RunOver(exit_code=1, text="", time=1.0))
    assert start(config, CommandLine(), None, "again") == 7
    assert "submitted 12, 13" in capsys.readouterr().out
    assert json.loads(nodes.jobs_path.read_bytes()) == {"engine": "slurm", "jobs": ["12", "13"]}
    assert config.run_dir.config.exists() and not nodes.over_path.exists(), (
        "the end of an earlier start"
    )
    assert not list(config.run_dir.status_dir.glob("rl.*.lease")) or all(
        not path.read_bytes() for path in config.run_dir.status_dir.glob("rl.*.lease")
    )
    cancel(config.run_dir, config)
    assert engine.told == [["12", "13"]]


def test_what_is_known_to_fail_is_said_before_anything_is_made(engine, tmp_path):
    engine.wrong = [
        ("cluster.slurm.partition", "no", "is not a partition"),
        ("cluster.nodes", 9, "is too many"),
    ]
    config = make(tmp_path, engine="slurm")
    with pytest.raises(ConfigError, match="2 faults") as error:
        submit(config, CommandLine(), None)
    assert "cluster.slurm.partition = 'no'\n    is not a partition" in str(error.value)
    assert not config.run_dir.root.exists()


def test_jobs_that_cannot_be_recorded_are_removed(engine, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Nodes, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        submit(make(tmp_path, engine="slurm"), CommandLine(), None)
    assert engine.told == [["12", "13"]]


def test_a_run_that_exists_is_not_submitted_twice(engine, tmp_path):
    config = make(tmp_path, engine="slurm", index=2)
    submit(config, CommandLine(), None)
    assert "index = 2" not in config.run_dir.config.read_text(), (
        "all machines would have this index"
    )
    engine.queued = ["13"]
    with pytest.raises(RunError, match=r"jobs 13 of .*x are queued or running: `rl watch"):
        submit(config, CommandLine(), None)
    engine.queued = []
    config.run_dir.batch(1).parent.mkdir(exist_ok=True)
    config.run_dir.batch(1).touch()
    with pytest.raises(RunError, match="exists: continue that run with --resume"):
        submit(config, CommandLine(), None)


def test_a_machine_without_the_volume_only_submits(engine, tmp_path, capsys):
    config = make(tmp_path, engine="kubernetes", kubernetes={"mount": "/nowhere"})
    assert submit(config, CommandLine(), None) == 0
    assert "submitted" in capsys.readouterr().out and not config.run_dir.root.exists()
    with pytest.raises(RunError, match="where the volume is mounted"):
        submit(config, CommandLine(resume=3), None)


@pytest.mark.parametrize(
    ("here", "model", "said"), [(False, {}, 1), (False, {"dtype": "float32"}, 0), (True, {}, 0)]
)
def test_a_default_of_the_machine_that_submits_is_not_passed_on_in_silence(
    engine, monkeypatch, tmp_path, capsys, here, model, said
):
    monkeypatch.setattr("rl.config.run.multiplies_bfloat16", lambda: here)
    config = run_config(tmp_path, {"engine": "slurm"}, model=model)
    submit(config, CommandLine(), None)
    assert capsys.readouterr().out.count("set bfloat16 if the run's machines do") == said


def test_without_an_engine_it_says_what_to_start(engine, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "engine_of", lambda config: None)
    assert submit(make(tmp_path), CommandLine(), None) == 7
    assert f"rl node @ {tmp_path}/x/config.toml --cluster.index 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nope", "no such folder; give an existing one"),
        ("owner/nope", "not on the hub; check the spelling"),
    ],
)
def test_a_dry_run_says_that_the_model_is_not_to_be_found(monkeypatch, capsys, name, said):
    """It was found only by the start. Nothing of the weights is loaded for it."""
    asked = []

    def from_hub(model, needs_weights):
        asked.append(needs_weights)
        raise RunError(f"model.name = {model.name!r}: not on the hub; check the spelling")

    monkeypatch.setattr("rl.models.folder.from_hub", from_hub)
    config = RLConfig.model_validate({"model": {"name": name}})
    assert dry_run(config) == to_toml(config)
    assert f"rl: model.name = '{name}': {said}" in capsys.readouterr().err
    assert asked == [False] * (name == "owner/nope")
    dry_run(make(Path("o"), engine="none"))
    assert capsys.readouterr().err == "", "its machines have other folders"


def test_the_exit_code_is_that_of_the_run(engine, tmp_path):
    """Regression: after `rl stop` it was 0, and `rl ... && next` went on."""
    config = make(tmp_path, engine="ray")
    nodes = Nodes(config.run_dir)

    def run(*_):
        nodes.write(nodes.over_path, RunOver(exit_code=130, text="stopped", time=1.0))
        return 0

    engine.stays, engine.run = lambda config: True, run
    assert submit(config, CommandLine(), None) == 130
