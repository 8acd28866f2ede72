"""Fault points: named places, where files are written or messages sent, at which a test can
reproducibly kill the process.

`RL_FAULT=orchestrator:batch.rename:2` makes the orchestrator kill itself (SIGKILL) when it reaches
`batch.rename` for the second time, just before that rename. `RL_FAULT_TRACE=FILE` appends a line
`process name count` for every point that is reached. With `RL_FAULT_MARK=FILE` each fault happens
only once: it is recorded there just before, and a process that starts later takes the next fault in
the list (`RL_FAULT=a:x:1,a:y:1`). Without these variables a fault point only checks one variable.

`kind.write` comes before a write, `kind.torn` in its middle, `kind.fsync`, `kind.rename` and
`kind.fsync_dir` before the call of that name, `kind.done` after the last. If the name must be free,
`kind.rename` comes before a link and `kind.linked` after it. The kind of a file follows from its
location in the run directory: batch, pending, weights, checkpoint ...
"""

import os
import re
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

KINDS = {"batches": "batch", "checkpoints": "checkpoint", "evals": "eval"}
"""Directory -> kind of its entries, if the two names differ."""
NAMES = {"metrics.jsonl": "merged"}
"""File -> its kind, if that differs from its name without the suffix."""


class FaultPlan:
    """The faults of this process, and the file that records the points it reaches."""

    def __init__(self, fault: str = "", trace: str = "", mark: str = "", process: str = ""):
        self.faults = [parse(text) for text in fault.split(",") if text]
        self.trace, self.mark, self.process = trace, mark, process
        self.next: tuple[str, str, int] | None = None
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def reach(self, name: str) -> None:
        """Counts the point, writes it to the trace, and kills the process if the next fault is
        here."""
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
        """Kills the process; tests replace it."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _choose(self) -> None:
        """Sets the next fault: the first one of this process that has not happened yet."""
        self.process = self.process or own_name()
        done = Path(self.mark).read_text().split() if self.mark and Path(self.mark).exists() else []
        for fault in self.faults:
            if fault[0] == self.process and ":".join(map(str, fault)) not in done:
                self.next = fault
                return


def append(path: str, line: str) -> None:
    with open(path, "a") as file:
        file.write(line + "\n")


def parse(fault: str) -> tuple[str, str, int]:
    """Parses `process:point:count`. Raises SystemExit if that fails."""
    if not (match := re.fullmatch(r"([\w-]+):([\w./-]+):([1-9]\d*)", fault)):
        raise SystemExit(
            f"RL_FAULT={fault}: give process:point:count, for example orchestrator:batch.rename:2"
        )
    return match[1], match[2], int(match[3])


def own_name() -> str:
    """Returns the name of this process in RL_FAULT: trainer, trainer-1 (rank 1), orchestrator,
    worker, inference, or its command's name."""
    spec, name = getattr(sys.modules["__main__"], "__spec__", None), Path(sys.argv[0]).name
    if spec and spec.name.startswith("rl."):
        name = spec.name.removesuffix(".main").rpartition(".")[2]
    rank = int(os.environ.get("RANK", 0))
    return f"{name}-{rank}" if name == "trainer" and rank else name


def plan_of_environment() -> FaultPlan | None:
    """Returns the plan from the environment variables; None if they are not set."""
    fault, trace = os.environ.get("RL_FAULT", ""), os.environ.get("RL_FAULT_TRACE", "")
    mark = os.environ.get("RL_FAULT_MARK", "")
    return FaultPlan(fault, trace, mark) if fault or trace else None


plan = plan_of_environment()


def point(name: str, path: Path | None = None) -> None:
    """Marks a place where a test can kill the process. path: the file that is being written, whose
    kind comes before the name."""
    if plan is not None:
        plan.reach(f"{kind_of(path)}.{name}" if path else name)


def kind_of(path: Path) -> str:
    """Returns the kind of a file in the run directory, for names of points: batch of
    `batches/000012.batch`, config of `config.toml`."""
    stem, folder = path.name.split(".")[0], path.parent.name
    if path.suffix in (".quarantined", ".lease"):
        return path.suffix[1:]
    if folder in ("metrics", "environments"):
        return folder
    if stem.isdigit():
        return KINDS.get(folder, folder)
    return "eval" if folder.isdigit() else NAMES.get(path.name, stem)
