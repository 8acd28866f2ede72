"""A run's numbers as arrays: its metrics as columns, followed while they are written, and the token
logs. Commands that must start fast import this lazily: numpy takes 0.1 s.

`tokens/000012.safetensors` has the values that the trainer computed at each trained token of batch
12, in the order of the batch's samples. Columns [n], one entry per token with loss_mask True:
`trainer_logprobs` (float32, nats, when the token was first trained), `entropies` (float16, nats),
`flags` (uint8: the bits CLIPPED, MASKED, LATER, FIRST), and with a reference model
`reference_logprobs` (float32, nats). The sampler's log-probabilities are in the batch.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rl.run_dir.files import CorruptFileError, LineReader, reading, write_file
from rl.run_dir.metrics import (
    ALWAYS,
    NEWEST_BYTES,
    end_reader,
    environment_rewards,
    parse_line,
    source_files,
)

Curve = tuple[np.ndarray, np.ndarray]
"""Steps [n] int64, and values of a metric at these steps [n] float64."""
Points = tuple[list[int], list[float]]
"""A curve as lists."""
LEAST_ROOM = 256
"""Rows by which arrays grow at least."""


class Table:
    """The lines of one source, one row per step."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        """Step -> row."""
        self.firsts = self.times = np.empty(0)
        """Times of the first and the newest line of a row, seconds since the epoch; a step that
        was trained again has several lines."""
        self.arrays: dict[str, np.ndarray] = {}
        """Values by metric, nan where a row has none; with spare capacity for more rows."""
        self.order = np.empty(0, np.int64), np.empty(0, np.int64)

    def add(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds a line; the later of two values of a metric counts."""
        row = self.rows.setdefault(step, len(self.rows))
        if row >= len(self.times):
            spare = np.full(max(LEAST_ROOM, row // 4), np.nan)
            self.firsts, self.times = np.append(self.firsts, spare), np.append(self.times, spare)
            self.arrays = {name: np.append(old, spare) for name, old in self.arrays.items()}
        self.times[row] = line.get("time") or np.nan
        if np.isnan(self.firsts[row]):
            self.firsts[row] = self.times[row]
        for name, value in line.items():
            if name in ALWAYS:
                continue
            if name not in self.arrays:
                self.arrays[name] = self.values(name)
            self.arrays[name][row] = np.nan if value is None else value

    def values(self, name: str) -> np.ndarray:
        """Returns the array of a metric; all nan if there is none."""
        return self.arrays[name] if name in self.arrays else np.full(len(self.times), np.nan)

    def ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps, ascending, and their rows."""
        if len(self.order[0]) != len(self.rows):
            steps = np.array([*self.rows], np.int64)  # the rows count up in this order
            order = np.argsort(steps)
            self.order = steps[order], order
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
        numbers = cls()
        for (step, source), line in lines.items():
            numbers._table(source).add(step, line)
        return numbers

    @classmethod
    def read(cls, path: Path) -> "Numbers":
        """Reads all that a file and its sources have now."""
        numbers = cls(path)
        numbers.refresh()
        return numbers

    def _forget(self) -> None:
        self.tables: dict[str, Table] = {}
        """Tables by source."""
        self.readers: dict[Path, tuple[LineReader, int]] = {}
        """Readers, and the inodes of their files."""

    def _table(self, source: str) -> Table:
        return self.tables.setdefault(source, Table())

    def refresh(self) -> None:
        """Reads new lines, or all lines again if a file was cut, as a resume does."""
        assert self.path
        if any(self._was_replaced(path) for path in self.readers):
            self._forget()
        for path in filter(Path.exists, [self.path, *source_files(self.path)]):
            if path not in self.readers:
                reader = end_reader(path, None if path == self.path else NEWEST_BYTES)
                self.readers[path] = reader, path.stat().st_ino
            for line in filter(None, map(parse_line, self.readers[path][0].all())):
                self._table(line["source"]).add(line["step"], line)

    def _was_replaced(self, path: Path) -> bool:
        try:
            status = path.stat()
        except FileNotFoundError:
            return True
        reader, inode = self.readers[path]
        return status.st_ino != inode or status.st_size < reader.offset

    @property
    def names(self) -> list[str]:
        return sorted({name for table in self.tables.values() for name in table.arrays})

    def names_of(self, source: str) -> list[str]:
        return sorted(self.tables[source].arrays) if source in self.tables else []

    def columns(self, source: str | None = None) -> dict[str, np.ndarray]:
        """Returns step, source, time (seconds since the epoch) and every metric as columns,
        ordered by step, then source. source: only the lines of this one."""
        sources = [name for name in sorted(self.tables) if source in (None, name)]
        tables = [self.tables[name] for name in sources]
        rows = [table.ordered()[1] for table in tables]
        steps = np.array([step for name in sources for step in self.steps(name)], np.int64)
        order = np.argsort(steps, kind="stable")

        def column(arrays: Iterable[np.ndarray]) -> np.ndarray:
            columns = [array[chosen] for array, chosen in zip(arrays, rows, strict=True)]
            return np.concatenate([np.empty(0), *columns])[order]

        names = sorted({name for table in tables for name in table.arrays})
        return {
            "step": steps[order],
            "source": np.repeat(np.array(sources, object), [*map(len, rows)])[order],
            "time": column(table.times for table in tables),
            **{name: column(table.values(name) for table in tables) for name in names},
        }

    def source(self, name: str) -> str | None:
        """Returns the first source by name that has a metric; None if there is none."""
        return next((of for of, table in sorted(self.tables.items()) if name in table.arrays), None)

    def curve(self, name: str, source: str | None = None) -> Curve:
        """Returns the finite values of a metric over steps, from the first source by name that
        has it. Empty if none has it."""
        table = self.tables.get(source or self.source(name) or "", Table())
        steps, rows = table.ordered()
        values = table.values(name)[rows]
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def reward(self) -> Curve:
        """Returns the mean reward over steps. Of several environments each counts the same, as
        their shares of a step vary; where a step has no rollouts of one, its reward is
        interpolated."""
        names = environment_rewards({name: name for name in self.names_of("orchestrator")}).values()
        curves = [self.curve(name, "orchestrator") for name in names]
        curves = [curve for curve in curves if len(curve[0])]
        steps, values = self.curve("reward/mean", "orchestrator")
        if len(curves) > 1:
            values = np.mean([np.interp(steps, *curve) for curve in curves], axis=0)
        return steps, values

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
        times = np.concatenate([np.empty(0), *(table.times for table in self.tables.values())])
        return float(np.nanmax(times)) if np.isfinite(times).any() else None


# Token logs ---------------------------------------------------------------------------------------


SUFFIX = ".safetensors"
MAX_LOG_RATIO = 10.0
"""The trainer's clamp of log r in nats: e^10 = 22026 is far beyond every sensible mask and far
within the range of float32."""
CLIPPED, MASKED, LATER, FIRST = 1, 2, 4, 8
"""Bits: the loss's own clip left the token without gradient; a mask on the ratio left it out of
the loss; either happened in a later epoch; it was scored before the batch's first optimizer step
(older versions do not say so). MASKED is thus narrower than the metric
`masked_fraction`, which counts the clipped tokens as well."""


def write_token_log(
    path: Path, columns: Mapping[str, np.ndarray], fence: Callable[[], None] | None = None
) -> int:
    """Writes a step's columns and returns the size of the file in bytes. fence: see write_file."""
    data = save(dict(columns))
    write_file(path, data, fence=fence)
    return len(data)


def read_token_log(path: Path, num_tokens: int) -> dict[str, np.ndarray]:
    """Reads the columns of a step with `num_tokens` trained tokens. Raises FileNotFoundError or
    CorruptFileError."""
    try:
        with reading(path):
            columns = load(path.read_bytes())
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptFileError(
            f"{path}: damaged ({error}); move it away to continue without it"
        ) from None
    if any(len(values) != num_tokens for values in columns.values()):
        raise CorruptFileError(
            f"{path}: does not match this batch, which trains {num_tokens} tokens; move it "
            "away to continue without it"
        )
    return columns
