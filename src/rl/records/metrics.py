"""A run's numbers as columns, followed while they are written."""

from pathlib import Path

import numpy as np

from rl.run_dir.files import LineReader
from rl.run_dir.metrics import ALWAYS, NEWEST_BYTES, parse_line, source_files

Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] int64, and the values of a metric at them [n] float64."""


class Metrics:
    """The lines of metrics.jsonl, and those of its sources that are not merged yet, a row for each (step, source)."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.rows: dict[tuple[int, str], int] = {}
        self.arrays: dict[str, np.ndarray] = {}
        """Values by metric, nan where a row has none; as long as there is room for, see `size`."""
        self.times = np.empty(0)
        self.readers: dict[Path, LineReader] = {}
        self.inodes: dict[Path, int] = {}

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def refresh(self) -> None:
        """Reads the lines that are new; all again if a file was cut, as a resume does."""
        files = [self.path, *source_files(self.path)]
        for path in files:
            if path in self.inodes and self._was_replaced(path):
                self._forget()
                break
        for path in files:
            if path not in self.readers:
                if not path.exists():
                    continue
                self.readers[path], self.inodes[path] = LineReader(path), path.stat().st_ino
                if path != self.path and (size := path.stat().st_size) > NEWEST_BYTES:
                    self.readers[path].offset = size - NEWEST_BYTES  # within a line, which is passed over as damaged
            while lines := self.readers[path].new():
                for line in lines:
                    self._add(line)

    def _was_replaced(self, path: Path) -> bool:
        try:
            there = path.stat()
        except FileNotFoundError:
            return True
        return there.st_ino != self.inodes[path] or there.st_size < self.readers[path].offset

    def _add(self, text: bytes) -> None:
        line = parse_line(text)
        if line is None:
            return
        place = self.rows.setdefault((line["step"], line["source"]), len(self.rows))
        if place >= len(self.times):
            room = max(256, place + place // 4)
            for name, old in self.arrays.items():
                self.arrays[name] = grown(old, room)
            self.times = grown(self.times, room)
        self.times[place] = line.get("time") or np.nan
        for name, value in line.items():
            if name not in ALWAYS:
                if name not in self.arrays:
                    self.arrays[name] = np.full(len(self.times), np.nan)
                self.arrays[name][place] = np.nan if value is None else value

    @property
    def names(self) -> list[str]:
        """The metrics that there are."""
        return sorted(self.arrays)

    @property
    def sources(self) -> list[str]:
        """Those that wrote them: trainer, orchestrator, eval."""
        return sorted({source for _, source in self.rows})

    def columns(self, source: str | None = None) -> dict[str, np.ndarray]:
        """step, source, time (seconds since the epoch) and every metric as columns, in the order of the steps. source: of one alone."""
        keys = sorted(key for key in self.rows if source in (None, key[1]))
        places = np.array([self.rows[key] for key in keys], np.int64)
        found = {
            "step": np.array([step for step, _ in keys], np.int64),
            "source": np.array([of for _, of in keys], object),
            "time": self.times[places],
        }
        values = ((name, self.arrays[name][places]) for name in self.names)
        return found | {name: column for name, column in values if not source or not np.isnan(column).all()}

    def curve(self, name: str, source: str | None = None) -> Curve:
        """The finite values of a metric over steps; of several sources that have it, of the first by name."""
        for of in [source] if source else self.sources:
            found = self.columns_of(name, of)
            if len(found[0]):
                return found
        return np.empty(0, np.int64), np.empty(0)

    def columns_of(self, name: str, source: str) -> Curve:
        """The curve of one source."""
        if name not in self.arrays:
            return np.empty(0, np.int64), np.empty(0)
        keys = sorted((step, place) for (step, of), place in self.rows.items() if of == source)
        steps, values = np.array([step for step, _ in keys], np.int64), self.arrays[name][[place for _, place in keys]]
        return steps[np.isfinite(values)], values[np.isfinite(values)]


def grown(array: np.ndarray, room: int) -> np.ndarray:
    """A longer copy, the rest of it nan."""
    longer = np.full(room, np.nan)
    longer[: len(array)] = array
    return longer
