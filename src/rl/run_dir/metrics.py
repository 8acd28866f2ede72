"""A run's numbers: `metrics/<source>.jsonl`, to which one process appends, and `metrics.jsonl`, into which one process merges them all.

`metrics.jsonl` is what console, W&B, curves and people read. Its writer is `rl`; without `rl` above it, the orchestrator, which outlives
the trainer; where there is no orchestrator, either, the trainer. A shared file system does not keep appends of two hosts apart, so no file
has two writers. What is merged is what the sources have and `metrics.jsonl` has not, compared byte by byte: so a kill between any two
system calls neither loses a line nor doubles it, and runs from before there were sources go on.
"""

import contextlib
import heapq
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl.run_dir.files import LineReader, with_path, write_all, write_file
from rl.system import faults
from rl.system.errors import RunError

Lines = dict[tuple[int, str], dict[str, Any]]
"""The lines of metrics.jsonl by (step, source): see read_metrics."""
Curve = tuple[list[int], list[float]]
"""Steps, and the values of a metric at them."""
MERGE_S = 1.0


def sources_dir(path: Path) -> Path:
    """The folder of the sources that are merged into the file `path`."""
    return path.with_suffix("")


def open_lines(path: Path) -> int:
    """Opens a file for its only writer to append lines. What is behind the last whole line was being written by one that was killed, and is
    cut off. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
        os.ftruncate(file, path.read_bytes().rfind(b"\n") + 1)
    return file


class MetricsLog:
    """Appends the lines of one source, to its file beside `path`, which is the run's metrics.jsonl."""

    def __init__(self, path: Path, source: str, fence: Callable[[], None] | None = None):
        """fence: called before a line is written; what it raises keeps it from being written."""
        self.path, self.source, self.fence = sources_dir(path) / f"{source}.jsonl", source, fence
        self.file = open_lines(self.path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written as null."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), "source": self.source, **finite})
        data = line.encode() + b"\n"
        if self.fence:
            self.fence()
        try:
            write_all(self.file, data, "metrics")
        except OSError as error:
            raise with_path(error, self.path) from None
        faults.point("metrics.done")


class Merger:
    """Writes metrics.jsonl: appends what the sources have and it has not. One process in a run has one."""

    def __init__(self, path: Path, fence: Callable[[], None] | None = None):
        """fence: see MetricsLog."""
        self.path, self.fence = path, fence
        self.readers: dict[Path, LineReader] = {}
        self.left: dict[Path, tuple[int, ...]] | None = None
        """What tells that a file is still as this merger left it: its inode (a cut replaces it), of metrics.jsonl its size, too."""

    def merge(self) -> None:
        """Appends what is new, with one write. Lines of several sources that come at once are in the order of their times."""
        merged, known = set[bytes](), self.left and all(identity(path, self.path) == left for path, left in self.left.items())
        if not known:
            os.close(open_lines(self.path))
            merged, self.readers = set(self.path.read_bytes().splitlines()), {}
        new = []
        for source in sorted(sources_dir(self.path).glob("*.jsonl")):
            reader = self.readers.setdefault(source, LineReader(source))
            new.append([line for line in reader.new() if line not in merged and parse_line(line)])
        self.left = None
        if data := b"".join(line + b"\n" for line in heapq.merge(*new, key=time_of)):
            self._append(data)
        self.left = {path: identity(path, self.path) for path in (self.path, *self.readers)}

    def _append(self, data: bytes) -> None:
        if self.fence:
            self.fence()
        file = open_lines(self.path)
        try:
            write_all(file, data, "merged")
        except OSError as error:
            raise with_path(error, self.path) from None
        finally:
            os.close(file)
        faults.point("merged.done")


def identity(path: Path, merged: Path) -> tuple[int, ...]:
    """See Merger.left."""
    if not path.exists():
        return ()
    there = path.stat()
    return (there.st_ino, there.st_size) if path == merged else (there.st_ino,)


@contextlib.contextmanager
def merging(path: Path, fence: Callable[[], None]) -> Iterator[None]:
    """Merges every MERGE_S seconds in a thread, and at the end of the context once more: for a process that has no `rl` above it.

    fence: see MetricsLog. A disk that cannot be written to is tried again: the lines are in their sources.
    """
    merger, over = Merger(path, fence), threading.Event()

    def merge() -> None:
        while not over.wait(MERGE_S):
            with contextlib.suppress(OSError, RunError):  # whoever was given up learns it where it commits
                merger.merge()

    thread = threading.Thread(target=merge, name="merge-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(OSError, RunError):
            merger.merge()


def time_of(line: bytes) -> float:
    """The time that a line bears. It only orders lines for people who read the file."""
    return (parse_line(line) or {}).get("time") or 0.0


class MetricsReader(LineReader):
    """Follows a metrics file."""

    def new(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The content of the lines that were completed since the last call, without damaged ones."""
        return [content for content in map(parse_line, super().new()) if content]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The content of a line, or None for one that its writer did not finish (it was killed, or the disk full)."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        whole = line.rfind(b'{"step": ')  # another process's line after one that was not finished
        return parse_line(line[whole:]) if whole > 0 else None
    if not (isinstance(content, dict) and type(content.get("step")) is int and isinstance(content.get("source"), str)):
        return None
    return {key: value for key, value in content.items() if key == "source" or value is None or isinstance(value, (int, float))}


def merge_lines(into: Lines, lines: list[dict[str, Any]]) -> None:
    """Adds lines by (step, source). Of two values of a metric the later one counts, so a resume never doubles a curve."""
    for line in lines:
        key = (line["step"], line["source"])
        into[key] = into.get(key, {}) | line


def read_metrics(path: Path) -> Lines:
    """The values of a run by (step, source), also those that are not merged yet; see merge_lines."""
    raw = LineReader(path).new()
    seen = set(raw)
    for source in sorted(sources_dir(path).glob("*.jsonl")):
        raw += [line for line in LineReader(source).new() if line not in seen]
    merged: Lines = {}
    merge_lines(merged, [content for content in map(parse_line, raw) if content])
    return merged


def curve(lines: Lines, source: str, metric: str) -> Curve:
    """The finite values of a metric over steps."""
    points = sorted((step, line[metric]) for (step, of), line in lines.items() if of == source and line.get(metric) is not None)
    return [step for step, _ in points], [value for _, value in points]


def environment_rewards(line: dict[str, Any]) -> dict[str, float]:
    """Environment -> mean training reward, from a line of the orchestrator."""
    keys = (key.split("/") for key in line)
    return {parts[1]: line["/".join(parts)] for parts in keys if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean"}


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes the lines of steps after `last_step`, and damaged ones, from metrics.jsonl and its sources. Returns what metrics.jsonl had.

    Only for the process that merges, while no source is written. What a kill leaves undone the same call does again.
    """
    if sources_dir(path).is_dir():
        Merger(path).merge()
    gone: list[bytes] = []
    for file in [*sorted(sources_dir(path).glob("*.jsonl")), path]:  # it last: a line that only a source has would be merged again
        kept, gone = [], []
        for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
            content = parse_line(line)
            (kept if content and content["step"] <= last_step else gone).append(line)
        if gone:
            write_file(file, b"".join(kept))
    return gone
