"""The commands of a run's processes."""

import sys

import pytest

from rl.launch.roles import command, roles
from rl.run_dir.paths import RunDir
from tests.launch.test_devices import config, divide


def test_commands(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    config = str(tmp_path / "config.toml")
    assert command("trainer", run_dir, 1) == [sys.executable, "-m", "rl.trainer.main", "@", config]
    assert command("orchestrator", run_dir, 2) == [sys.executable, "-m", "rl.orchestrator.main", "@", config]
    assert command("trainer", run_dir, 2)[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_processes_do_not_inherit_the_place_that_another_launcher_gave_the_shell(tmp_path, monkeypatch):
    """RANK and WORLD_SIZE of a job's launcher had the trainer wait for seven other ranks, for a quarter of an hour and without a word."""
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"]
    names += ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"]
    for name in names:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEPT", "7")
    for role in roles(config(), RunDir(tmp_path, tmp_path / "weights"), divide(0)):
        assert not {*names} & role.env.keys() and role.env["KEPT"] == "7", role.name


@pytest.mark.parametrize(
    ("gpus", "args", "after_server"),
    [(1, [], True), (2, [], False), (0, [], False), (1, ["--orchestrator.inference_urls", '["http://a:1"]'], False)],
)
def test_on_a_shared_gpu_the_trainer_starts_when_the_server_has_its_memory(tmp_path, gpus, args, after_server):
    """Regression: vLLM counted the trainer's growth as its own and had too little memory for keys and values, or died when it was freed."""
    found = roles(config(*args), RunDir(tmp_path, tmp_path / "weights"), divide(gpus, *args))
    assert found[-1].name == "trainer" and found[-1].after_server == after_server
