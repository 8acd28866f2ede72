"""A run's metrics: `metrics/<source>.jsonl`, to which one process appends, and `metrics.jsonl`,
into which one process merges them all.

Console, W&B, curves and people read `metrics.jsonl`. Its writer is `rl`; without `rl`, the
orchestrator, which outlives the trainer; without an orchestrator, the trainer. A shared file system
does not keep appends of two hosts apart, so no file has two writers. A merge appends the lines that
the sources have and `metrics.jsonl` lacks, by checksums of whole lines: a kill between any two
system calls neither loses nor duplicates a line.
"""

import contextlib
import heapq
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.files import (
    PIECE_BYTES,
    UNREADABLE,
    LineReader,
    blake2b,
    end_of_last_line,
    files_in,
    with_path,
    write_all,
    write_file,
)
from rl.run_dir.spans import is_time
from rl.system import faults
from rl.system.errors import RunError

T = TypeVar("T")
Lines = dict[tuple[int, str], dict[str, Any]]
"""The lines of metrics.jsonl by (step, source): see read_metrics."""
ALWAYS = ("step", "time", "source")
"""Fields of every line."""
NEWEST_BYTES = 1 << 22
"""Size of the end of a metrics file that surely has the newest steps: a line has some kilobytes."""
MERGE_S = 1.0
LIMIT = 1 << 63
"""Integers from here on do not fit into 64 bits."""


def sources_dir(path: Path) -> Path:
    """Returns the folder of the sources that are merged into the file `path`."""
    return path.with_suffix("")


def source_files(path: Path) -> list[Path]:
    """Returns the sources that are merged into the file `path`. Raises PermissionError."""
    return files_in(sources_dir(path), ".jsonl")


def open_lines(path: Path) -> int:
    """Opens a file for its only writer to append lines, and returns the file descriptor. Cuts
    off an incomplete last line, which a killed writer has left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    if (size := os.fstat(descriptor).st_size) and os.pread(descriptor, 1, size - 1) != b"\n":
        with path.open("rb") as file:
            os.ftruncate(descriptor, end_of_last_line(file))
    return descriptor


def append(descriptor: int, path: Path, data: bytes | bytearray) -> None:
    try:
        write_all(descriptor, data, path)
    except OSError as error:
        raise with_path(error, path) from None
    faults.point("done", path)


class MetricsLog:
    """Appends the lines of one source to its file. `path` is the run's metrics.jsonl."""

    def __init__(self, path: Path, source: str, fence: Callable[[], None] | None = None):
        """fence: called before a line is written; an exception it raises prevents the write."""
        self.path, self.source, self.fence = sources_dir(path) / f"{source}.jsonl", source, fence
        self.file = open_lines(self.path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written
        as null."""
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3), "source": self.source}
        for name, value in metrics.items():
            line[name] = value if math.isfinite(value) else None
        if self.fence:
            self.fence()
        append(self.file, self.path, json.dumps(line).encode() + b"\n")


class Merger:
    """Writes metrics.jsonl: appends the lines of the sources that it lacks. Only one process of
    a run has a Merger."""

    def __init__(self, path: Path, fence: Callable[[], None] | None = None):
        """fence: see MetricsLog."""
        self.path, self.fence = path, fence
        self.readers: dict[Path, LineReader] = {}
        self.left: tuple[int, ...] | None = None
        """Inode and size of metrics.jsonl as this merger left it. If they are others, all is read
        again: a cut replaces the file."""

    def merge(self) -> None:
        """Appends new lines in one write, or in several of PIECE_BYTES. New lines of different
        sources are ordered by time, for people who read the file."""
        merged = set[bytes]()
        if self._identity() != self.left:
            merged, self.readers = set(map(blake2b, LineReader(self.path).all())), {}
        self.left, data = None, bytearray()
        for _, line in heapq.merge(*(self._new(file, merged) for file in source_files(self.path))):
            data += line + b"\n"
            if len(data) >= PIECE_BYTES:
                self._append(data)
                data = bytearray()
        if data:
            self._append(data)
        self.left = self._identity()

    def _identity(self) -> tuple[int, ...]:
        if not self.path.exists():
            return ()
        status = self.path.stat()
        return status.st_ino, status.st_size

    def _new(self, source: Path, merged: set[bytes]) -> Iterator[tuple[float, bytes]]:
        """Yields time and text of the new lines of a source whose checksums are not in `merged`."""
        for line in self.readers.setdefault(source, LineReader(source)).all():
            if (content := parse_line(line)) and not (merged and blake2b(line) in merged):
                yield content.get("time", 0.0), line

    def _append(self, data: bytearray) -> None:
        if self.fence:
            self.fence()
        file = open_lines(self.path)
        try:
            append(file, self.path, data)
        finally:
            os.close(file)


@contextlib.contextmanager
def merging(path: Path, fence: Callable[[], None]) -> Iterator[None]:
    """Merges every MERGE_S seconds in a thread, and once more at the end of the context: for a
    process without `rl` above it.

    fence: see MetricsLog. If the disk cannot be written, the merge is retried: the lines are still
    in their sources. A process that lost its role learns that at its next commit.
    """
    merger, over = Merger(path, fence), threading.Event()

    def merge() -> None:
        is_last = False
        while not is_last:
            is_last = over.wait(MERGE_S)
            with contextlib.suppress(OSError, RunError):
                merger.merge()

    thread = threading.Thread(target=merge, name="merge-metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class MetricsReader(LineReader):
    """Follows a metrics file. `new` returns a limited number of lines: to get all, call it until
    it returns none."""

    # parsed lines
    def new(self) -> list[dict[str, Any]]:  # ty: ignore[incompatible-method-override]
        """Returns the content of the lines that were completed since the last call, without
        damaged ones."""
        return [content for content in map(parse_line, super().new()) if content]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the content of a line; None for an incomplete one, whose writer was killed or
    found the disk full."""
    try:
        content = msgspec.json.decode(line)
    except UNREADABLE:
        whole = line.rfind(b'{"step": ')  # another process's line after an incomplete one
        return parse_line(line[whole:]) if whole > 0 else None
    if not isinstance(content, dict) or not isinstance(content.get("source"), str):
        return None
    kept = {
        name: value
        for name, value in content.items()
        if name == "source" or value is None or is_number(value)
    }
    if not is_time(kept.get("time") or 0.0):
        kept.pop("time", None)
    return kept if type(kept.get("step")) is int else None


def is_number(value: Any) -> bool:
    """Returns whether a value of a line is a number that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -LIMIT <= value < LIMIT)


def merge_lines(into: Lines, lines: Iterable[dict[str, Any]]) -> None:
    """Adds lines by (step, source). The later of two values of a metric counts, so a resume
    never duplicates a curve."""
    for line in lines:
        key = line["step"], line["source"]
        into[key] = into.get(key, {}) | line


def read_metrics(path: Path, source: str = "", last_bytes: int | None = None) -> Lines:
    """Returns the lines of a run by (step, source), including those not merged yet; see
    merge_lines. For a whole run rl.run_dir.numbers takes a tenth of the memory.

    `source`: reads only lines of this one. `last_bytes`: reads that many bytes of metrics.jsonl,
    and as many of all sources together.
    """
    merged: Lines = {}
    mark = f'"source": "{source}"'.encode()  # as MetricsLog writes it
    # of the sources only the newest lines can be missing in metrics.jsonl; reading others twice
    # changes nothing
    sources = source_files(path)
    share = (NEWEST_BYTES if last_bytes is None else last_bytes) // max(1, len(sources))
    for file in (path, *sources):
        lines = end_reader(file, last_bytes if file == path else share).all()
        wanted = (line for line in lines if not source or mark in line)
        merge_lines(merged, filter(None, map(parse_line, wanted)))
    return {key: line for key, line in merged.items() if source in ("", key[1])}


def end_reader(file: Path, limit: int | None) -> LineReader:
    """A reader of the last `limit` bytes of a file. It may begin inside a line, which is skipped
    as damaged."""
    is_whole = limit is None or not file.exists()
    return LineReader(file, 0 if is_whole else max(0, file.stat().st_size - limit))


def environment_rewards(line: Mapping[str, T]) -> dict[str, T]:
    """Returns environment -> mean training reward, from a line of the orchestrator, or from
    other values by metric."""
    matches = {name: re.fullmatch("reward/([^/]+)/mean", name) for name in line}
    return {match[1]: line[name] for name, match in matches.items() if match}


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes lines of steps after `last_step` and damaged lines from metrics.jsonl and its
    sources. Returns those of metrics.jsonl.

    Only for the process that merges, while no source is written. After a kill the same call
    completes the work.
    """
    if sources_dir(path).is_dir():
        Merger(path).merge()
    # metrics.jsonl last: otherwise a line left in a source would be merged again
    *_, cut = (cut_lines(file, last_step) for file in (*source_files(path), path))
    return cut


def cut_lines(path: Path, last_step: int) -> list[bytes]:
    """Removes lines from one file atomically and returns them; see cut_metrics."""

    def stays(line: bytes) -> bool:
        content = parse_line(line)
        return content is not None and content["step"] <= last_step

    if not path.exists():
        return []
    with path.open("rb") as file:
        if all(map(stays, file)):
            return []
        file.seek(0)
        lines = list(file)
    write_file(path, b"".join(filter(stays, lines)))
    return [line for line in lines if not stays(line)]
