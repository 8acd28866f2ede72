"""Fault points: named places on the durable path and on the wire where a test has a process die, each time at the same one.

`RL_FAULT=orchestrator:batch.rename:2` has the orchestrator kill itself (SIGKILL) when it comes to `batch.rename` for the second time, right
before that rename. `RL_FAULT_TRACE=FILE` appends a line `process name count` for every point that is reached. `RL_FAULT_MARK=FILE` has each
fault happen once: it is noted there just before, and who starts afterwards takes his next one of several (`RL_FAULT=a:x:1,a:y:1`).
Without these variables a point costs a look at a variable.

`kind.write` stands before a write, `kind.torn` in its middle, `kind.fsync`, `kind.rename`, `kind.fsync_dir` before the call of that name,
`kind.done` after the last. The kind of a file is that of the run directory it belongs to: batch, pending, weights, checkpoint ...
"""

import os
import re
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

KINDS = {"batches": "batch", "checkpoints": "checkpoint", "evals": "eval"}
"""Directories whose entries are called by another name than the directory's own."""


class Plan:
    """Where this process is to die, and where it tells which points it came by."""

    def __init__(self, fault: str = "", trace: str = "", mark: str = "", process: str = ""):
        self.faults = [parse(one) for one in fault.split(",") if one]
        self.trace, self.mark, self.process = trace, mark, process
        self.next: tuple[str, str, int] | None = None
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def reach(self, name: str) -> None:
        """Counts the point, tells of it, and dies if it is the one."""
        with self.lock:
            if not self.counts:
                self._choose()
            self.counts[name] += 1
            reached = self.process, name, self.counts[name]
            if self.trace:
                append(self.trace, " ".join(map(str, reached)))
            if reached == self.next:
                if self.mark:
                    append(self.mark, ":".join(map(str, reached)))
                self.strike()

    def strike(self) -> None:
        """What happens at the point."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _choose(self) -> None:
        """The first fault of this process that nobody has died of."""
        self.process = self.process or own_name()
        done = Path(self.mark).read_text().split() if self.mark and Path(self.mark).exists() else []
        self.next = next((one for one in self.faults if one[0] == self.process and ":".join(map(str, one)) not in done), None)


def append(path: str, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def parse(fault: str) -> tuple[str, str, int]:
    """`process:name:nth` in parts."""
    if not (match := re.fullmatch(r"([\w-]+):([\w./-]+):([1-9]\d*)", fault)):
        raise SystemExit(f"RL_FAULT={fault}: give process:point:count, for example orchestrator:batch.rename:2")
    return match[1], match[2], int(match[3])


def own_name() -> str:
    """What this process is called in RL_FAULT: trainer, trainer-1 (of rank 1), orchestrator, worker, inference, or its command's name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    parts = spec.name.split(".") if spec and spec.name.startswith("rl.") else []
    name = (parts[-2] if parts[-1] == "main" else parts[-1]) if parts else Path(sys.argv[0]).name
    rank = int(os.environ.get("RANK", 0))
    return f"{name}-{rank}" if name == "trainer" and rank else name


def plan_of_environment() -> Plan | None:
    """The plan that the environment gives; mostly none."""
    names = ("RL_FAULT", "RL_FAULT_TRACE", "RL_FAULT_MARK")
    fault, trace, mark = (os.environ.get(name, "") for name in names)
    return Plan(fault, trace, mark) if fault or trace else None


plan = plan_of_environment()


def point(name: str) -> None:
    """A place where a test may have the process die."""
    if plan is not None:
        plan.reach(name)


def kind_of(path: Path) -> str:
    """What a file of the run directory is, for the names of points: `batches/000012.batch` is a batch, `config.toml` is config."""
    stem, folder = path.name.split(".")[0], path.parent.name
    if path.suffix == ".quarantined":
        return "quarantined"
    if stem.isdigit():
        return KINDS.get(folder, folder)
    return "eval" if folder.isdigit() else stem
