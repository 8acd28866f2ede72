"""A run's metrics as columns, followed while they are written. Commands that must start fast
import this lazily: numpy takes 0.1 s."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.run_dir.files import LineReader
from rl.run_dir.metrics import (
    ALWAYS,
    MOST_NAMES,
    NEWEST_BYTES,
    all_lines,
    environment_rewards,
    parse_line,
    source_files,
)

Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] int64, and values of a metric at these steps [n] float64."""


Points = tuple[list[int], list[float]]
"""A curve as lists."""


class Table:
    """The lines of one source, one row per step."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        """Step -> row."""
        self.firsts, self.times = np.empty(0), np.empty(0)
        """Times of the first and the newest line of a row, seconds since the epoch; a step that
        was trained again has several lines."""
        self.arrays: dict[str, np.ndarray] = {}
        """Values by metric, nan where a row has none; with spare capacity for more rows."""
        self.left_out = False
        """Whether there are metrics beyond MOST_NAMES."""
        self.order = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds a line; the later of two values of a metric counts."""
        row = self.rows.setdefault(step, len(self.rows))
        if row >= len(self.times):
            room = max(256, row + row // 4)
            self.arrays = {name: grown(old, room) for name, old in self.arrays.items()}
            self.firsts, self.times = grown(self.firsts, room), grown(self.times, room)
        self.times[row] = line.get("time") or np.nan
        if np.isnan(self.firsts[row]):
            self.firsts[row] = self.times[row]
        for name, value in line.items():
            if name not in ALWAYS:
                if name not in self.arrays:
                    if len(self.arrays) >= MOST_NAMES:
                        self.left_out = True
                        continue
                    self.arrays[name] = np.full(len(self.times), np.nan)
                self.arrays[name][row] = np.nan if value is None else value

    def ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps, ascending, and their rows."""
        if len(self.order[0]) != len(self.rows):
            steps, rows = (
                np.array([*self.rows], np.int64),
                np.array([*self.rows.values()], np.int64),
            )
            order = np.argsort(steps)
            self.order = steps[order], rows[order]
        return self.order


class Numbers:
    """The lines of metrics.jsonl, and those of its sources that are not merged yet."""

    def __init__(self, path: Path | None = None):
        """path: metrics.jsonl; None if the lines are given, see `of`."""
        self.path = path
        self._forget()

    @classmethod
    def of(cls, lines: Mapping[tuple[int, str], Mapping[str, Any]]) -> "Numbers":
        """Makes it from lines by (step, source)."""
        found = cls()
        for (step, source), line in lines.items():
            found.tables.setdefault(source, Table()).add(step, line)
        return found

    @classmethod
    def read(cls, path: Path) -> "Numbers":
        """Reads all that a file and its sources have now."""
        found = cls(path)
        found.refresh()
        return found

    def _forget(self) -> None:
        self.tables: dict[str, Table] = {}
        """Tables by source."""
        self.readers: dict[Path, LineReader] = {}
        self.inodes: dict[Path, int] = {}

    def refresh(self) -> None:
        """Reads new lines, or all lines again if a file was cut, as a resume does."""
        assert self.path
        files = [self.path, *source_files(self.path)]
        if any(self._was_replaced(path) for path in self.inodes):
            self._forget()
        for path in files:
            if path not in self.readers:
                if not path.exists():
                    continue
                self.readers[path], self.inodes[path] = LineReader(path), path.stat().st_ino
                if path != self.path and (size := path.stat().st_size) > NEWEST_BYTES:
                    # inside a line, which is skipped as damaged
                    self.readers[path].offset = size - NEWEST_BYTES
            for line in filter(None, map(parse_line, all_lines(self.readers[path]))):
                self.tables.setdefault(line["source"], Table()).add(line["step"], line)

    def _was_replaced(self, path: Path) -> bool:
        try:
            there = path.stat()
        except FileNotFoundError:
            return True
        return there.st_ino != self.inodes[path] or there.st_size < self.readers[path].offset

    @property
    def names(self) -> list[str]:
        return sorted({name for table in self.tables.values() for name in table.arrays})

    def names_of(self, source: str) -> list[str]:
        return sorted(self.tables[source].arrays) if source in self.tables else []

    def columns(self, source: str | None = None) -> dict[str, np.ndarray]:
        """Returns step, source, time (seconds since the epoch) and every metric as columns,
        ordered by step, then source. source: only the lines of this one."""
        tables = {
            name: table for name, table in sorted(self.tables.items()) if source in (None, name)
        }
        parts = {name: table.ordered() for name, table in tables.items()}
        lengths = [len(steps) for steps, _ in parts.values()]
        steps = np.concatenate([np.empty(0, np.int64), *(steps for steps, _ in parts.values())])
        order = np.argsort(steps, kind="stable")

        def values(table: Table, name: str, rows: np.ndarray) -> np.ndarray:
            return table.arrays[name][rows] if name in table.arrays else np.full(len(rows), np.nan)

        def column(name: str) -> np.ndarray:
            found = (values(tables[of], name, rows) for of, (_, rows) in parts.items())
            return np.concatenate([np.empty(0), *found])[order]

        times = np.concatenate(
            [np.empty(0), *(tables[name].times[rows] for name, (_, rows) in parts.items())]
        )
        sources = np.repeat(np.array([*tables], object), lengths)
        names = sorted({name for table in tables.values() for name in table.arrays})
        return {
            "step": steps[order],
            "source": sources[order],
            "time": times[order],
            **{name: column(name) for name in names},
        }

    def source(self, name: str) -> str | None:
        """Returns the first source by name that has a metric; None if there is none."""
        return next((of for of, table in sorted(self.tables.items()) if name in table.arrays), None)

    def curve(self, name: str, source: str | None = None) -> Curve:
        """Returns the finite values of a metric over steps, from the first source by name that
        has it. Empty if none has it."""
        table = self.tables.get(source or self.source(name) or "")
        if table is None or name not in table.arrays:
            return np.empty(0, np.int64), np.empty(0)
        steps, rows = table.ordered()
        values = table.arrays[name][rows]
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def reward(self) -> Curve:
        """Returns the mean reward over steps. Of several environments each counts the same, as
        their shares of a step vary; where a step has no rollouts of one, its reward is
        interpolated."""
        names = environment_rewards({name: name for name in self.names_of("orchestrator")}).values()
        curves = [
            curve for curve in (self.curve(name, "orchestrator") for name in names) if len(curve[0])
        ]
        steps, values = self.curve("reward/mean", "orchestrator")
        return steps, np.mean([np.interp(steps, *curve) for curve in curves], axis=0) if len(
            curves
        ) > 1 else values

    # As lists

    def steps(self, source: str) -> list[int]:
        """Returns the steps for which a source has a line, ascending."""
        return self.tables[source].ordered()[0].tolist() if source in self.tables else []

    def points(self, source: str, metric: str, last: int | None = None) -> Points:
        """Returns steps and finite values of a metric, all or the `last` ones."""
        steps, values = self.curve(metric, source)
        begin = -last if last else None
        return steps[begin:].tolist(), values[begin:].tolist()

    def newest(self) -> float | None:
        """Returns the time of the newest line, seconds since the epoch; None if there is none."""
        times = np.concatenate(
            [np.empty(0), *(table.times[: len(table.rows)] for table in self.tables.values())]
        )
        times = times[np.isfinite(times)]
        return float(times.max()) if len(times) else None


def grown(array: np.ndarray, room: int) -> np.ndarray:
    """Returns a longer copy, padded with nan."""
    longer = np.full(room, np.nan)
    longer[: len(array)] = array
    return longer
