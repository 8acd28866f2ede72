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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl.run_dir.digests import blake2b
from rl.run_dir.files import (
    PIECE_BYTES,
    UNREADABLE,
    LineReader,
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
MOST_NAMES = 10_000
"""Maximum number of metrics of a source that are read as columns: a file that somebody else made
may have any number."""
WHOLE = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')
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


class MetricsLog:
    """Appends the lines of one source to its file. `path` is the run's metrics.jsonl."""

    def __init__(self, path: Path, source: str, fence: Callable[[], None] | None = None):
        """fence: called before a line is written; an exception it raises prevents the write."""
        self.path, self.source, self.fence = sources_dir(path) / f"{source}.jsonl", source, fence
        self.file = open_lines(self.path)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written
        as null."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps(
            {"step": step, "time": round(time.time(), 3), "source": self.source, **finite}
        )
        data = line.encode() + b"\n"
        if self.fence:
            self.fence()
        try:
            write_all(self.file, data, "metrics")
        except OSError as error:
            raise with_path(error, self.path) from None
        faults.point("metrics.done")


class Merger:
    """Writes metrics.jsonl: appends the lines of the sources that it lacks. Only one process of
    a run has a Merger."""

    def __init__(self, path: Path, fence: Callable[[], None] | None = None):
        """fence: see MetricsLog."""
        self.path, self.fence = path, fence
        self.readers: dict[Path, LineReader] = {}
        self.left: dict[Path, tuple[int, ...]] | None = None
        """Identity of each file as this merger left it: its inode (a cut replaces it), and for
        metrics.jsonl also its size."""

    def merge(self) -> None:
        """Appends new lines in one write, or in several of PIECE_BYTES. New lines of different
        sources are ordered by time."""
        known = self.left and all(
            identity(path, self.path) == left for path, left in self.left.items()
        )
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
        """Yields the new lines of a source whose checksums are not in `merged`, reading piece by
        piece."""
        reader = self.readers.setdefault(source, LineReader(source))
        return (
            line
            for line in all_lines(reader)
            if not (merged and blake2b(line) in merged) and parse_line(line)
        )

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
    """Yields the new lines, reading piece by piece: a long run has a gigabyte of them."""
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
    """Merges every MERGE_S seconds in a thread, and once more at the end of the context: for a
    process without `rl` above it.

    fence: see MetricsLog. If the disk cannot be written, the merge is retried: the lines are still
    in their sources.
    """
    merger, over = Merger(path, fence), threading.Event()

    def merge() -> None:
        while not over.wait(MERGE_S):
            # a process that lost its role learns that at its next commit
            with contextlib.suppress(OSError, RunError):
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
    """Returns the time in a line. It only serves to order lines for people who read the file."""
    return (parse_line(line) or {}).get("time") or 0.0


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
    if not (
        isinstance(content, dict)
        and type(content.get("step")) is int
        and isinstance(content.get("source"), str)
    ):
        return None
    if not is_number(content["step"]):
        return None
    found = {
        key: value
        for key, value in content.items()
        if key == "source" or value is None or is_number(value)
    }
    if not is_time(found.get("time")):
        del found["time"]
    return found


def is_number(value: Any) -> bool:
    """Returns whether a value of a line is a number that fits into 64 bits."""
    return isinstance(value, float) or (isinstance(value, int) and -LIMIT <= value < LIMIT)


def merge_lines(into: Lines, lines: list[dict[str, Any]]) -> None:
    """Adds lines by (step, source). The later of two values of a metric counts, so a resume
    never duplicates a curve."""
    for line in lines:
        key = (line["step"], line["source"])
        into[key] = into[key] | line if key in into else line


def read_metrics(path: Path, source: str = "", last_bytes: int | None = None) -> Lines:
    """Returns the lines of a run by (step, source), including those not merged yet; see
    merge_lines. For a whole run rl.run_dir.numbers takes a tenth of the memory.

    `source`: reads only lines of this one. `last_bytes`: reads that many bytes of metrics.jsonl,
    and as many of all sources together.
    """
    merged: Lines = {}
    mark = f'"source": "{source}"'.encode()  # as MetricsLog writes it

    sources = source_files(path)
    # of the sources only the newest lines can be missing there; reading others twice changes
    # nothing
    limits = {path: last_bytes}
    limits |= dict.fromkeys(
        sources, (NEWEST_BYTES if last_bytes is None else last_bytes) // max(1, len(sources))
    )
    for file, limit in limits.items():
        reader = LineReader(file)
        if limit is not None and file.exists():
            # inside a line, which is skipped as damaged
            reader.offset = max(0, file.stat().st_size - limit)
        for line in all_lines(reader):
            if (not source or mark in line) and (content := parse_line(line)):
                merge_lines(merged, [content])
    return {key: line for key, line in merged.items() if key[1] == source} if source else merged


def environment_rewards(line: Mapping[str, T]) -> dict[str, T]:
    """Returns environment -> mean training reward, from a line of the orchestrator, or from
    other values by metric."""
    keys = (key.split("/") for key in line)
    return {
        parts[1]: line["/".join(parts)]
        for parts in keys
        if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean"
    }


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes lines of steps after `last_step` and damaged lines from metrics.jsonl and its
    sources. Returns those of metrics.jsonl.

    Only for the process that merges, while no source is written. After a kill the same call
    completes the work.
    """
    if sources_dir(path).is_dir():
        Merger(path).merge()
    gone: list[bytes] = []
    # metrics.jsonl last: otherwise a line left in a source would be merged again
    for file in (*source_files(path), path):
        gone = (
            cut_lines(file, last_step) if file.exists() and has_lines_after(file, last_step) else []
        )
    return gone


def cut_lines(path: Path, last_step: int) -> list[bytes]:
    """Removes lines from one file atomically and returns them; see cut_metrics."""
    kept: list[bytes] = []
    gone: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        content = parse_line(line)
        (kept if content and content["step"] <= last_step else gone).append(line)
    if gone:
        write_file(path, b"".join(kept))
    return gone


def has_lines_after(path: Path, last_step: int) -> bool:
    """Returns whether a line may be of a later step or damaged, judging by begin and end only: a
    long run has a gigabyte of lines."""
    with path.open("rb") as file:
        return any(
            (match := WHOLE.fullmatch(line)) is None or int(match[1]) > last_step for line in file
        )
