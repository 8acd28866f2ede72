"""Rollouts as columns: a million of them take about 100 MiB, and can be filtered, sorted and
counted without reading a file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from rl.run_dir.metrics import is_number
from rl.system.errors import RunError

DTYPES: Mapping[str, str] = {
    "kind": "u1",
    "step": "i4",
    "version": "i4",
    "first_version": "i4",
    "env": "u2",
    "task": "i8",
    "group_id": "i8",
    "rollout_id": "i4",
    "episode": "i4",
    "agent": "u2",
    "reward": "f8",
    "advantage": "f8",
    "outcome": "u2",
    "stop": "u2",
    "why": "u2",
    "failed": "u1",
    "truncated": "u1",
    "num_tokens": "i4",
    "num_turns": "i4",
    "retries": "i4",
    "offset": "i8",
    "length": "i4",
}
"""The columns. `offset` and `length` locate the line in its (decompressed) file, in bytes."""
FLAGS = ("failed", "truncated")
"""Boolean columns."""
WORDS = ("env", "agent", "outcome", "stop", "why")
"""Columns that hold the code of a word."""
OPTIONAL = ("step", "version", "first_version", "group_id", "rollout_id", "episode")
"""Integer columns that can be NONE."""
OTHER = "(other)"
MOST_WORDS, MOST_METRICS = 60_000, 32
"""Maximum number of distinct words per column, and of distinct environment metrics."""
METRIC = "metrics/"
NONE = -1
"""Stands for a missing number."""


class Kind(IntEnum):
    """The kind of file that a rollout is from: a step's, pending.jsonl, or an evaluation's."""

    STEP = 0
    PENDING = 1
    EVAL = 2


class Source(NamedTuple):
    """A file of rollouts: `rollouts/000012.jsonl` (compressed or not),
    `evals/000010/NAME.jsonl`, or pending.jsonl."""

    kind: Kind
    number: int
    """The step or policy version."""
    name: str = ""
    """Name of the evaluation."""


Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What fits into the columns: a line with another number is no rollout of ours."""


class Line(msgspec.Struct, kw_only=True):
    """The fields of a line of rollouts/*.jsonl or evals/*/*.jsonl that the columns need.
    Messages are not decoded."""

    reward: float | None
    messages: msgspec.Raw
    step: Int32 | None = None
    policy_version: Int32 | None = None
    env: str = ""
    task: Int64 = NONE
    group_id: Int64 = NONE
    rollout_id: Int32 = NONE
    episode: Int32 = NONE
    eval_episode: Int32 = msgspec.field(default=NONE, name="rollout")
    """The episode in a line of an evaluation, which calls it `rollout`."""
    agent: str = "agent"
    advantage: float | None = None
    metrics: dict[str, Any] = {}
    outcome: str = ""
    stop: str | None = ""
    why: str | None = None
    trained: bool | None = None
    truncated: bool = False
    num_tokens: Int32 = 0
    num_turns: Int32 = 0
    retries: Int32 = 0
    versions: list[Int32] = []
    error: str | None = None


DECODER = msgspec.json.Decoder(Line)


class Words:
    """The distinct words of a column, numbered in order of appearance."""

    def __init__(self, words: Iterable[str] = ()):
        self.words = list(words)
        self.codes = {word: code for code, word in enumerate(self.words)}

    def code(self, word: str) -> int:
        """The number of a word; assigns a new one if necessary."""
        if (code := self.codes.get(word)) is None:
            word = word if len(self.words) < MOST_WORDS else OTHER
            code = self.codes.setdefault(word, len(self.words))
            if code == len(self.words):
                self.words.append(word)
        return code


class Columns:
    """Append-only rows. A view of a column stays valid after rows are added."""

    def __init__(self) -> None:
        self.size = 0
        self.arrays = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
        self.words = {name: Words() for name in WORDS}
        self.metrics: dict[str, np.ndarray] = {}
        """Values of reward functions and other environment metrics, float64, nan where a rollout
        has none. A metric named like a column gets the prefix METRIC."""
        self.left_out: set[str] = set()
        """Metrics beyond MOST_METRICS."""

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of DTYPES or a metric, [size]. Raises RunError for a name that is neither."""
        arrays = self.arrays if name in self.arrays else self.metrics
        if name not in arrays:
            there = ", ".join([*DTYPES, *sorted(self.metrics)])
            why = (
                " (a metric, but there are too many to index all)" if name in self.left_out else ""
            )
            raise RunError(f"{name}: rollouts have no such field{why}; there are: {there}")
        return arrays[name][: self.size]

    def add(self, kind: Kind, lines: Sequence[Line], places: Sequence[tuple[int, int]]) -> None:
        """Adds rows. places: (offset, length) of each."""
        start, count = self.size, len(lines)
        self._reserve(start + count)
        rows = [self._row(kind, line, place) for line, place in zip(lines, places, strict=True)]
        for name, values in zip(DTYPES, zip(*rows, strict=True), strict=True) if rows else ():
            self.arrays[name][start : start + count] = values
        for i, line in enumerate(lines, start=start):
            for name, value in line.metrics.items():
                name = METRIC + name if name in DTYPES else name
                if is_number(value) and (column := self._metric(name)) is not None:
                    column[i] = value
        self.size += count

    def _row(self, kind: Kind, line: Line, place: tuple[int, int]) -> tuple[float, ...]:
        """The values of DTYPES, in its order."""
        versions = line.versions or [NONE]
        became = (
            "error"
            if line.error and line.why is None
            else line.why or ("trained" if line.trained else "")
        )
        return (
            kind,
            NONE if line.step is None else line.step,
            max(versions) if line.policy_version is None else line.policy_version,
            min(versions) if line.policy_version is None else line.policy_version,
            self.words["env"].code(line.env),
            line.task,
            line.group_id,
            line.rollout_id,
            line.eval_episode if line.episode == NONE else line.episode,
            self.words["agent"].code(line.agent),
            # a failed rollout's is meaningless
            math.nan if line.reward is None or line.error is not None else line.reward,
            math.nan if line.advantage is None else line.advantage,
            self.words["outcome"].code(line.outcome),
            self.words["stop"].code(line.stop or ""),
            self.words["why"].code(became),
            line.error is not None,
            line.truncated,
            line.num_tokens,
            line.num_turns,
            line.retries,
            *place,
        )

    def _metric(self, name: str) -> np.ndarray | None:
        if name not in self.metrics:
            if len(self.metrics) >= MOST_METRICS:
                self.left_out.add(name)
                return None
            self.metrics[name] = np.full(len(self.arrays["kind"]), np.nan)
        return self.metrics[name]

    def _reserve(self, size: int) -> None:
        there = len(self.arrays["kind"])
        if size <= there:
            return
        room = max(size, there + there // 4, 1024)
        for arrays in (self.arrays, self.metrics):
            for name, old in arrays.items():
                arrays[name] = (
                    np.full(room, np.nan, old.dtype)
                    if arrays is self.metrics
                    else np.empty(room, old.dtype)
                )
                arrays[name][:there] = old

    def only(self, kept: np.ndarray) -> "Columns":
        """A copy with some of the rows. kept: [size] bool."""
        copy = Columns()
        copy.arrays = {name: self[name][kept] for name in self.arrays}
        copy.metrics = {name: self[name][kept] for name in self.metrics}
        copy.words, copy.left_out = (
            {name: Words(known.words) for name, known in self.words.items()},
            set(self.left_out),
        )
        copy.size = int(kept.sum())
        return copy

    def code(self, name: str, word: str) -> int:
        """The code of a word in a column; NONE, which no row has, for an unknown word."""
        return self.words[name].codes.get(word, NONE)
