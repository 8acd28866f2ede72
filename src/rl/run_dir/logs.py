"""`logs/<role>-<attempt>.log`: the path of the next attempt's, and the end of the newest."""

import os
import re
from pathlib import Path

LAST_LINES = 20
POINTS_UP = re.compile(r"\babove\b")
ERROR = re.compile(r"(?:\(\w+ pid=\d+\) +)?((?:\w+\.)*\w*(?:Error|Exception)\w*: .+)")
"""The last line of a traceback, behind the mark that vLLM puts before the lines of its engine."""
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed")


def attempts(logs: Path, name: str) -> dict[int, Path]:
    """The logs of a process by attempt, in no order. Attempts count up over restarts and resumes."""
    found = {path.stem.removeprefix(f"{name}-"): path for path in logs.glob(f"{name}-*.log")}
    return {int(attempt): path for attempt, path in found.items() if attempt.isdigit()}


def next_log(logs: Path, name: str) -> Path:
    """The log for the next attempt of a process, which does not exist yet."""
    return logs / f"{name}-{max(attempts(logs, name), default=0) + 1}.log"


def newest_log(logs: Path, role: str) -> Path | None:
    """The log of a role's last attempt, None if it has none. The ranks of a trainer share one."""
    return max(attempts(logs, re.sub(r"^trainer-\d+$", "trainer", role)).items(), default=(0, None))[1]


def last_lines(log: Path | None, count: int = LAST_LINES) -> list[str]:
    """The last `count` lines of a log that are not empty; none without a readable log.

    torchrun's report of a failure is left out: it follows the traceback that matters.
    """
    try:
        with open(log or os.devnull, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    end = next((i for i, line in enumerate(lines) if i and TORCHRUN_REPORT.search(line)), None)
    return [line for line in lines[:end] if line.strip()][-count:]


def last_words(log: Path | None) -> str:
    """What a process said last; where that only points to an error above, as vLLM's server does for its engine, that error. Empty without
    a readable log."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in last_lines(log, 1000)] or [""]
    if not POINTS_UP.search(lines[-1]):
        return lines[-1]
    return next((match[1] for line in reversed(lines[:-1]) if (match := ERROR.fullmatch(line))), lines[-1])
