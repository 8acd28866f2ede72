"""Follows the spans and gauges that the processes of a run write, in wall time."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.run_dir.files import UNREADABLE, LineReader, files_in
from rl.run_dir.spans import DECODER, Gauges, Span, Start, is_time, old

START = b'{"kind":"start"'
"""A line may begin with half of an earlier one whose process was killed."""


@dataclass(frozen=True)
class Done:
    """Something that a process did. Times are seconds since the epoch."""

    process: str
    lane: str
    name: str
    begin: float
    end: float
    step: int | None
    """The step, batch or policy version that it belongs to."""
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Counted:
    """Gauges of a process at one moment."""

    process: str
    time: float
    values: Mapping[str, float]


class SpanFile:
    """The contents of one file. Skips damaged lines, and those before the first Start."""

    def __init__(self, path: Path, process: str):
        self.reader, self.process = LineReader(path), process
        self.offset: float | None = None
        """Wall time minus monotonic time in seconds, as of the newest Start."""
        self.spans: list[Done] = []
        self.begins: list[float] = []
        """Begin times of the spans, ascending."""
        self.gauges: list[Counted] = []

    def refresh(self) -> None:
        for text in self.reader.all():
            try:
                line = DECODER.decode(text[max(0, text.rfind(START)) :])
            except UNREADABLE:
                continue
            if isinstance(line, Start):
                self.offset = line.time - line.monotonic
            elif self.offset is not None:
                self._add(line, self.offset)

    def _add(self, line: Span | Gauges, offset: float) -> None:
        if isinstance(line, Gauges):
            if is_time(line.at + offset):
                self.gauges.append(Counted(self.process, line.at + offset, line.values))
            return
        begin, end = line.begin + offset, line.end + offset
        if begin <= end and is_time(begin) and is_time(end):
            done = Done(self.process, line.lane, line.name, begin, end, line.step, line.about)
            self.spans.append(done)
            insort(self.begins, begin)


class SpanRecording:
    """The files of `spans/`. Each is read once: a rotated file is recognised by its inode."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[tuple[str, int], SpanFile] = {}
        """By process and inode; the older file of a process comes first."""

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        files = {}
        for path in files_in(self.folder, ".jsonl"):
            for version in (old(path), path):
                try:
                    status = version.stat()
                except FileNotFoundError:
                    continue
                file = self.files.get((path.stem, status.st_ino))
                if file is None or file.reader.offset > status.st_size:  # new or truncated
                    file = SpanFile(version, path.stem)
                file.reader.path = version
                file.refresh()
                files[path.stem, status.st_ino] = file
        self.files = files

    @property
    def ends(self) -> tuple[float, float] | None:
        """The begin of the first span and the end of the last one; None without spans."""
        begins = [file.begins[0] for file in self.files.values() if file.begins]
        ends = (done.end for file in self.files.values() for done in file.spans)
        return (min(begins), max(ends)) if begins else None

    @property
    def counted(self) -> dict[str, float]:
        """The time of each process's last gauges, which it writes after its spans every two
        seconds."""
        return {file.process: file.gauges[-1].time for file in self.files.values() if file.gauges}

    def first(self, time: float, process: str | None) -> Iterator[float]:
        """Yields, per file, the begin of the first span at or after a time. process: None for
        all."""
        for file in self.files.values():
            if process in (None, file.process):
                first = bisect_left(file.begins, time)
                yield from file.begins[first : first + 1]

    def between(self, begin: float, end: float) -> tuple[list[Done], list[Counted]]:
        """The spans that overlap the interval from `begin` to `end`, and the gauges in it, in
        order within each file."""
        spans = (done for file in self.files.values() for done in file.spans)
        gauges = (counted for file in self.files.values() for counted in file.gauges)
        return (
            [done for done in spans if done.end >= begin and done.begin <= end],
            [counted for counted in gauges if begin <= counted.time <= end],
        )
