"""`logs/<role>-<attempt>.log`: paths of logs, their last lines and errors, and their maximum
size."""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

LAST_LINES = 20
POINTS_UP = re.compile(r"\babove\b")
ERROR = re.compile(
    r"(?:\(\w+ pid=\d+\) +)?(?:ERROR [\d :-]+\[[\w.]+:\d+\] "
    r")?((?:\w+\.)*\w*(?:Error|Exception)\w*: .+)"
)
"""The last line of a traceback, after the prefix that vLLM puts before the lines of its engine."""
FAREWELL = " [shutdown] "
"""Part of the lines in which vLLM logs its shutdown, after those that give the cause."""
RAISED = re.compile(r"(?:\[rank\d+\]:\s*)?((?:trainer: |[\w.]*(?:Error|Exception|Exit)(?:: |$)).*)")
"""The last line of a traceback of the trainer, or the message with which it exited."""
ROUTINE = re.compile(r"(?:\(\w+ pid=\d+\) +)?(?:INFO|DEBUG)[: ]")
"""The beginning of a line in which vLLM or its server logs what is no fault."""
MANY_LINES = 1000
TORCHRUN_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed")
TORCHRUN_ENDS = "] Sending process "
"""Part of the lines in which torchrun says that it ends the other ranks."""
KILLED_RANK = re.compile(
    r"Root Cause .*?rank +: (\d+) .*?exitcode +: -\d+ \(pid: \d+\) +\((SIG\w+)\)", re.DOTALL
)
"""In torchrun's report: the rank whose end was the first, and the signal that ended it."""


MAX_LOG_BYTES, FIRST_BYTES, NEWEST_BYTES = 64 << 20, 8 << 20, 24 << 20
"""Maximum size of a log, and of the parts that are kept when it is larger: its beginning and its
end."""


def trim_logs(logs: Iterable[Path]) -> None:
    """Cuts the middle out of those of these logs that have grown too long. Of a log only one
    process may do so, on its writer's host."""
    with contextlib.suppress(OSError):  # of a listing that they come from
        for log in logs:
            with contextlib.suppress(OSError):
                if log.stat().st_size > MAX_LOG_BYTES:
                    trim(log)


def trim(log: Path) -> None:
    """Cuts the middle out of a log, to which its process keeps appending. Only lines written at
    that moment may be lost, or come before older ones."""
    fd = os.open(log, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        first = os.pread(fd, FIRST_BYTES, 0)
        first_end = first.rfind(b"\n") + 1 or len(first)
        newest = bytearray(os.pread(fd, NEWEST_BYTES, size - NEWEST_BYTES))
        del newest[: newest.find(b"\n") + 1]
        cut = size - first_end - len(newest)
        while piece := os.pread(fd, 1 << 20, size):
            newest += piece
            size += len(piece)
        os.ftruncate(fd, first_end)
        os.write(
            fd,
            b"[rl: %d bytes were cut out here; a log keeps its beginning and its end]\n" % cut
            + newest,
        )
    finally:
        os.close(fd)


def attempts(logs: Path, name: str) -> dict[int, Path]:
    """Returns the logs of a process by attempt, unordered. Attempts count up across restarts and
    resumes."""
    stems = {path.stem.removeprefix(f"{name}-"): path for path in logs.glob(f"{name}-*.log")}
    return {int(attempt): path for attempt, path in stems.items() if attempt.isdigit()}


def next_log(logs: Path, name: str) -> Path:
    """Returns the path of the log for the next attempt of a process, which does not exist yet."""
    return logs / f"{name}-{max(attempts(logs, name), default=0) + 1}.log"


def newest_log(logs: Path, role: str) -> Path | None:
    """Returns the log of a role's last attempt, None if it has none. The ranks of a trainer
    share one."""
    logs_of_role = attempts(logs, re.sub(r"^trainer-\d+$", "trainer", role))
    return logs_of_role[max(logs_of_role)] if logs_of_role else None


def end_of(log: Path) -> str:
    """Returns the last 64 KiB of a log; empty if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        return file.read().decode(errors="replace")
    return ""


def last_lines(log: Path | None, count: int = LAST_LINES) -> list[str]:
    """Returns the last `count` lines of a log that are not blank; empty without a readable log.

    Leaves out what torchrun says of a failure and vLLM's shutdown lines, which follow the traceback
    that matters.
    """
    lines = end_of(log).splitlines() if log else []
    reports = (i for i, line in enumerate(lines) if i and TORCHRUN_REPORT.search(line))
    texts = (line for line in lines[: next(reports, None)] if line.strip())
    return [line for line in texts if FAREWELL not in line and TORCHRUN_ENDS not in line][-count:]


def killed_rank(log: Path) -> str:
    """Says which rank a signal has ended, if torchrun's report in the last lines of a log says
    so; empty if not."""
    match = KILLED_RANK.search(end_of(log))
    return f" because {match[2]} ended rank {match[1]}" if match else ""


def error_line(log: Path | None) -> str:
    """Returns the first error in the last lines of a log, with `#` for numbers, so that it is equal
    in every step. Empty if there is none.

    It takes the first because other ranks report the death of a rank later.
    """
    errors = (match[1] for line in last_lines(log, MANY_LINES) if (match := RAISED.match(line)))
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?|\b(nan|inf)\b", "#", next(errors, ""))


def last_words(log: Path | None) -> str:
    """Returns the last line of a log that is not routine, or the error above it if the line only
    refers to that, as vLLM's server does for its engine. Empty without a readable log."""
    texts = [line for line in last_lines(log, MANY_LINES) if not ROUTINE.match(line)]
    *lines, last = [re.sub(r"^\[rank\d+\]: ", "", line).strip() for line in texts or [""]]
    if not POINTS_UP.search(last):
        return last
    errors = (match[1] for line in reversed(lines) if (match := ERROR.fullmatch(line)))
    return next((error for error in errors if not POINTS_UP.search(error)), last)
