"""Defines a line of the doctor's output, starts the doctor's processes, and estimates the memory
of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rl.launch.children import Children
from rl.run_dir.logs import last_lines
from rl.system.children import PYTHON, Child

GIB = 2**30
Level = Literal["ok", "warn", "FAIL"]
TIMEOUT_S = 300.0
"""A cold start of vLLM from a slow disk takes a minute, to convert a packaged model more."""
PROCESSES_GIB = 3.5
"""Memory of a run's processes without weights: Python, torch and vLLM twice, an environment's
worker."""
BYTES_PER_PARAMETER = 22
"""Trainer: weights, gradients and two moments in float32, and a copy to publish. Inference: the
old and the new version in bfloat16."""


@dataclass(frozen=True)
class Check:
    """The result of one check, one line of the output."""

    name: str
    level: Level
    text: str
    """The finding, with the remedy if it is a warning or a failure."""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.name:<12} {self.text}"


class ModuleAnswer(NamedTuple):
    """What a module of rl has printed in a process of its own."""

    fault: str
    """How it failed, with the end of its log; empty if it did not."""
    lines: list[str]
    explains: bool
    """Whether it has ended with exit code 1, so that its last line says why."""


def needed_gib(parameters: float) -> float:
    """Returns roughly the memory in GiB of a run on one machine without GPUs."""
    return PROCESSES_GIB + parameters * BYTES_PER_PARAMETER / GIB


def ask(
    children: Children, work: Path, name: str, module: str, *args: str, **env: str
) -> ModuleAnswer:
    """Runs `python -m MODULE ARGS` as child `name`, with additional variables `env` and its log in
    `work`."""
    child = children.start(name, [*PYTHON, "-m", module, *args], env, work / "logs")
    fault, lines = fault_of(child, TIMEOUT_S), output(child)
    return ModuleAnswer(fault, lines, child.exit_code == 1 and bool(lines))


def output(child: Child) -> list[str]:
    """Returns the lines that a child has printed."""
    return child.log.read_text(errors="replace").strip().splitlines()


def fault_of(child: Child, timeout_s: float) -> str:
    """Waits until a child ends, killing it after `timeout_s`. Returns what went wrong with the
    end of its log, or an empty text."""
    code = child.wait(timeout_s)
    if code == 0:
        return ""
    fault = child.ending() if code is not None else f"did not end within {timeout_s:.0f} s"
    child.kill_tree()
    lines = "".join(f"\n        | {line}" for line in last_lines(child.log)[-6:])
    return f"{fault}; the end of its log:{lines}"
