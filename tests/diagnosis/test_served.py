"""What is said of `rl serve` and of the models of its clients."""

import time

import pytest

from rl.commands.doctor.main import main as doctor
from rl.config.command_line import write_config
from rl.run_dir.status import Phase
from tests.diagnosis.test_waits import SERVING, Run, does, gone

__all__ = ["gone"]

ADDRESS = "http://127.0.0.1:8600"


def make(root, name):
    run = Run(root, name=name, serve={"alias": "someone/else"}, orchestrator={})
    write_config(run.dir.config, run.config)
    return run


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = make(tmp_path, "serve-tiny")
    monkeypatch.setattr(time, "time", lambda: server.now)
    return server


@pytest.fixture
def model(server):
    """The only model of a client, which has trained it for three steps."""
    model = make(server.dir.root / "models", "session-0")
    (model.dir.root / "calls.log").touch()
    model.metrics([1, 2, 3], ago=7200)
    return model


def serving(server, **inference):
    """A server that is up for three hours, and that nobody has asked for two."""
    hours = {"since": 10_800, "idle": 7200, "started": server.now - 10_800}
    server.rl()
    server.status("inference", SERVING, address="http://127.0.0.1:1", **hours, **inference)
    server.status("tinker", SERVING, address=ADDRESS, **hours)
    return server


def test_a_server_that_nobody_asks_is_well_and_so_are_its_models(server, model, capsys):
    """A trainer and an orchestrator were missed, which it does not have, and after ten minutes
    nothing had moved."""
    serving(server, requests=0)
    for run, progress in ((server, "models: 1"), (model, "step 3, version 0")):
        found = run.diagnosis()
        assert (found.state, found.problems) == ("live", [])
        assert (
            found.bottleneck == f"clients are served at {ADDRESS}: inference has no open requests"
        )
        lines = [line.partition(" for ")[0] for line in found.all_lines]
        assert lines == [progress, "inference: serving", "tinker: serving"]
        assert doctor([str(run.dir.root)], None) == 0
    assert f"ok    clients are served at {ADDRESS}" in capsys.readouterr().out


def test_what_inference_has_to_do_for_clients(server):
    serving(server, requests=1)
    assert server.bottleneck().endswith(
        "inference has 1 open request, and has sampled nothing for 2.0 h"
    )
    server.status("inference", SERVING, idle=1, address="http://127.0.0.1:1", requests=8)
    assert server.bottleneck().endswith("inference has 8 open requests")


def test_a_server_that_starts_and_one_whose_start_takes_too_long(server, model):
    server.rl()
    assert server.bottleneck().startswith("the inference has no status yet: it is starting, ")
    server.status("inference", does(Phase.LOADING_MODEL), since=9)
    assert server.bottleneck().startswith("inference is not ready yet: loading the model for 9 s ")
    server.status("inference", SERVING, address="http://127.0.0.1:1")
    server.log("tinker-1", "of the trainer")
    server.status("tinker", does(Phase.LOADING_MODEL), since=9)
    for run in (server, model):
        assert (
            run.bottleneck()
            == f"the tinker is loading the model for 9 s; see {server.dir.logs / 'tinker-1.log'}"
        )
    hours = {"since": 7200, "idle": 7200, "started": server.now - 7200}
    server.status("inference", SERVING, address="http://127.0.0.1:1", **hours)
    server.status("tinker", does(Phase.LOADING_MODEL), **hours)
    assert server.bottleneck().startswith(
        "nothing has moved for 2.0 h: the tinker is loading the model for 2.0 h"
    )
    assert server.diagnosis().problems


def test_a_server_that_was_killed_and_one_that_was_stopped(server, model, gone):
    for name in ("inference", "tinker"):
        server.status(name, SERVING, pid=gone, heartbeat=5, address=ADDRESS)
    doing = "the inference was serving, the tinker was serving"
    again = f"`rl serve @ {server.dir.config}`"
    assert server.bottleneck() == f"the run was killed 5 s ago: {doing}; continue it with {again}"
    assert (
        model.bottleneck()
        == f"the run was killed 5 s ago at step 3: {doing}; continue it with {again}"
    )
    for name in ("inference", "tinker"):
        server.dir.status(name).unlink()
    assert (
        model.bottleneck() == f"clients of `rl serve` trained 3 steps; they can go on after {again}"
    )
    server.event("give_up", "tinker", 4, reason="ended with exit code 1")
    assert server.bottleneck().startswith(
        "the run ended 4 s ago with the tinker: ended with exit code 1; see "
    )
    server.event("start", "rl", 2)
    assert server.diagnosis().state == "stopped"


def test_a_server_in_a_folder_named_models_is_no_model(tmp_path):
    server = make(tmp_path / "models", "serve-tiny")
    assert server.bottleneck().endswith(f"`rl serve @ {server.dir.config}`")
    server.rl()
    assert server.diagnosis().state == "live"
