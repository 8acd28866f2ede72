"""The index of a run's rollouts: follows rollouts/ and evals/, and locates each rollout. Writes nothing to the run."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rl.records import cache
from rl.records.columns import DECODER, Columns, Kind, Line
from rl.run_dir.files import CorruptFileError, end_of_last_line, reading
from rl.run_dir.paths import RunDir, numbered
from rl.wire.batch_file import sound_rollouts
from rl.wire.messages import UNREADABLE

STEP_FILE = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})\.jsonl(\.gz)?")
CHUNK = 8192
"""Number of rows added at once."""
SUSPECTS = 3
"""Number of newest steps that are checked again: an orchestrator that was killed before its commit rewrites their files."""
CACHE_S = 2.0
"""An index that took more seconds to read is kept in the user's cache."""
GONE_SHARE = 0.25
"""Rows of deleted files are removed once they exceed this share."""


class Source(NamedTuple):
    """A file of rollouts: `rollouts/000012.jsonl` (compressed or not), `evals/000010/NAME.jsonl`, or pending.jsonl."""

    kind: Kind
    number: int
    """The step or policy version."""
    name: str = ""
    """Name of the evaluation."""


PENDING = Source(Kind.PENDING, 0)


class RolloutIndex:
    """Columns of all rollouts. `refresh` reads what is new, and is not thread-safe."""

    def __init__(self, run_dir: RunDir, cache_file: Path | None = None):
        """cache_file: where the index is kept beyond this process; None: nowhere."""
        self.run_dir, self.cache_file = run_dir, cache_file
        self.columns = Columns()
        self.steps: dict[int, cache.Identity] = {}
        """The step files that were read."""
        self.evals: dict[tuple[int, str], cache.Identity] = {}
        """The evaluation files that were read, by version and name."""
        self.damaged: dict[Source, str] = {}
        """Unreadable files, with the reason; their rollouts are missing."""
        self.denied: dict[Path, str] = {}
        """Folders without read permission, with the error."""
        self.gone = 0
        """Number of rows whose file no longer exists."""
        self.looked = False
        """Whether the files were listed before: an index from the cache may be older than any change."""
        self.pending_as_read: tuple[int, int] = (0, 0)
        """Inode of pending.jsonl, and the offset up to which it was read."""
        if cache_file and (found := cache.load(cache_file)):
            self.columns, self.steps, self.evals = found

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        began = time.monotonic()
        self._read_pending()  # first: rollouts that a batch settles meanwhile are then seen twice instead of never
        gone, new = self._changes()
        self._forget(gone)
        self._read_files(new)
        waits = (self.columns["kind"] == Kind.PENDING) & (self.columns["gone"] == 0)
        if waits.any():
            recent = self.columns["step"] > max(self.steps, default=0) - SUSPECTS
            recent &= (self.columns["kind"] == Kind.STEP) & (self.columns["gone"] == 0)
            self._drop(waits & np.isin(self.columns["group_id"], self.columns["group_id"][recent]))
        if self.gone > GONE_SHARE * self.columns.size:
            self.columns, self.gone = self.columns.only(self.columns["gone"] == 0), 0
        if self.cache_file and new and time.monotonic() - began > CACHE_S:
            damaged = {(source.number, source.name) for source in self.damaged}
            steps = {step: identity for step, identity in self.steps.items() if (step, "") not in damaged}
            cache.save(self.cache_file, self.columns, steps, {key: value for key, value in self.evals.items() if key not in damaged})

    def _changes(self) -> tuple[list[Source], list[Source]]:
        """Returns the files that are gone or were replaced, and those to read. Old files of steps are assumed to be unchanged, unless the
        newest ones are gone or were replaced: then the run was rolled back, or is another one (see --clean)."""
        there = {int(match[1]) for match in map(STEP_FILE.fullmatch, self._names(self.run_dir.rollouts_dir)) if match}
        newest = sorted(self.steps)[-SUSPECTS:]
        if not self.looked or self._replaced(newest) or not there.issuperset(newest):
            newest = list(self.steps)
        changed = self._replaced(newest)
        gone = [Source(Kind.STEP, step) for step in (self.steps.keys() - there) | changed]
        new = [Source(Kind.STEP, step) for step in sorted((there - self.steps.keys()) | (changed & there))]
        folders = self._versions().items()
        files = [(version, folder / name) for version, folder in folders for name in self._names(folder) if name.endswith(".jsonl")]
        evals = {(version, path.stem): identity_of(path) for version, path in files}
        gone += [Source(Kind.EVAL, *key) for key, identity in self.evals.items() if evals.get(key) != identity]
        new += [Source(Kind.EVAL, *key) for key, identity in evals.items() if self.evals.get(key) != identity]
        self.looked = True
        return gone, new

    def _replaced(self, steps: list[int]) -> set[int]:
        """The steps whose file is not the one that was read."""
        return {step for step in steps if self._identity(Source(Kind.STEP, step)) != self.steps[step]}

    def _names(self, folder: Path) -> tuple[str, ...]:
        """The sorted names in a folder."""
        self.denied.pop(folder, None)
        try:
            return tuple(sorted(os.listdir(folder)))
        except FileNotFoundError:
            return ()
        except PermissionError as error:
            self.denied[folder] = str(error)
            return ()

    def _versions(self) -> dict[int, Path]:
        """The folders of evaluated versions."""
        self.denied.pop(self.run_dir.evals, None)
        try:
            return numbered(self.run_dir.evals)
        except PermissionError as error:
            self.denied[self.run_dir.evals] = str(error)
            return {}

    def _identity(self, source: Source) -> cache.Identity | None:
        return next((found for path in self.paths(source) if (found := identity_of(path))), None)

    def paths(self, source: Source) -> list[Path]:
        """The possible paths of a file: a step's is compressed once it is old."""
        if source.kind is Kind.EVAL:
            return [self.run_dir.eval(source.number, source.name)]
        plain = self.run_dir.pending_rollouts if source.kind is Kind.PENDING else self.run_dir.rollouts(source.number)
        return [plain] if source.kind is Kind.PENDING else [plain, compressed(plain)]

    def path(self, source: Source) -> Path:
        """The path of a file, or its default path if it does not exist."""
        paths = self.paths(source)
        return next((path for path in paths if os.path.exists(path)), paths[0])

    def _forget(self, sources: list[Source]) -> None:
        if not sources:
            return
        kinds = self.columns["kind"]
        steps = [source.number for source in sources if source.kind is Kind.STEP]
        gone = np.isin(self.columns["step"], steps) & (kinds == Kind.STEP)
        for source in sources:
            self.damaged.pop(source, None)
            if source.kind is Kind.STEP:
                del self.steps[source.number]
            else:
                del self.evals[source.number, source.name]
                of_env = self.columns["env"] == self.columns.code("env", source.name)
                gone |= (kinds == Kind.EVAL) & (self.columns["version"] == source.number) & of_env
        self._drop(gone)

    def _drop(self, rows: np.ndarray) -> None:
        """Marks rows as gone. rows: [size] bool."""
        if rows.any():
            self.columns["gone"][rows] = 1
            self.gone = int(self.columns["gone"].sum())

    def _read_files(self, sources: list[Source]) -> None:
        lines, places, kind = list[Line](), list[tuple[int, int]](), Kind.STEP
        for source in sources:
            path = self.path(source)
            try:
                identity = identity_of(path)
                found = list(decoded(path, sound_rollouts(path)))
            except FileNotFoundError:
                continue  # just compressed, deleted or moved: the next refresh handles it
            except (CorruptFileError, PermissionError) as error:
                self.damaged[source], found = str(error), []
            if source.kind is not kind or len(lines) >= CHUNK:
                self.columns.add(kind, lines, places)
                lines, places, kind = [], [], source.kind
            lines += [line for line, _ in found]
            places += [place for _, place in found]
            if identity and source.kind is Kind.STEP:
                self.steps[source.number] = identity
            elif identity:
                self.evals[source.number, source.name] = identity
        self.columns.add(kind, lines, places)

    def _read_pending(self) -> None:
        path, (inode, offset) = self.run_dir.pending_rollouts, self.pending_as_read
        try:
            with reading(path), path.open("rb") as file:
                there, end = os.fstat(file.fileno()).st_ino, end_of_last_line(file)
                if there != inode or end < offset:  # rewritten, as at every commit
                    self._drop(self.columns["kind"] == Kind.PENDING)
                    offset = 0
                file.seek(offset)
                found = [(line, (at + offset, length)) for line, (at, length) in decoded(path, file.read(end - offset))]
        except FileNotFoundError:
            self.damaged.pop(PENDING, None)
            self._drop(self.columns["kind"] == Kind.PENDING)
            self.pending_as_read = (0, 0)
            return
        except (CorruptFileError, PermissionError) as error:
            self.damaged[PENDING] = str(error)
            return
        self.damaged.pop(PENDING, None)
        self.columns.add(Kind.PENDING, [line for line, _ in found], [place for _, place in found])
        self.pending_as_read = (there, end)


def decoded(path: Path, data: bytes) -> Iterator[tuple[Line, tuple[int, int]]]:
    """Yields (line, (offset, length)) of each complete line. Raises CorruptFileError for a line that is not a rollout."""
    offset = 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            yield DECODER.decode(text), (offset, len(text))
        except UNREADABLE as error:
            raise CorruptFileError(f"{path}:{number}: not a rollout of this version of rl: {error}") from None
        offset += len(text)


def compressed(path: Path) -> Path:
    """The path of a step's file once it is old and compressed."""
    return path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")


def identity_of(path: Path) -> cache.Identity | None:
    """The size and mtime of a file; None if it does not exist or is not accessible."""
    try:
        there = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    return there.st_size, there.st_mtime_ns
