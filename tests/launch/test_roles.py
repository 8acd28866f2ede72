"""The commands of a run's processes."""

import sys

from rl.launch.roles import command
from rl.run_dir.paths import RunDir


def test_commands(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    config = str(tmp_path / "config.toml")
    assert command("trainer", run_dir, 1) == [sys.executable, "-m", "rl.trainer.main", "@", config]
    assert command("orchestrator", run_dir, 2) == [sys.executable, "-m", "rl.orchestrator.main", "@", config]
    assert command("trainer", run_dir, 2)[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
