"""`logs/<role>-<attempt>.log`: the path of the next attempt's, the end of the newest, and how long one may get."""

import contextlib
import os
import re
from pathlib import Path

LAST_LINES = 20
POINTS_UP = re.compile(r"\babove\b")
ERROR = re.compile(r"(?:\(\w+ pid=\d+\) +)?(?:ERROR [\d :-]+\[[\w.]+:\d+\] )?((?:\w+\.)*\w*(?:Error|Exception)\w*: .+)")
"""The last line of a traceback, behind the mark that vLLM puts before the lines of its engine."""
FAREWELL = " [shutdown] "
"""In the lines of vLLM that tell how it ends, behind those that tell why."""
RAISED = re.compile(r"(?:\[rank\d+\]:\s*)?((?:trainer: |[\w.]*(?:Error|Exception|Exit)(?:: |$)).*)")
"""A line that ends a traceback of the trainer, or that it ended with."""
MANY_LINES = 1000
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed")


MAX_LOG_BYTES, FIRST_BYTES, NEWEST_BYTES = 64 << 20, 8 << 20, 24 << 20
"""Of one log, and of the parts of it that are kept when it has grown beyond: how the process began, and what it said last."""


def trim_logs(logs: Path) -> None:
    """Cuts the middle out of every log that has grown too long."""
    with contextlib.suppress(OSError), os.scandir(logs) as entries:
        for entry in entries:
            if entry.name.endswith(".log") and entry.stat().st_size > MAX_LOG_BYTES:
                trim(Path(entry.path))


def trim(log: Path) -> None:
    """Cuts the middle out of a log. Its process goes on: it appends to the same file, and only what it writes in that moment may be lost,
    or stand before older lines."""
    fd = os.open(log, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        first = os.pread(fd, FIRST_BYTES, 0)
        first_end = first.rfind(b"\n") + 1 or len(first)
        newest = bytearray(os.pread(fd, NEWEST_BYTES, size - NEWEST_BYTES))
        del newest[: newest.find(b"\n") + 1]
        cut = size - first_end - len(newest)
        while more := os.pread(fd, 1 << 20, size):
            newest += more
            size += len(more)
        os.ftruncate(fd, first_end)
        os.write(fd, b"[rl: %d bytes were cut out here; a log keeps its beginning and its end]\n" % cut + newest)
    finally:
        os.close(fd)


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

    torchrun's report of a failure and vLLM's of its end are left out: they follow the traceback that matters.
    """
    try:
        with open(log or os.devnull, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    end = next((i for i, line in enumerate(lines) if i and TORCHRUN_REPORT.search(line)), None)
    return [line for line in lines[:end] if line.strip() and FAREWELL not in line][-count:]


def error_line(log: Path | None) -> str:
    """The first error in the end of a log, its numbers as `#`: the same in every step. Empty if there is none.

    The first, for what other ranks say of a death comes later.
    """
    found = (match[1] for line in last_lines(log, MANY_LINES) if (match := RAISED.match(line)))
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\b(nan|inf)\b", "#", next(found, ""))


def last_words(log: Path | None) -> str:
    """What a process said last; where that only points to an error above, as vLLM's server does for its engine, that error. Empty without
    a readable log."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in last_lines(log, MANY_LINES)] or [""]
    if not POINTS_UP.search(lines[-1]):
        return lines[-1]
    errors = (match[1] for line in reversed(lines[:-1]) if (match := ERROR.fullmatch(line)))
    return next((error for error in errors if not POINTS_UP.search(error)), lines[-1])
