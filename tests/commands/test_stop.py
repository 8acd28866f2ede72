"""`rl stop` for runs on a cluster, whose machines and engines are written by hand. Runs on one
machine: tests/launch/test_watch.py."""

import pytest

from rl.cluster import kubernetes
from rl.commands import stop
from rl.config.command_line import write_config
from rl.run_dir.nodes import Jobs, Nodes, RunOver
from rl.system.errors import ConfigError, RunError
from tests.cluster import configs
from tests.cluster.configs import status_of
from tests.cluster.test_kubernetes import VARIANTS, kubectl, run_config

__all__ = ["kubectl"]


def test_a_run_on_kubernetes_whose_volume_is_not_here(kubectl, tmp_path, capsys):
    config = run_config(VARIANTS["queue"])
    write_config(tmp_path / "run.toml", config)
    kubectl.answer("get jobset", out="rl-x=")
    assert stop.main(["@", str(tmp_path / "run.toml"), "--timeout", "5"], None) == 0
    jobs = kubernetes.jobs_of(config.run_dir)
    assert capsys.readouterr().out == f"{', '.join(jobs)}: deleted\n"
    assert kubectl.calls()[-1][0][:5] == ["--namespace", "research", "delete", *jobs]
    kubectl.answer("get jobset")
    assert stop.main(["@", str(tmp_path / "run.toml")], None) == 0
    assert "does not run" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"not a run of rl[\s\S]*rl stop @ FILE[\s\S]*kubectl delete jobset"
    ):
        stop.main(["outputs/nothing"], None)


SCANCEL = """#!/bin/sh
echo "$@" >> {calls}
case " $* " in *" 12 "*) echo "scancel: error: Kill job error on job id 12: Invalid job id specified" >&2; exit 1;; esac
"""


def test_jobs_that_slurm_has_forgotten_are_no_error(tmp_path, monkeypatch, capsys):
    """Slurm forgets a job some minutes after its end. A run that was submitted twice at once has
    the jobs of both."""
    config = configs.run_config(tmp_path, {"engine": "slurm", "nodes": 2})
    write_config(config.run_dir.config, config)
    nodes, fake = Nodes(config.run_dir), tmp_path / "scancel"
    fake.write_text(SCANCEL.format(calls=tmp_path / "calls"))
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nodes.write(nodes.jobs_path, Jobs("slurm", ["12", "13"]))
    config.run_dir.status_dir.mkdir(exist_ok=True)
    assert stop.main([str(config.run_dir.root)], None) == 0
    assert "stopped; continue it with" in capsys.readouterr().out
    assert "12 13" in (tmp_path / "calls").read_text() and nodes.over().exit_code == 130


def test_it_ends_the_newest_submission_of_a_run(tmp_path):
    config = configs.run_config(tmp_path, {"nodes": 2})
    nodes = Nodes(config.run_dir)
    nodes.end(RunOver(exit_code=130, text="", time=1.0, start="first"))
    for index, start in enumerate(("first", "second")):
        status = status_of(index, host="h", roles=[], started=index, start=start)
        nodes.write(nodes.status_path(index), status)
    with pytest.raises(
        RunError, match=r"machines 0 \(pid 1 on h\), 1 \(pid 1 on h\) have not ended within 0.1 s"
    ):
        stop.stop_machines(config.run_dir, config, 0.1)
    assert (nodes.over().exit_code, nodes.over().start) == (130, "second")
