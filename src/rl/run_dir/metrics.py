"""A run's numbers: `metrics/<source>.jsonl`, to which one process appends, and `metrics.jsonl`, into which one process merges them all.

`metrics.jsonl` is what console, W&B, curves and people read. Its writer is `rl`; without `rl` above it, the orchestrator, which outlives
the trainer; where there is no orchestrator, either, the trainer. A shared file system does not keep appends of two hosts apart, so no file
has two writers. What is merged is what the sources have and `metrics.jsonl` has not, by checksums of whole lines: so a kill between any two
system calls neither loses a line nor doubles it, and runs from before there were sources go on.
"""

import contextlib
import heapq
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rl.run_dir.files import PIECE_BYTES, LineReader, end_of_last_line, files_in, with_path, write_all, write_file
from rl.run_dir.hashes import blake2b
from rl.run_dir.spans import is_time
from rl.system import faults
from rl.system.errors import RunError

Lines = dict[tuple[int, str], dict[str, Any]]
"""The lines of metrics.jsonl by (step, source): see read_metrics."""
Curve = tuple[list[int], list[float]]
"""Steps, and the values of a metric at them."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
ALWAYS = ("step", "time", "source")
"""Fields of every line."""
NEWEST_BYTES = 1 << 22
"""The end of a metrics file that has the newest steps for sure: a line has some kilobytes."""
WHOLE = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')
MERGE_S = 1.0
LIMIT = 1 << 63
"""Above it an integer does not fit into 64 bits."""


def sources_dir(path: Path) -> Path:
    """The folder of the sources that are merged into the file `path`."""
    return path.with_suffix("")


def source_files(path: Path) -> list[Path]:
    """The sources that are merged into the file `path`. Raises PermissionError."""
    return files_in(sources_dir(path), ".jsonl")


def open_lines(path: Path) -> int:
    """Opens a file for its only writer to append lines. What is behind the last whole line was being written by one that was killed, and is
    cut off. Returns the file descriptor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n":
        with path.open("rb") as file:
            os.ftruncate(descriptor, end_of_last_line(file))
    return descriptor


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
        """Appends what is new, with one write, or several of PIECE_BYTES. Lines of several sources that come at once are in the order of
        their times."""
        known = self.left and all(identity(path, self.path) == left for path, left in self.left.items())
        merged = set[bytes]()
        if not known:
            os.close(open_lines(self.path))
            merged, self.readers = {blake2b(line) for line in all_lines(LineReader(self.path))}, {}
        new = [self._new_lines(source, merged) for source in source_files(self.path)]
        self.left, data = None, bytearray()
        for line in heapq.merge(*new, key=time_of):
            data += line + b"\n"
            if len(data) >= PIECE_BYTES:
                self._append(data)
                data = bytearray()
        if data:
            self._append(data)
        self.left = {path: identity(path, self.path) for path in (self.path, *self.readers)}

    def _new_lines(self, source: Path, merged: set[bytes]) -> Iterator[bytes]:
        """The lines of a source that were not read before, less those whose checksums are in `merged`; in memory piece by piece."""
        reader = self.readers.setdefault(source, LineReader(source))
        return (line for line in all_lines(reader) if not (merged and blake2b(line) in merged) and parse_line(line))

    def _append(self, data: bytearray) -> None:
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


def all_lines(reader: LineReader) -> Iterator[bytes]:
    """The lines that are new, piece by piece: a long run has a gigabyte of them."""
    while lines := reader.new():
        yield from lines


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
    """Follows a metrics file. It gives as many lines at once as memory may hold: whoever wants all asks until there are none."""

    def new(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The content of the lines that were completed since the last call, without damaged ones."""
        return [content for content in map(parse_line, super().new()) if content]


def parse_line(line: bytes, wanted: Callable[[str], bool] | None = None) -> dict[str, Any] | None:
    """The content of a line, of its metrics those that are `wanted`, else all. None for one that its writer did not finish: it was killed,
    or the disk full."""
    try:
        content = msgspec.json.decode(line)
    except UNREADABLE:
        whole = line.rfind(b'{"step": ')  # another process's line after one that was not finished
        return parse_line(line[whole:], wanted) if whole > 0 else None
    if not (isinstance(content, dict) and type(content.get("step")) is int and isinstance(content.get("source"), str)):
        return None
    if not is_number(content["step"]):
        return None
    if wanted is not None:
        content = {name: value for name, value in content.items() if name in ALWAYS or wanted(name)}
    found = {key: value for key, value in content.items() if key == "source" or value is None or is_number(value)}
    if not is_time(found.get("time")):
        del found["time"]
    return found


def is_number(value: Any) -> bool:
    """Whether a value of a line is a number that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -LIMIT <= value < LIMIT)


def merge_lines(into: Lines, lines: list[dict[str, Any]]) -> None:
    """Adds lines by (step, source). Of two values of a metric the later one counts, so a resume never doubles a curve."""
    for line in lines:
        key = (line["step"], line["source"])
        into[key] = into[key] | line if key in into else line


def read_metrics(path: Path, source: str = "", wanted: Callable[[str], bool] | None = None, last_bytes: int | None = None) -> Lines:
    """The values of a run by (step, source), also those that are not merged yet; see merge_lines.

    `source`: the only one whose lines are read. `wanted`: whether a metric is kept, by its name. `last_bytes`: that are read of
    metrics.jsonl, and as many of its sources together.
    """
    merged: Lines = {}
    mark = f'"source": "{source}"'.encode()  # as MetricsLog writes it

    def add(lines: Iterator[bytes]) -> None:
        for line in lines:
            if (not source or mark in line) and (content := parse_line(line, wanted)):
                merge_lines(merged, [content])

    add(whole_lines(path, last_bytes))
    sources = source_files(path)
    for file in sources:  # of which only the newest lines can be missing there; those that are not come to the same values again
        add(whole_lines(file, (NEWEST_BYTES if last_bytes is None else last_bytes) // len(sources)))
    return {key: line for key, line in merged.items() if key[1] == source} if source else merged


def whole_lines(path: Path, last_bytes: int | None) -> Iterator[bytes]:
    """The whole lines in the last bytes of a file, or in all of it; none if there is no file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if last_bytes is not None and (start := os.fstat(file.fileno()).st_size - last_bytes) > 0:
            file.seek(start)
            file.readline()
        for line in file:
            if line.endswith(b"\n"):
                yield line


def curve(lines: Lines, source: str, metric: str) -> Curve:
    """The finite values of a metric over steps."""
    points = sorted((step, line[metric]) for (step, of), line in lines.items() if of == source and line.get(metric) is not None)
    return [step for step, _ in points], [value for _, value in points]


class Numbers(Protocol):
    """What a diagnosis asks of a run's metrics: of whoever follows them, or of lines that were read once."""

    def steps(self, source: str) -> Sequence[int]:
        """The steps of which a source has a line, ascending."""

    def points(self, source: str, metric: str, last: int | None = None) -> Curve:
        """Steps and finite values of a metric, all or the `last` ones."""

    def newest(self) -> float | None:
        """When the newest line was written, seconds since the epoch; None without one."""


class ReadOnce:
    """The Numbers of lines that were read."""

    def __init__(self, lines: Lines):
        self.lines = lines

    def steps(self, source: str) -> Sequence[int]:
        return sorted(step for step, of in self.lines if of == source)

    def points(self, source: str, metric: str, last: int | None = None) -> Curve:
        steps, values = curve(self.lines, source, metric)
        return (steps, values) if last is None else (steps[-last:], values[-last:])

    def newest(self) -> float | None:
        return max((time for line in self.lines.values() if (time := line.get("time"))), default=None)


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
    for file in (*source_files(path), path):  # it last: a line that only a source has would be merged again
        gone = cut_lines(file, last_step) if file.exists() and has_lines_after(file, last_step) else []
    return gone


def cut_lines(path: Path, last_step: int) -> list[bytes]:
    """Removes lines from one file, atomically, and returns them; see cut_metrics."""
    kept: list[bytes] = []
    gone: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        content = parse_line(line)
        (kept if content and content["step"] <= last_step else gone).append(line)
    if gone:
        write_file(path, b"".join(kept))
    return gone


def has_lines_after(path: Path, last_step: int) -> bool:
    """Whether a line may be of a later step, or is damaged: by how lines begin and end, for a long run has a gigabyte of them."""
    with path.open("rb") as file:
        return any((match := WHOLE.fullmatch(line)) is None or int(match[1]) > last_step for line in file)
