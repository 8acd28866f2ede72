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


@pytest.mark.parametrize(
    ("gpus", "args", "after_server"),
    [(1, [], True), (2, [], False), (0, [], False), (1, ["--orchestrator.inference_urls", '["http://a:1"]'], False)],
)
def test_on_a_shared_gpu_the_trainer_starts_when_the_server_has_its_memory(tmp_path, gpus, args, after_server):
    """Regression: vLLM counted the trainer's growth as its own and had too little memory for keys and values, or died when it was freed."""
    found = roles(config(*args), RunDir(tmp_path, tmp_path / "weights"), divide(gpus, *args))
    assert found[-1].name == "trainer" and found[-1].after_server == after_server
