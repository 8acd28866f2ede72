"""Rollouts selected from the index: filtered, sorted and paged as columns. Texts are read from
the files on demand."""

import contextlib
import errno
import importlib
import math
import os
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
from rl.records.columns import FLAGS, METRIC, NONE, OPTIONAL, WORDS, Columns, Kind, Source
from rl.records.index import RolloutIndex
from rl.run_dir.files import CorruptFileError, reading
from rl.system.errors import RunError
from rl.wire.batch_file import sound_rollouts

KINDS = {Kind.STEP: "train", Kind.PENDING: "pending", Kind.EVAL: "eval"}
"""Names of the kinds."""
Bounds = Mapping[str, tuple[float | None, float | None]]
"""Minimum and maximum of a number, both inclusive; None is unbounded."""
ERROR = "error"
"""As a filter on `why`, also matches every rollout that failed itself, whatever its `why`."""
PLACES = ("offset", "length")
"""Columns that locate a rollout in its file."""
OTHER_WAYS = "several in a list or a range, or a pair (minimum, maximum)"
LAST = 2**31 - 1
"""Stands for the step of rollouts that no batch has settled yet."""


@lru_cache(maxsize=2)
def unpacked(path: Path, _changed: int) -> bytes:
    """The content of a compressed file, which has no random access. Raises FileNotFoundError and
    CorruptFileError."""
    return sound_rollouts(path)


def line_at(paths: list[Path], offset: int, length: int) -> tuple[bytes, Path]:
    """A line, and the one of `paths` that has it: a file may be replaced by its compressed form at
    any moment.

    Raises FileNotFoundError and CorruptFileError.
    """
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".gz":
                return unpacked(path, path.stat().st_mtime_ns)[offset : offset + length], path
            with reading(path), path.open("rb") as file:
                file.seek(offset)
                return file.read(length), path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(paths[0]))


class Rollout:
    """One rollout. Its numbers come from the index; `row`, `messages` and `text` are read from
    its file."""

    def __init__(self, columns: Columns, place: int, index: RolloutIndex):
        self._columns, self._place, self._index = columns, place, index

    def __getitem__(self, name: str) -> Any:
        """A field of the index: a number, a word, or an environment metric (nan if missing).
        Raises RunError if there is no such field."""
        value = self._columns[name][self._place].item()
        if name == "kind":
            return KINDS[Kind(value)]
        return self._columns.words[name].words[value] if name in WORDS else value

    @property
    def kind(self) -> str:
        """`train` (settled by a batch), `pending` (not settled yet) or `eval`."""
        return self["kind"]

    @property
    def step(self) -> int | None:
        """The batch that settled it; None if there is none."""
        return None if self["step"] == NONE else self["step"]

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled one of its tokens (in an evaluation, the
        evaluated version); None without tokens."""
        return None if self["version"] == NONE else self["version"]

    @property
    def env(self) -> str:
        """Name of its environment or evaluation."""
        return self["env"]

    @property
    def task(self) -> int:
        return self["task"]

    @property
    def group_id(self) -> int | None:
        """Its group; None in an evaluation."""
        return None if self["group_id"] == NONE else self["group_id"]

    @property
    def rollout_id(self) -> int | None:
        """Its index in the group; None in an evaluation."""
        return None if self["rollout_id"] == NONE else self["rollout_id"]

    @property
    def episode(self) -> int | None:
        """Its index among the samples of its task; None if unknown."""
        return None if self["episode"] == NONE else self["episode"]

    @property
    def reward(self) -> float:
        """The reward; nan if the rollout failed."""
        return self["reward"]

    @property
    def advantage(self) -> float:
        """The advantage; nan in an evaluation."""
        return self["advantage"]

    @property
    def why(self) -> str:
        """`trained`, or the reason why it was not; in an evaluation `error` or ""."""
        return self["why"]

    @property
    def outcome(self) -> str:
        """finished, truncated, overlong, empty, timeout or failed."""
        return self["outcome"]

    @property
    def metrics(self) -> dict[str, float]:
        """The values of its reward functions and other metrics, by name."""
        found = {
            name.removeprefix(METRIC): float(values[self._place])
            for name, values in self._columns.metrics.items()
        }
        return {name: value for name, value in found.items() if not np.isnan(value)}

    @property
    def row(self) -> Row:
        """The whole decoded line of its file. Raises RunError if it is gone or damaged."""
        kind = Kind(self._columns["kind"][self._place])
        source = Source(
            kind,
            self["version"] if kind is Kind.EVAL else self["step"],
            self.env if kind is Kind.EVAL else "",
        )
        moved = (
            f"rollout {self.rollout_id} of group {self.group_id} has moved: its file was "
            "rewritten; query the rollouts again"
        )
        try:
            line, path = line_at(self._index.paths(source), self["offset"], self["length"])
            row = parse_rollout(line, str(path)) if line else {}
        except FileNotFoundError as error:
            raise RunError(
                f"{error.filename}: no longer exists: deleted by "
                "orchestrator.rollouts.keep_last, or moved away"
            ) from None
        except CorruptFileError:
            if kind is Kind.PENDING:
                raise RunError(moved) from None
            raise
        wanted = (
            {"task": self.task}
            if kind is Kind.EVAL
            else {"group_id": self["group_id"], "rollout_id": self["rollout_id"]}
        )
        if any(row.get(name) != value for name, value in wanted.items()):
            raise RunError(moved)
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
        place = (
            f"version {self.version}"
            if self.kind == "eval"
            else f"step {self.step}, group {self.group_id}"
        )
        return (
            f"<Rollout {self.kind} {place}, {self.env} task {self.task}, reward "
            f"{self.reward:.3f}, {self.why or self.outcome}>"
        )


class Rollouts(Sequence[Rollout]):
    """An ordered selection of rollouts. A slice is a selection again; files are read only when a
    rollout's text is accessed."""

    def __init__(self, columns: Columns, places: np.ndarray, index: RolloutIndex):
        self._columns, self.places, self._index = columns, places, index

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, which: int) -> Rollout: ...
    @overload
    def __getitem__(self, which: slice) -> "Rollouts": ...
    def __getitem__(self, which: int | slice) -> "Rollout | Rollouts":
        if isinstance(which, slice):
            return self._some(self.places[which])
        return Rollout(self._columns, int(self.places[which]), self._index)

    def __iter__(self) -> Iterator[Rollout]:
        return (Rollout(self._columns, place, self._index) for place in self.places.tolist())

    def _some(self, places: np.ndarray) -> "Rollouts":
        return Rollouts(self._columns, places, self._index)

    @property
    def fields(self) -> list[str]:
        """Names of all fields and metrics that rollouts can be filtered and sorted by."""
        names = [*self._columns.arrays, *sorted(self._columns.metrics)]
        return [name for name in dict.fromkeys(names) if name not in PLACES]

    def column(self, name: str) -> np.ndarray:
        """The values of a field or metric, [len]; words as an array of objects."""
        values = self._columns[name][self.places]
        if name == "kind":
            return np.array(list(KINDS.values()), dtype=object)[values]
        if name in FLAGS:
            return values.astype(bool)
        return (
            np.array(self._columns.words[name].words, dtype=object)[values]
            if name in WORDS
            else values
        )

    def sorted(self, name: str, *, descending: bool = False) -> "Rollouts":
        """Sorts by a field or metric. The sort is stable; rollouts without a value come last."""
        values = self._columns[name][self.places]
        if name in WORDS:
            ranks = np.argsort(np.argsort(np.array(self._columns.words[name].words)))
            values = ranks[values]
        missing = (
            values == NONE
            if name in OPTIONAL
            else np.isnan(values)
            if values.dtype.kind == "f"
            else np.zeros(len(values), bool)
        )
        values = (
            -values.astype(values.dtype if values.dtype.kind == "f" else np.int64)
            if descending
            else values
        )
        return self._some(self.places[np.lexsort((values, missing))])

    def where(self, **wanted: Any) -> "Rollouts":
        """Selects rollouts by fields: a value, a list, set or range of alternatives, or for
        numbers a pair (minimum, maximum), where None is unbounded. Raises RunError for an
        unknown field, for text in place of a number, and for a word that no rollout of the run
        has."""
        mask = np.ones(len(self.places), bool)
        for name, value in wanted.items():
            if value is not None:
                mask &= self._has(name, value)
        return self._some(self.places[mask])

    def _has(self, name: str, value: Any) -> np.ndarray:
        values = self._columns[name][self.places]
        if isinstance(value, tuple):
            if name in WORDS:
                raise RunError(
                    f"{name} = {value!r}: a pair is the minimum and maximum of a number; "
                    "give several words as a list"
                )
            if len(value) != 2:
                raise RunError(
                    f"{name} = {value!r}: give a pair, the minimum and the maximum, or "
                    "several values as a list"
                )
            least, greatest = value
            if not all(end is None or is_number(end) for end in value) or (
                None not in value and least > greatest
            ):
                raise RunError(
                    f"{name} = {value!r}: give the minimum and the maximum, in this order, "
                    "or None for no bound"
                )
            # an open end does not match a rollout without the field
            there = values != NONE if name in OPTIONAL else True
            return (
                there
                & (values >= (-np.inf if least is None else least))
                & (values <= (np.inf if greatest is None else greatest))
            )
        if isinstance(value, range) and value.step == 1:
            return (values >= value.start) & (values < value.stop)
        several = (
            [*value] if isinstance(value, (list, set, frozenset, range, np.ndarray)) else [value]
        )
        if name == "kind":
            several = [kind for kind, word in KINDS.items() if word in several]
        elif name in WORDS:
            failed, codes = name == "why" and ERROR in several, self._columns.words[name].codes
            if (
                codes
                and not failed
                and not any(word in codes for word in several)
                and several not in ([TRAINED], [""])
            ):
                there = ", ".join(filter(None, codes))
                raise RunError(
                    f"{name} = {', '.join(map(str, several))}: no rollout of the run has it; "
                    f"there are: {there}"
                )
            several = [self._columns.code(name, word) for word in several]
            if failed:
                return np.isin(values, several) | (self._columns["failed"][self.places] > 0)
        elif wrong := [one for one in several if not is_number(one)]:
            raise RunError(
                f"{name} = {wrong[0]!r}: give a number"
                + ("" if isinstance(wrong[0], str) else f", {OTHER_WAYS}")
            )
        return values == several[0] if len(several) == 1 else np.isin(values, several)

    def containing(self, text: str) -> Iterator[Rollout]:
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
        values, counts = np.unique(self._columns[name][self.places], return_counts=True)
        words = (
            KINDS if name == "kind" else self._columns.words[name].words if name in WORDS else None
        )
        order = np.argsort(-counts, kind="stable")
        return {
            (words[values[i].item()] if words is not None else values[i].item()): int(counts[i])
            for i in order
        }

    def by(self, name: str) -> "dict[Any, Rollouts]":
        """Splits the rollouts by the value of a field, in ascending order of the values."""
        values = self.column(name)
        return {
            value: self._some(self.places[values == value])
            for value in sorted(set(values.tolist()))
        }

    def columns(self) -> dict[str, np.ndarray]:
        """All fields and metrics as columns, without the locations in files."""
        return {name: self.column(name) for name in self.fields}

    def frame(self, kind: str | None = None) -> Any:
        """The columns as a table, see `frame`."""
        return frame(self.columns(), kind)

    def __repr__(self) -> str:
        return f"<{len(self)} rollouts>"


def frame(columns: Mapping[str, np.ndarray], kind: str | None = None) -> Any:
    """The columns as a table of `pandas` (the default) or `polars`, if that is installed, or as
    a dict of numpy arrays (`columns`)."""
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


def all_rollouts(index: RolloutIndex, kinds: set[Kind]) -> Rollouts:
    """The rollouts of these kinds now in the index, by step and position in the file, pending
    ones last; evaluations by version."""
    columns = index.columns
    places = np.flatnonzero(np.isin(columns["kind"], [*kinds]))
    of_eval, waits = (columns["kind"][places] == kind for kind in (Kind.EVAL, Kind.PENDING))
    order = np.where(
        of_eval, columns["version"][places], np.where(waits, LAST, columns["step"][places])
    )
    if len(order) and (np.diff(order) < 0).any():
        places = places[np.argsort(order, kind="stable")]
    return Rollouts(columns, places, index)
