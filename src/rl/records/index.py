"""The index of a run's rollouts: follows rollouts/ and evals/, and locates each rollout. Writes
nothing to the run, and keeps what took long to read in the user's cache, which may be deleted any
time.

Rollouts are columns of numpy: a million of them take about 120 MiB, and are filtered, sorted and
counted without reading a file. pyarrow would be the library for it, but any use of it imports
pandas, which costs a reader half a second and 50 MiB.
"""

import contextlib
import hashlib
import heapq
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rl.diagnosis.rollouts import TRAINED
from rl.run_dir.files import UNREADABLE, CorruptFileError, files_in, write_file
from rl.run_dir.metrics import is_number
from rl.run_dir.paths import PENDING_LOG, RunDir, numbered
from rl.system.errors import RunError
from rl.wire.batch_file import sound_rollouts
from rl.wire.rollouts import waiting_lines

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


SUSPECTS = 3
"""Number of newest steps that are checked again: an orchestrator that was killed before its commit
rewrites their files."""
CACHE_S = 2.0
"""An index that took more seconds to read is kept in the user's cache."""
FORMAT = 5
"""Of a file in the cache."""
MAX_BYTES = 1 << 30
"""Maximum size of all indices together; the oldest are deleted first."""
TICK_NS = 100_000_000
"""A folder that changed within this time may change again with the same mtime."""
ROLLOUTS, EVALS = "rollouts/", "evals/"
PENDING = f"batches/{PENDING_LOG}"
Identity = tuple[int, int]
"""Size of a file in bytes, and its mtime in ns."""


class RolloutIndex:
    """Columns of all rollouts. `refresh` reads what is new, and is not thread-safe. Files are named
    by their path in the run, without the suffix that they have once they are compressed."""

    def __init__(self, run_dir: RunDir, cache: Path):
        """cache: where the index is kept beyond this process."""
        self.run_dir, self.cache = run_dir, cache
        self.columns, self.words, self.files = load(cache)
        """The rollouts, their words, and the files that were read."""
        self.damaged: dict[str, str] = {}
        """Unreadable files, with the reason; their rollouts are missing."""
        self.denied: dict[Path, str] = {}
        """Folders without read permission, with the error."""
        self.looked: int | None = None
        """The mtime of rollouts/ in ns when it was listed; 0 if it may change again with the same
        one; None before the first time."""

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        began = time.monotonic()
        # Pending ones first: what a batch settles meanwhile is then seen twice instead of never.
        pending = self._read(filter(self._replaced, [PENDING]))
        _, mtime = identity_of(self.run_dir.rollouts_dir) or (0, 0)
        looked = mtime if time.time_ns() - mtime > TICK_NS else 0
        changed = self._read(self._changed_steps(looked) | self._changed_evals())
        self.looked = looked
        if pending or changed:
            self._drop_settled()
        if changed and time.monotonic() - began > CACHE_S:
            with contextlib.suppress(OSError, SafetensorError):
                self._save()

    def _changed_steps(self, looked: int) -> set[str]:
        """The files of steps that are new, gone or replaced. Old ones are assumed to be unchanged,
        unless the newest ones are gone or were replaced: then the run was rolled back, or is
        another one (see --clean)."""
        folder, files = self.run_dir.rollouts_dir, set[str]()
        if looked and looked == self.looked and folder not in self.denied:
            return set()
        with self._allowed(folder):
            files = {f"{ROLLOUTS}{step:06d}.jsonl" for step in self.run_dir.rollout_files()}
        known, suspects = self._known(ROLLOUTS), self._newest_steps()
        if self.looked is None or suspects - files or any(map(self._replaced, suspects)):
            suspects = known
        return known ^ files | set(filter(self._replaced, suspects))

    def _changed_evals(self) -> set[str]:
        files = self._known(EVALS)
        with self._allowed(self.run_dir.evals):
            for folder in numbered(self.run_dir.evals).values():
                with self._allowed(folder):
                    files |= {
                        f"{EVALS}{folder.name}/{path.name}" for path in files_in(folder, ".jsonl")
                    }
        return set(filter(self._replaced, files))

    def _known(self, folder: str) -> set[str]:
        return {file for file in self.files if file.startswith(folder)}

    def _newest_steps(self) -> set[str]:
        steps = self._known(ROLLOUTS)
        return set(heapq.nlargest(SUSPECTS, steps, key=lambda file: (len(file), file)))

    def _drop_settled(self) -> None:
        """Drops pending rollouts that the newest steps have, too."""
        is_pending, groups = self._of([PENDING]), self.columns["group_id"]
        if is_pending.any():
            settled = np.isin(groups, groups[self._of(self._newest_steps())])
            self.columns = some(self.columns, ~(is_pending & settled))

    def _of(self, files: Iterable[str]) -> np.ndarray:
        """Which rows are of some files."""
        return np.isin(self.columns["file"], [self.words.code(file) for file in files])

    def _replaced(self, file: str) -> bool:
        """Whether a file is not the one that was read; a missing one was not read."""
        return identity_of(self.path(file)) != self.files.get(file)

    @contextlib.contextmanager
    def _allowed(self, folder: Path) -> Iterator[None]:
        """Notes in `denied` if the block may not list the folder."""
        self.denied.pop(folder, None)
        try:
            yield
        except PermissionError as error:
            self.denied[folder] = str(error)

    def paths(self, file: str) -> list[Path]:
        """The possible paths of a file: a step's is compressed once it is old."""
        return [self.run_dir.root / file, self.run_dir.root / f"{file}.gz"]

    def path(self, file: str) -> Path:
        """The path of a file, or its default path if it does not exist."""
        paths = self.paths(file)
        return next(filter(os.path.exists, paths), paths[0])

    def _read(self, changed: Iterable[str]) -> bool:
        """Reads files, in place of what was read of them before. Returns whether there are any. A
        selection that was made before keeps its rows."""
        files = sorted(changed)
        if not files:
            return False
        tables = [some(self.columns, ~self._of(files))]
        identities = {file: known for file, known in self.files.items() if file not in files}
        for file in files:
            self.damaged.pop(file, None)
            path = self.path(file)
            if (identity := identity_of(path)) is None:
                continue  # deleted, or in a folder that is denied
            try:
                tables.append(columns_of([*lines_of(path, file)], self.words, tables[-1]))
            except FileNotFoundError:
                continue  # just compressed, deleted or moved: the next refresh handles it
            except (CorruptFileError, PermissionError) as error:
                self.damaged[file] = str(error)
            identities[file] = identity
        # not before: whoever interrupts this loses no rows
        self.columns, self.files = joined(tables), identities
        return True

    def _save(self) -> None:
        """Writes the index without what is damaged or pending, and deletes old ones to make
        room."""
        files = {
            file: identity
            for file, identity in self.files.items()
            if file not in self.damaged and file != PENDING
        }
        about = {"words": json.dumps(self.words.words), "files": json.dumps(files)}
        columns = some(self.columns, ~self._of([PENDING]))
        write_file(self.cache, save(columns, about), durable=False)
        total = 0
        for file in sorted(self.cache.parent.iterdir(), key=lambda file: -file.stat().st_mtime):
            total += file.stat().st_size
            if total > MAX_BYTES:
                file.unlink(missing_ok=True)


def lines_of(path: Path, file: str) -> Iterator[RolloutLine]:
    """Yields each complete line of a file. Raises FileNotFoundError, and CorruptFileError for a
    line that is not a rollout."""
    kind = "eval" if file.startswith(EVALS) else "pending" if file == PENDING else "train"
    data, offset = text_of(path), 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            line = DECODER.decode(text)
        except UNREADABLE as error:
            raise CorruptFileError(
                f"{path}:{number}: not a rollout of this version of rl: {error}"
            ) from None
        vars(line).update(kind=kind, file=file, offset=offset, length=len(text))
        offset += len(text)
        yield line


def text_of(path: Path) -> bytes:
    """The lines of a file. Raises FileNotFoundError and CorruptFileError."""
    return waiting_lines(path) if path.name == PENDING_LOG else sound_rollouts(path)


def identity_of(path: Path) -> Identity | None:
    """The size and mtime of a file or folder; None if it does not exist or is not accessible."""
    try:
        status = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    return status.st_size, status.st_mtime_ns


def cache_file(root: Path) -> Path:
    """The path of a run's index, in $XDG_CACHE_HOME/rl/records (by default ~/.cache/rl/records)."""
    home, root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), root.resolve()
    name = hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()
    return home / "rl" / "records" / f"{root.name}-{name}.{FORMAT}.safetensors"


def load(path: Path) -> tuple[Columns, Words, dict[str, Identity]]:
    """The columns of an index in the cache, and the files that they are of; none if there is no
    readable one."""
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata()
            files = {name: tuple(identity) for name, identity in json.loads(about["files"]).items()}
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return columns, Words(json.loads(about["words"])), files
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        words = Words()
        return columns_of([], words), words, {}
