"""Rollouts as columns of numpy: a million of them take about 120 MiB, and are filtered, sorted and
counted without reading a file.

pyarrow would be the library for it, but any use of it imports pandas, which costs a reader half a
second and 50 MiB.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from rl.diagnosis.rollouts import TRAINED
from rl.run_dir.metrics import is_number
from rl.system.errors import RunError

Columns = dict[str, np.ndarray]
"""Arrays of one length: those of DTYPES, then environment metrics as float64."""
DTYPES: Mapping[str, str] = {
    "kind": "i4",
    "step": "i4",
    "version": "i4",
    "first_version": "i4",
    "env": "i4",
    "task": "i8",
    "group_id": "i8",
    "rollout_id": "i4",
    "episode": "i4",
    "agent": "i4",
    "reward": "f8",
    "advantage": "f8",
    "outcome": "i4",
    "stop": "i4",
    "why": "i4",
    "failed": "?",
    "truncated": "?",
    "num_tokens": "i4",
    "num_turns": "i4",
    "retries": "i4",
    "file": "i4",
    "offset": "i8",
    "length": "i4",
}
WORDS = ("kind", "env", "agent", "outcome", "stop", "why", "file")
"""Columns that hold the code of a word."""
LOCATION = ("file", "offset", "length")
"""Columns that locate a line in its (decompressed) file, in bytes."""
METRIC = "metrics/"
"""Prefix of a metric that is named like a column."""
MOST_METRICS = 32
"""Maximum number of distinct environment metrics."""
NONE = -1
"""Stands for a missing whole number, as nan does for other numbers."""
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""What fits into the columns: a line with another number is no rollout of ours."""


class RolloutLine(msgspec.Struct, kw_only=True, dict=True):
    """The fields of a line of rollouts/*.jsonl or evals/*/*.jsonl that the columns need, and all
    values of the columns as attributes. Messages are not decoded."""

    reward: float | None
    messages: msgspec.Raw
    step: Int32 | None = None
    policy_version: Int32 | None = None
    env: str = ""
    task: Int64 | None = None
    group_id: Int64 | None = None
    rollout_id: Int32 | None = None
    episode: Int32 | None = None
    eval_episode: Int32 | None = msgspec.field(default=None, name="rollout")
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

    def __post_init__(self) -> None:
        versions = self.versions if self.policy_version is None else [self.policy_version]
        vars(self).update(
            version=max(versions, default=None),
            first_version=min(versions, default=None),
            failed=self.error is not None,
        )
        if self.error is not None:
            self.reward = None  # it means nothing
        if self.episode is None:
            self.episode = self.eval_episode
        self.stop = self.stop or ""
        self.why = self.why or ("error" if self.error else TRAINED if self.trained else "")
        self.metrics = {
            METRIC + name if name in DTYPES else name: float(value)
            for name, value in self.metrics.items()
            if is_number(value)
        }


DECODER = msgspec.json.Decoder(RolloutLine)


class Words:
    """The distinct words of all columns, numbered in order of appearance."""

    def __init__(self, words: Iterable[str] = ()):
        self.words = [*words]
        self.codes = {word: code for code, word in enumerate(self.words)}

    def code(self, word: str) -> int:
        """The number of a word, a new one if necessary."""
        if word not in self.codes:
            self.codes[word] = len(self.words)
            self.words.append(word)
        return self.codes[word]


def columns_of(lines: Sequence[RolloutLine], words: Words, known: Iterable[str] = ()) -> Columns:
    """Lines as columns. known: columns to have, too; new metrics follow up to MOST_METRICS."""
    columns = {}
    for name, dtype in DTYPES.items():
        values = [getattr(line, name) for line in lines]
        if name in WORDS:
            values = map(words.code, values)
        missing = np.nan if dtype == "f8" else NONE
        columns[name] = np.array([missing if value is None else value for value in values], dtype)
    metrics = dict.fromkeys([*known, *(name for line in lines for name in line.metrics)])
    for name in [name for name in metrics if name not in DTYPES][:MOST_METRICS]:
        columns[name] = np.array([line.metrics.get(name, np.nan) for line in lines])
    return columns


def joined(tables: Sequence[Columns]) -> Columns:
    """Columns one below the other. The last of them have all names."""

    def column(columns: Columns, name: str) -> np.ndarray:
        return columns[name] if name in columns else np.full(len(columns["kind"]), np.nan)

    return {
        name: np.concatenate([column(columns, name) for columns in tables]) for name in tables[-1]
    }


def some(columns: Columns, rows: np.ndarray) -> Columns:
    """Some rows of columns. rows: bool, or their numbers."""
    return {name: values[rows] for name, values in columns.items()}


def column_of(columns: Columns, name: str) -> np.ndarray:
    """A column; RunError says which there are if there is none of this name."""
    if name in columns:
        return columns[name]
    full = len(columns) == len(DTYPES) + MOST_METRICS
    first = f" (of metrics the first {MOST_METRICS} count)" if full else ""
    raise RunError(f"{name}: rollouts have no such field{first}; there are: {', '.join(columns)}")
