"""Rollouts selected from the index: filtered, sorted and paged as columns. Texts are read from the
files on demand."""

import contextlib
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any, overload

import numpy as np

from rl.diagnosis.rollouts import (
    TRAINED,
    Row,
    contains,
    messages_text,
    num_prompt_messages,
    parse_rollout,
    rollout_text,
)
from rl.records.index import (
    DTYPES,
    LOCATION,
    METRIC,
    NONE,
    WORDS,
    Columns,
    RolloutIndex,
    column_of,
    text_of,
)
from rl.run_dir.files import CorruptFileError, reading
from rl.system.errors import RunError

KINDS = ("train", "pending", "eval")
ERROR = "error"
"""As a filter on `why`, also matches every rollout that failed itself, whatever its `why`."""
ALWAYS = {"kind": KINDS, "why": (TRAINED, ERROR)}
"""Words that may be asked for although no rollout has them."""
OTHER_WAYS = "several in a list or a range, or a pair (minimum, maximum)"


@lru_cache(maxsize=2)
def unpacked(path: Path, _changed: int) -> bytes:
    """The text of a file that has no random access. Raises FileNotFoundError and
    CorruptFileError."""
    return text_of(path)


def line_at(paths: list[Path], offset: int, length: int) -> tuple[bytes, Path]:
    """A line, and which of `paths` has it: a file may be replaced by its compressed form at any
    moment.

    Raises RunError if there is none, and CorruptFileError.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.suffix != ".jsonl":
                return unpacked(path, path.stat().st_mtime_ns)[offset : offset + length], path
            with reading(path), path.open("rb") as file:
                file.seek(offset)
                return file.read(length), path
    raise RunError(
        f"{paths[0]}: no longer exists: deleted by orchestrator.rollouts.keep_last, or moved away"
    )


class StoredRollout:
    """One rollout. Its numbers come from the index; `row`, `messages` and `text` are read from its
    file. Every field of the index is an attribute."""

    kind: str
    """`train` (settled by a batch), `pending` (not settled yet) or `eval`."""
    step: int | None
    """The batch that settled it; None if there is none."""
    version: int | None
    """The newest policy version that sampled one of its tokens (in an evaluation, the evaluated
    version); None without tokens."""
    env: str
    """Name of its environment or evaluation."""
    task: int
    group_id: int | None
    """Its group; None in an evaluation."""
    rollout_id: int | None
    """Its index in the group; None in an evaluation."""
    episode: int | None
    """Its index among the samples of its task; None if unknown."""
    reward: float
    """The reward; nan if the rollout failed."""
    advantage: float
    """The advantage; nan in an evaluation."""
    why: str
    """`trained`, or the reason why it was not; in an evaluation `error` or ""."""
    outcome: str
    """finished, truncated, overlong, empty, timeout or failed."""

    def __init__(self, columns: Columns, number: int, index: RolloutIndex):
        self._columns, self._number, self._index = columns, number, index

    def __getattr__(self, name: str) -> Any:
        if name not in DTYPES:
            raise AttributeError(f"a rollout has no attribute {name}")
        value = self[name]
        return None if value == NONE and isinstance(value, int) else value

    def __getitem__(self, name: str) -> Any:
        """A field of the index: a word, or a number, which is -1 or nan if missing. Raises RunError
        if there is no such field."""
        value = column_of(self._columns, name)[self._number].item()
        return self._index.words.words[value] if name in WORDS else value

    @property
    def metrics(self) -> dict[str, float]:
        """The values of its reward functions and other metrics, by name."""
        names = self._columns.keys() - DTYPES.keys()
        values = {name.removeprefix(METRIC): self[name] for name in sorted(names)}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    @property
    def row(self) -> Row:
        """The whole decoded line of its file. Raises RunError if it is gone or damaged."""
        moved = RunError(
            f"rollout {self.rollout_id} of group {self.group_id} has moved: its file was "
            "rewritten; query the rollouts again"
        )
        try:
            line, path = line_at(self._index.paths(self.file), self.offset, self.length)
            row = parse_rollout(line, str(path)) if line else {}
        except CorruptFileError:
            if self.kind == "pending":
                raise moved from None
            raise
        names = ("task",) if self.kind == "eval" else ("group_id", "rollout_id")
        if any(row.get(name) != getattr(self, name) for name in names):
            raise moved
        return row

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the conversation. Raises RunError like `row`."""
        return self.row["messages"]

    @property
    def text(self) -> str:
        """The conversation as text. Raises RunError like `row`."""
        row = self.row
        return messages_text(row["messages"], num_prompt_messages(row))

    def __str__(self) -> str:
        return rollout_text(self.row)

    def __repr__(self) -> str:
        where = f"version {self.version}"
        if self.kind != "eval":
            where = f"step {self.step}, group {self.group_id}"
        what = f"reward {self.reward:.3f}, {self.why or self.outcome}"
        return f"<Rollout {self.kind} {where}, {self.env} task {self.task}, {what}>"


class Rollouts(Sequence[StoredRollout]):
    """An ordered selection of rollouts. A slice is a selection again; files are read only when a
    rollout's text is accessed."""

    def __init__(self, columns: Columns, numbers: np.ndarray, index: RolloutIndex):
        """numbers: rows of the columns."""
        self._columns, self._numbers, self._index = columns, numbers, index

    @classmethod
    def of(cls, index: RolloutIndex) -> "Rollouts":
        """All that are now in an index, in the order in which they were read."""
        return cls(index.columns, np.arange(len(index.columns["kind"])), index)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, which: int) -> StoredRollout: ...
    @overload
    def __getitem__(self, which: slice) -> "Rollouts": ...
    def __getitem__(self, which: int | slice) -> "StoredRollout | Rollouts":
        if isinstance(which, slice):
            return self._some(which)
        return StoredRollout(self._columns, int(self._numbers[which]), self._index)

    def _some(self, which: slice | np.ndarray) -> "Rollouts":
        return Rollouts(self._columns, self._numbers[which], self._index)

    @property
    def metrics(self) -> list[str]:
        """Names of the environment metrics."""
        return sorted(self._columns.keys() - DTYPES.keys())

    @property
    def fields(self) -> list[str]:
        """Names of all fields and metrics that rollouts can be filtered and sorted by."""
        return [name for name in DTYPES if name not in LOCATION] + self.metrics

    def _values(self, name: str) -> np.ndarray:
        return column_of(self._columns, name)[self._numbers]

    def _plain(self, name: str, values: np.ndarray) -> np.ndarray:
        """Values of a column, with words in place of their codes."""
        if name not in WORDS:
            return values
        return np.array([self._index.words.words[code] for code in values.tolist()], object)

    def column(self, name: str) -> np.ndarray:
        """The values of a field or metric, [len]; words as an array of objects."""
        return self._plain(name, self._values(name))

    def sorted(self, name: str, *, descending: bool = False) -> "Rollouts":
        """Sorts by a field or metric. The sort is stable; rollouts without a value come last."""
        values = self._values(name)
        if name in WORDS:
            codes, values = np.unique(values, return_inverse=True)
            values = np.argsort(np.argsort(self._plain(name, codes)))[values]
        is_float = values.dtype.kind == "f"
        missing = np.isnan(values) if is_float else values == NONE
        if descending:
            values = -values.astype(values.dtype if is_float else np.int64)
        return self._some(np.lexsort((values, missing)))

    def where(self, **wanted: Any) -> "Rollouts":
        """Selects rollouts by fields: a value, a list, set or range of alternatives, or for numbers
        a tuple (minimum, maximum), where None is unbounded. Raises RunError for an unknown field,
        for text in place of a number, and for a word that no rollout of the run has."""
        matches = np.ones(len(self), bool)
        for name, value in wanted.items():
            if value is not None:
                matches &= (self._has_word if name in WORDS else self._has_number)(name, value)
        return self._some(matches)

    def _has_number(self, name: str, wanted: Any) -> np.ndarray:
        numbers = self.column(name)
        if isinstance(wanted, tuple):
            least, greatest = bounds(name, wanted)
            is_known = (numbers != NONE) | (numbers.dtype.kind == "f")
            return is_known & (numbers >= least) & (numbers <= greatest)
        if isinstance(wanted, range) and wanted.step == 1:
            return (numbers >= wanted.start) & (numbers < wanted.stop)
        values = alternatives(wanted)
        for value in values:
            if not is_number(value):
                hint = "" if isinstance(value, str) else f", {OTHER_WAYS}"
                raise RunError(f"{name} = {value!r}: give a number{hint}")
        return np.isin(numbers, values)

    def _has_word(self, name: str, wanted: Any) -> np.ndarray:
        words, column = alternatives(wanted), self._columns[name]
        codes = {word: self._index.words.codes.get(word, NONE) for word in words}
        present = set(np.unique(column).tolist())
        allowed = (*ALWAYS.get(name, ()), "")
        unknown = [word for word in words if word not in allowed and codes[word] not in present]
        is_all = len(unknown) == len(words)
        if unknown and len(column) and (name == "env" or is_all):
            what = "has no rollouts" if name == "env" else "no rollout of the run has it"
            known = ", ".join(filter(None, self._plain(name, np.unique(column))))
            shown = ", ".join(map(str, unknown))
            raise RunError(f"{name} = {shown}: {what}; there are: {known}")
        matches = np.isin(self._values(name), [*codes.values()])
        return matches | self._values("failed") if name == "why" and ERROR in words else matches

    def containing(self, text: str) -> Iterator[StoredRollout]:
        """Yields the rollouts whose conversation or error contains a text, ignoring case, while
        reading their files. Skips rollouts whose file is gone or damaged."""
        text = text.casefold()
        for rollout in self:
            try:
                row = rollout.row
            except RunError:
                continue
            if contains(row, text):
                yield rollout

    def counts(self, name: str) -> dict[Any, int]:
        """The number of rollouts with each value of a field, the most frequent first."""
        values, counts = np.unique(self._values(name), return_counts=True)
        pairs = zip(self._plain(name, values).tolist(), counts.tolist(), strict=True)
        return dict(sorted(pairs, key=lambda pair: -pair[1]))

    def by(self, name: str) -> "dict[Any, Rollouts]":
        """Splits the rollouts by the value of a field, in ascending order of the values."""
        values = self._values(name)
        order = np.argsort(values, kind="stable")
        keys, starts = np.unique(values[order], return_index=True)
        groups = zip(self._plain(name, keys).tolist(), np.split(order, starts[1:]), strict=False)
        return {key: self._some(rows) for key, rows in sorted(groups, key=lambda group: group[0])}

    def columns(self) -> dict[str, np.ndarray]:
        """All fields and metrics as columns, without the locations in files."""
        return {name: self.column(name) for name in self.fields}

    def frame(self, kind: str | None = None) -> Any:
        """The columns as a table, see `frame`."""
        return frame(self.columns(), kind)

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts>"


def alternatives(wanted: Any) -> list[Any]:
    """A filter's value as a list."""
    many = isinstance(wanted, (list, tuple, set, frozenset, range, np.ndarray))
    return [*wanted] if many else [wanted]


def bounds(name: str, wanted: tuple[Any, ...]) -> tuple[float, float]:
    """Minimum and maximum of a pair. Raises RunError if it is none."""
    if len(wanted) == 2:
        least = -math.inf if wanted[0] is None else wanted[0]
        greatest = math.inf if wanted[1] is None else wanted[1]
        if is_number(least) and is_number(greatest) and least <= greatest:
            return least, greatest
    raise RunError(
        f"{name} = {wanted!r}: give the minimum and the maximum, in this order, or None for no "
        "bound; or several values as a list"
    )


def frame(columns: Mapping[str, np.ndarray], kind: str | None = None) -> Any:
    """The columns as a table of `pandas` (the default) or `polars`, if that is installed, or as a
    dict of numpy arrays (`columns`)."""
    if kind == "columns":
        return dict(columns)
    if kind not in (None, "pandas", "polars"):
        raise RunError(f"kind = {kind!r}: give pandas, polars or columns")
    options = {} if kind == "polars" else {"copy": False}
    try:
        return importlib.import_module(kind or "pandas").DataFrame(dict(columns), **options)
    except ModuleNotFoundError as error:
        raise RunError(f'{error}: `pip install {error.name}`, or kind = "columns"') from None


def is_number(value: Any) -> bool:
    """Whether a value is a real number other than nan."""
    return isinstance(value, Real) and not math.isnan(value)
