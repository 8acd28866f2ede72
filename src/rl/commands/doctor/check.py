"""A line of the doctor's output, the processes that it starts for that, and how much memory there is and a run needs."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from rl.launch.children import Children
from rl.run_dir.logs import last_lines
from rl.system.children import Child

GIB = 2**30
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
PROCESSES_GIB = 3.5
"""What the processes of a run take before any weights: Python, torch and vLLM twice, an environment's worker."""
BYTES_PER_PARAMETER = 22
"""Trainer: weights, gradients and two moments in float32, and a copy to publish. Inference: the old and the new version in bfloat16."""


@dataclass(frozen=True)
class Check:
    """The result of one check; a line of the output."""

    level: Literal["ok", "warn", "FAIL"]
    name: str
    text: str
    """What was found, and in a warning or a failure the remedy."""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<12} {self.text}"


def memory_bytes() -> tuple[int, int]:
    """(memory that this process may use, free part of it), in bytes: the machine's, or the container's if that has less."""
    total, free = psutil.virtual_memory()[:2]
    try:
        limit = int(CGROUP_MEMORY.read_text())
        used = int(CGROUP_MEMORY.with_name("memory.current").read_text())
    except (OSError, ValueError):  # no such file, or `max`
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def needed_gib(parameters: float) -> float:
    """Memory of a run on one machine without GPUs, in GiB, roughly."""
    return PROCESSES_GIB + parameters * BYTES_PER_PARAMETER / GIB


def start_module(children: Children, work: Path, name: str, module: str, *args: str, **env: str) -> Child:
    """Starts `python -m MODULE ARGS` under a name, with these variables beside our own, and its log in `work`."""
    return children.start(name, [sys.executable, "-m", module, *args], {**os.environ, **env}, work / "logs")


def output(child: Child) -> list[str]:
    """The lines that a child has printed."""
    return child.log.read_text(errors="replace").strip().splitlines()


def fault_of(child: Child, timeout_s: float) -> str:
    """Waits for a child's end and kills one that takes longer. Returns what went wrong, with the end of its log; empty: nothing."""
    code = child.wait(timeout_s)
    if code == 0:
        return ""
    fault = child.ending() if code is not None else f"did not end within {timeout_s:.0f} s"
    child.kill_tree()
    return f"{fault}; the end of its log:" + "".join(f"\n        | {line}" for line in last_lines(child.log)[-6:])
