"""Problems of a run with their evidence, and the logs of its processes."""

import os
import re
import time
from pathlib import Path

from rl.diagnosis.problems import Problem
from rl.diagnosis.state import RunMachine
from rl.records.run import Run
from rl.run_dir.status import describe
from rl.system.credentials import redact
from rl.system.errors import RunError
from rl.system.terminal import visible
from rl.view.responses import Finding, Health, Log, MachineRow, ProcessRow


def health(run: Run) -> Health:
    """The diagnosis of `rl doctor RUN`. If a file or the configuration of the run is unreadable,
    reports only that."""
    try:
        diagnosis = run.diagnosis()
    except (RunError, OSError) as error:
        try:
            rows = processes(run, live=False)
        except OSError:
            rows = []
        return Health(
            state="unreadable",
            bottleneck=visible(str(error)),
            lines=[],
            findings=[],
            processes=rows,
            machines=[],
        )
    return Health(
        state=diagnosis.state,
        bottleneck=visible(diagnosis.bottleneck),
        lines=[visible(line.text) for line in diagnosis.lines],
        findings=[
            finding(problem, run.root) for problem in (*diagnosis.problems, *diagnosis.hints)
        ],
        processes=processes(run, live=diagnosis.state == "live"),
        machines=[machine_row(machine, run) for machine, _ in diagnosis.machines],
        mismatch=diagnosis.mismatch,
    )


def machine_row(machine: RunMachine, run: Run) -> MachineRow:
    """A machine, with the processes whose names or statuses say that they are there."""
    status, seen = machine.status, time.time() - machine.silent_s
    names = [name for name, process in run.status.items() if machine.runs(process)]
    pattern = rf"(.+-)?node-?{machine.index}" + ("|rl" if "leader" in machine.roles else "")
    names += [name for name in run.logs if re.fullmatch(pattern, name)]
    ranks = re.compile(r"trainer-\d+")
    return MachineRow(
        index=machine.index,
        host=visible(status.host) if status else "",
        does=machine.does,
        facts=machine.facts,
        state=machine.state,
        since=seen - (status.heartbeat - status.started) if status else None,
        last_sign=seen if status else None,
        processes=[visible(name) for name in dict.fromkeys(names) if not ranks.fullmatch(name)],
    )


def finding(problem: Problem, root: Path) -> Finding:
    """A problem, with its files relative to the run."""
    return Finding(
        text=visible(problem.text),
        serious=problem.serious,
        metrics=list(problem.metrics),
        why=problem.why or "",
        files=[
            str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
            for path in problem.files
        ],
    )


def processes(run: Run, live: bool) -> list[ProcessRow]:
    """The processes with a status or a log. If the run is not live, the status is what they were
    doing last."""
    status, logs = run.status, run.logs
    was = "" if live else "was "
    return [
        ProcessRow(
            name=name,
            doing=was + visible(describe(status[name])) if name in status else "",
            heartbeat=status[name].heartbeat if name in status else None,
            attempts=list(logs.get(name, {})),
        )
        for name in dict.fromkeys([*status, *sorted(logs)])
    ]


def log(run: Run, process: str, attempt: int | None, lines: int) -> Log:
    """The last lines of a process's log, by default of its newest attempt. Raises RunError if
    there is no such log."""
    text, attempts = run.log(process, attempt, lines), run.logs[process]
    path = attempts[max(attempts) if attempt is None else attempt]
    return Log(lines=[visible(redact(line)) for line in text], bytes=os.path.getsize(path))
