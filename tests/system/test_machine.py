"""GPUs and CPU time that this process may use."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.system.linux import place
from rl.system.machine import cpu_quota, visible_gpus


def test_visible_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, GPU-ab"}, tmp_path) == ["4", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "none") == []


def test_a_containers_quota(tmp_path):
    path = tmp_path / "cpu.max"
    path.write_text("250000 100000\n")
    assert cpu_quota(path) == 2.5
    path.write_text("max 100000\n")
    assert cpu_quota(path) == math.inf == cpu_quota(tmp_path / "none")


def test_where_a_process_is_is_looked_up_once_and_again_in_a_child(monkeypatch):
    here, looked, read_bytes = place(), [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: looked.append(path) or read_bytes(path))
    assert place() == here and not looked
    if (pid := os.fork()) == 0:
        os._exit(0 if place() == here and looked else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("platform", "said"), [("win32", "rl runs on Linux; on Windows, install WSL2"), ("darwin", "rl runs on Linux; this is darwin")]
)
def test_another_system_is_told_before_anything_is_imported(platform, said):
    """Whichever of the commands it is; without the standard library's modules that Linux alone has, and without ours."""
    code = f"import sys; sys.platform = '{platform}'; sys.modules['fcntl'] = None; import rl.trainer.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(said) and done.stderr.count("\n") == 1
