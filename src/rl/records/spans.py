"""Follows the spans and gauges that the processes of a run write, in wall time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.run_dir.files import LineReader, files_in
from rl.run_dir.metrics import all_lines
from rl.run_dir.spans import DECODER, Gauges, Span, Start, is_time, old
from rl.wire.messages import UNREADABLE

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
        self.gauges: list[Counted] = []
        self.sorted = np.empty(0)
        """See `begins`."""

    def refresh(self) -> None:
        for text in all_lines(self.reader):
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
        elif line.begin <= line.end and is_time(line.begin + offset) and is_time(line.end + offset):
            self.spans.append(
                Done(
                    self.process,
                    line.lane,
                    line.name,
                    line.begin + offset,
                    line.end + offset,
                    line.step,
                    line.about,
                )
            )

    @property
    def begins(self) -> np.ndarray:
        """Begin times of the spans, ascending, [n]."""
        if len(self.sorted) != len(self.spans):
            self.sorted = np.sort([done.begin for done in self.spans])
        return self.sorted


class Recording:
    """The files of `spans/`. Each is read once: a rotated file is recognised by its inode."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[tuple[str, int], SpanFile] = {}
        """By process and inode; the older file of a process comes first."""

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        found = {}
        for path in files_in(self.folder, ".jsonl"):
            for part in (old(path), path):
                try:
                    there = part.stat()
                except FileNotFoundError:
                    continue
                file = self.files.get((path.stem, there.st_ino))
                if file is None or file.reader.offset > there.st_size:  # new or truncated
                    file = SpanFile(part, path.stem)
                file.reader.path = part
                file.refresh()
                found[path.stem, there.st_ino] = file
        self.files = found

    @property
    def ends(self) -> tuple[float, float] | None:
        """The begin of the first span and the end of the last one; None without spans."""
        some = [file for file in self.files.values() if file.spans]
        return (
            (
                min(float(file.begins[0]) for file in some),
                max(done.end for file in some for done in file.spans),
            )
            if some
            else None
        )

    @property
    def counted(self) -> dict[str, float]:
        """The time of each process's last gauges, which it writes after its spans every two
        seconds."""
        return {file.process: file.gauges[-1].time for file in self.files.values() if file.gauges}

    def first(self, time: float, process: str | None) -> Iterator[float]:
        """Yields, per file, the begin of the first span at or after a time. process: None for
        all."""
        for file in self.files.values():
            if process in (None, file.process) and (
                at := int(np.searchsorted(file.begins, time))
            ) < len(file.begins):
                yield float(file.begins[at])

    def between(self, begin: float, end: float) -> tuple[list[Done], list[Counted]]:
        """The spans that overlap the interval from `begin` to `end`, and the gauges in it, in
        order within each file."""
        files = self.files.values()
        return (
            [
                done
                for file in files
                for done in file.spans
                if done.end >= begin and done.begin <= end
            ],
            [counted for file in files for counted in file.gauges if begin <= counted.time <= end],
        )
