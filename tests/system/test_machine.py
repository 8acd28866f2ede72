"""GPUs and CPU time that this process may use."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from rl.config.run import ModelConfig
from rl.system import machine
from rl.system.errors import RunError
from rl.system.linux import pid_scope
from rl.system.machine import control_groups, multiplies_bfloat16, visible_gpus


def test_visible_gpus(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1", "2"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "4, GPU-ab"}, tmp_path) == ["4", "GPU-ab"]
    for none in ("", "-1", "NoDevFiles", "none", "void"):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": none}, tmp_path) == [], none
    assert visible_gpus({}, tmp_path / "none") == []


def test_a_driver_that_hangs_is_told(tmp_path, monkeypatch):
    """Regression: `rl` hung with it, without a word."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(machine, "TIMEOUT_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RunError, match="nvidia-smi has not answered for 0 s"):
        visible_gpus({"PATH": os.environ["PATH"]}, tmp_path / "none")


GROUPS = {
    "a container, version 2": (
        "0::/",
        {"cpu.max": "250000 100000", "memory.max": "2000", "memory.current": "500"},
    ),
    "a container that has read files, version 2": (
        "0::/",
        {
            "cpu.max": "250000 100000",
            "memory.max": "2000",
            "memory.current": "1900",
            "memory.stat": "anon 450\ninactive_file 1400\nactive_file 50",
        },
    ),
    "a job below its system's groups, version 2": (
        "0::/slurm/job/step",
        {
            "slurm/job/step/cpu.max": "max 100000",
            "slurm/job/cpu.max": "250000 100000",
            "slurm/cpu.max": "800000 100000",
            **{
                f"slurm/job/{name}": value
                for name, value in (("memory.max", "2000"), ("memory.current", "500"))
            },
            **{
                f"slurm/job/step/{name}": value
                for name, value in (("memory.max", "max"), ("memory.current", "300"))
            },
        },
    ),
    "a container, version 1, which sees its groups as the outermost": (
        "9:name=systemd:/docker/ab\n4:memory:/docker/ab\n1:cpu,cpuacct:/docker/ab\n0::/",
        {
            "cpu/cpu.cfs_quota_us": "250000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "2000",
            "memory/memory.usage_in_bytes": "1500",
            "memory/memory.stat": "inactive_file 0\ntotal_inactive_file 1000",
        },
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_limits_of_containers_and_jobs(kind, tmp_path, monkeypatch):
    own, files = GROUPS[kind]
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(
        machine,
        "control_groups",
        partial(control_groups, listed=tmp_path / "own", mounted=tmp_path / "mounted"),
    )
    assert machine.cpu_quota() == 2.5 and machine.memory_bytes() == (2000, 1500)


@pytest.mark.parametrize(
    "files", [{"cpu.max": "max 100000", "memory.max": "max"}, {"cpu/cpu.cfs_quota_us": "-1"}, {}]
)
def test_without_limits_there_is_what_the_machine_has(files, tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(
        machine, "control_groups", lambda controller: [tmp_path / controller, tmp_path]
    )
    assert machine.cpu_quota() == math.inf
    assert machine.memory_bytes()[0] == psutil.virtual_memory().total
    assert control_groups("cpu", listed=tmp_path / "none") == []


def test_where_a_process_is_is_looked_up_once_and_again_in_a_child(monkeypatch):
    here, looked, read_bytes = pid_scope(), [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: looked.append(path) or read_bytes(path))
    assert pid_scope() == here and not looked
    if (pid := os.fork()) == 0:
        os._exit(0 if pid_scope() == here and looked else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        ("win32", "rl runs on Linux; on Windows, install WSL2"),
        ("darwin", "rl runs on Linux; this is darwin"),
    ],
)
def test_another_system_is_told_before_anything_is_imported(platform, said):
    """This holds for every command, without importing Linux-only modules of the standard library
    or our own."""
    code = (
        f"import sys; sys.platform = '{platform}'; sys.modules['fcntl'] = None; import "
        "rl.trainer.main"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx avx2 fma\n", False),
        # multiplies bfloat16 as float32, in pieces
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("processor : 0\nflags\t\t: fpu amx_bf16\n", True),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor : 0\n", False),
    ],
)
def test_bfloat16_is_chosen_where_the_processor_multiplies_it(
    tmp_path, monkeypatch, cpuinfo, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is expected
    assert ModelConfig().dtype == ("bfloat16" if multiplies_bfloat16() else "float32")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    multiplies_bfloat16.cache_clear()
    assert multiplies_bfloat16(tmp_path / "cpuinfo")
