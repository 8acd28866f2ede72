"""The index of a run's rollouts: follows rollouts/ and evals/, and tells where each rollout stands. Nothing of the run is written."""

import contextlib
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
"""Rows that are added at once."""
SUSPECTS = 3
"""So many newest steps are looked at again: an orchestrator that was killed before its commit writes their files anew."""
CACHE_S = 2.0
"""Reading that took longer is kept in the user's cache."""
TICK_NS, LOOK_AGAIN = 100_000_000, -1
"""A folder that changed within so many ns may change again without another time of change."""
GONE_SHARE = 0.25
"""Rows of files that are gone are removed when they are more than this part."""


class Source(NamedTuple):
    """A file of rollouts: `rollouts/000012.jsonl`, compressed or not, or `evals/000010/NAME.jsonl`."""

    kind: Kind
    number: int
    """Its step or policy version."""
    name: str = ""
    """The evaluation."""


PENDING = Source(Kind.PENDING, 0)


class Identity(NamedTuple):
    """What tells that a file is the one that was read."""

    size: int
    mtime_ns: int


class State(NamedTuple):
    """What tells that no file has come or gone: when the folders last changed, ns, and what `discarded/` holds."""

    rollouts: int
    discarded: tuple[str, ...]
    evals: tuple[int, ...]


class RolloutIndex:
    """Columns of all rollouts. `refresh` reads what is new; it is not to be called by two threads at once."""

    def __init__(self, run_dir: RunDir, cache_file: Path | None = None):
        """cache_file: where the index outlives this process; None: nowhere."""
        self.run_dir, self.cache_file = run_dir, cache_file
        self.columns = Columns()
        self.files: dict[Source, Identity] = {}
        self.damaged: dict[Source, str] = {}
        """Files that could not be read, with what is wrong; their rollouts are missing."""
        self.gone = 0
        """Rows of files that are not there any more."""
        self.looked: State | None = None
        self.pending_as_read: tuple[int, int] = (0, 0)
        """Inode and offset up to which pending.jsonl was read."""
        if cache_file and (found := cache.load(cache_file)):
            self.columns, known = found
            self.files = {Source(Kind(kind), number, name): Identity(*identity) for (kind, number, name), identity in known.items()}

    def refresh(self) -> None:
        """Reads what is new, and forgets what is gone."""
        began = time.monotonic()
        self._read_pending()  # first: what a batch settles meanwhile is then seen twice, not never
        there = self._files_there()
        if there is not None:
            self._forget([source for source, identity in self.files.items() if there.get(source) != identity])
            self._read_files([source for source in sorted(there) if source not in self.files])
        waits = (self.columns["kind"] == Kind.PENDING) & (self.columns["gone"] == 0)
        if waits.any():
            newest = max((source.number for source in self.files if source.kind is Kind.STEP), default=0)
            recent = (self.columns["kind"] == Kind.STEP) & (self.columns["step"] > newest - SUSPECTS) & (self.columns["gone"] == 0)
            self._drop(waits & np.isin(self.columns["group_id"], self.columns["group_id"][recent]))
        if self.gone > GONE_SHARE * self.columns.size:
            self.columns, self.gone = self.columns.only(self.columns["gone"] == 0), 0
        if self.cache_file and time.monotonic() - began > CACHE_S:
            sound = {source: identity for source, identity in self.files.items() if source not in self.damaged}
            cache.save(self.cache_file, self.columns, sound)

    def _files_there(self) -> dict[Source, Identity] | None:
        """The files of rollouts; None if nothing has changed. Old files are believed to be as they were, unless the run was taken back."""
        evals = numbered(self.run_dir.evals)
        state = State(mtime(self.run_dir.rollouts_dir), names(self.run_dir.discarded), tuple(map(mtime, evals.values())))
        newest = sorted(source for source in self.files if source.kind is Kind.STEP)[-SUSPECTS:]
        if state == self.looked and all(identity_of(self.path(source)) == self.files[source] for source in newest):
            return None
        steps = {Source(Kind.STEP, number): path for number, path in step_files(self.run_dir.rollouts_dir)}
        of_evals = {Source(Kind.EVAL, version, path.stem): path for version, folder in evals.items() for path in folder.glob("*.jsonl")}
        whole = not self.looked or state.discarded != self.looked.discarded
        found = {} if whole else {source: self.files[source] for source in steps.keys() & self.files.keys() - {*newest}}
        for source, path in (steps | of_evals).items():
            if source not in found and (identity := identity_of(path) or identity_of(compressed(path))):
                found[source] = identity
        now = time.time_ns()
        settled = all(now - changed > TICK_NS for changed in (state.rollouts, *state.evals))
        self.looked = state if settled else state._replace(rollouts=LOOK_AGAIN)
        return found

    def paths(self, source: Source) -> list[Path]:
        """Where a file may be: that of a step is compressed once it is old."""
        if source.kind is Kind.EVAL:
            return [self.run_dir.eval(source.number, source.name)]
        plain = self.run_dir.pending_rollouts if source.kind is Kind.PENDING else self.run_dir.rollouts(source.number)
        return [plain] if source.kind is Kind.PENDING else [plain, compressed(plain)]

    def path(self, source: Source) -> Path:
        """Where a file is; if it is nowhere, where it would be."""
        paths = self.paths(source)
        return next((path for path in paths if path.exists()), paths[0])

    def _forget(self, sources: list[Source]) -> None:
        steps = [source.number for source in sources if source.kind is Kind.STEP]
        gone, kinds = np.isin(self.columns["step"], steps) & (self.columns["kind"] == Kind.STEP), self.columns["kind"]
        for source in sources:
            del self.files[source]
            self.damaged.pop(source, None)
            if source.kind is Kind.EVAL:
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
                continue  # compressed, deleted or moved at this moment: the next refresh sees it
            except CorruptFileError as error:
                self.damaged[source], found = str(error), []
            if source.kind is not kind or len(lines) >= CHUNK:
                self.columns.add(kind, lines, places)
                lines, places, kind = [], [], source.kind
            lines += [line for line, _ in found]
            places += [place for _, place in found]
            if identity:
                self.files[source] = identity
        self.columns.add(kind, lines, places)

    def _read_pending(self) -> None:
        path, (inode, offset) = self.run_dir.pending_rollouts, self.pending_as_read
        try:
            with reading(path), path.open("rb") as file:
                there, end = os.fstat(file.fileno()).st_ino, end_of_last_line(file)
                if there != inode or end < offset:  # made anew, as at every commit
                    self._drop(self.columns["kind"] == Kind.PENDING)
                    offset = 0
                file.seek(offset)
                found = [(line, (at + offset, length)) for line, (at, length) in decoded(path, file.read(end - offset))]
        except FileNotFoundError:
            self._drop(self.columns["kind"] == Kind.PENDING)
            self.pending_as_read = (0, 0)
            return
        except CorruptFileError as error:
            self.damaged[PENDING] = str(error)
            return
        self.damaged.pop(PENDING, None)
        self.columns.add(Kind.PENDING, [line for line, _ in found], [place for _, place in found])
        self.pending_as_read = (there, end)


def decoded(path: Path, data: bytes) -> Iterator[tuple[Line, tuple[int, int]]]:
    """(line, (offset, length)) of each whole line. Raises CorruptFileError for one that is no rollout."""
    offset = 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            yield DECODER.decode(text), (offset, len(text))
        except UNREADABLE as error:
            raise CorruptFileError(f"{path}:{number}: no rollout of this version of rl: {error}") from None
        offset += len(text)


def step_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """(step, its file of rollouts)."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if match := STEP_FILE.fullmatch(name):
                yield int(match[1]), folder / name


def compressed(path: Path) -> Path:
    """The name that `000012.jsonl` has once it is old."""
    return path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")


def names(folder: Path) -> tuple[str, ...]:
    """What a folder holds."""
    with contextlib.suppress(FileNotFoundError):
        return tuple(sorted(os.listdir(folder)))
    return ()


def mtime(path: Path) -> int:
    """When a directory last changed, ns; 0 without it."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def identity_of(path: Path) -> Identity | None:
    """See Identity; None without the file."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return None
    return Identity(there.st_size, there.st_mtime_ns)
