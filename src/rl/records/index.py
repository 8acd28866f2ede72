"""The index of a run's rollouts: follows rollouts/ and evals/, and locates each rollout. Writes
nothing to the run."""

import heapq
import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np

from rl.records import cache
from rl.records.columns import DECODER, Columns, Kind, Line, Source
from rl.run_dir.files import CorruptFileError, files_in
from rl.run_dir.paths import RunDir, numbers
from rl.wire.batch_file import sound_rollouts
from rl.wire.messages import UNREADABLE

T = TypeVar("T")
CHUNK = 8192
"""Number of rows added at once."""
SUSPECTS = 3
"""Number of newest steps that are checked again: an orchestrator that was killed before its
commit rewrites their files."""
CACHE_S = 2.0
"""An index that took more seconds to read is kept in the user's cache."""
TICK_NS = 100_000_000
"""A folder that changed within this time may change again with the same mtime."""


PENDING = Source(Kind.PENDING, 0)


class RolloutIndex:
    """Columns of all rollouts. `refresh` reads what is new, and is not thread-safe."""

    def __init__(self, run_dir: RunDir, cache_file: Path):
        """cache_file: where the index is kept beyond this process."""
        self.run_dir, self.cache_file = run_dir, cache_file
        self.columns = Columns()
        self.files: dict[Source, cache.Identity] = {}
        """The files that were read."""
        self.damaged: dict[Source, str] = {}
        """Unreadable files, with the reason; their rollouts are missing."""
        self.denied: dict[Path, str] = {}
        """Folders without read permission, with the error."""
        self.looked: int | None = None
        """The mtime of rollouts/ in ns when it was listed; 0 if it may change again with the
        same one; None before the first time."""
        if found := cache.load(cache_file):
            self.columns, self.files = found

    def refresh(self) -> None:
        """Reads what is new, and drops what is gone."""
        began = time.monotonic()
        if self._replaced(PENDING):
            # first: rollouts that a batch settles meanwhile are then seen twice instead of never
            self._read([PENDING])
        changed = sorted(self._changed_steps() | self._changed_evals())
        self._read(changed)
        waits = self.columns["kind"] == Kind.PENDING
        if waits.any():
            settled = self.columns["kind"] == Kind.STEP
            recent = settled & (
                self.columns["step"] > self.columns["step"][settled].max(initial=0) - SUSPECTS
            )
            self._drop(waits & np.isin(self.columns["group_id"], self.columns["group_id"][recent]))
        if changed and time.monotonic() - began > CACHE_S:
            sound = {
                source: identity
                for source, identity in self.files.items()
                if source != PENDING and source not in self.damaged
            }
            cache.save(self.cache_file, self.columns, sound)

    def _changed_steps(self) -> set[Source]:
        """The files of steps that are new, gone or replaced. Old ones are assumed to be
        unchanged, unless the newest ones are gone or were replaced: then the run was rolled
        back, or is another one (see --clean)."""
        folder = self.run_dir.rollouts_dir
        _, changed_at = identity_of(folder) or (0, 0)
        if changed_at and changed_at == self.looked and folder not in self.denied:
            return set()
        there = {
            Source(Kind.STEP, step) for step in self._listed(folder, self.run_dir.rollout_files)
        }
        known = {source for source in self.files if source.kind is Kind.STEP}
        suspects = set(heapq.nlargest(SUSPECTS, known))
        if (
            self.looked is None
            or not there.issuperset(suspects)
            or any(map(self._replaced, suspects))
        ):
            suspects = known
        self.looked = changed_at if time.time_ns() - changed_at > TICK_NS else 0
        return known ^ there | set(filter(self._replaced, suspects))

    def _changed_evals(self) -> set[Source]:
        sources = {source for source in self.files if source.kind is Kind.EVAL}
        evals = self.run_dir.evals
        for version in self._listed(evals, lambda: numbers(evals)):
            folder = evals / f"{version:06d}"
            sources |= {
                Source(Kind.EVAL, version, path.stem)
                for path in self._listed(folder, partial(files_in, folder, ".jsonl"))
            }
        return set(filter(self._replaced, sources))

    def _replaced(self, source: Source) -> bool:
        """Whether a file is not the one that was read; one that is not there was not read."""
        return identity_of(self.path(source)) != self.files.get(source)

    def _listed(self, folder: Path, entries: Callable[[], Collection[T]]) -> Collection[T]:
        """The entries of a folder, none if it may not be read: `denied` says so."""
        self.denied.pop(folder, None)
        try:
            return entries()
        except PermissionError as error:
            self.denied[folder] = str(error)
            return ()

    def paths(self, source: Source) -> list[Path]:
        """The possible paths of a file: a step's is compressed once it is old."""
        if source.kind is Kind.EVAL:
            return [self.run_dir.eval(source.number, source.name)]
        if source.kind is Kind.PENDING:
            return [self.run_dir.pending_rollouts]
        plain = self.run_dir.rollouts(source.number)
        return [plain, plain.with_name(f"{plain.name}.gz")]

    def path(self, source: Source) -> Path:
        """The path of a file, or its default path if it does not exist."""
        paths = self.paths(source)
        return next((path for path in paths if os.path.exists(path)), paths[0])

    def _forget(self, sources: list[Source]) -> None:
        known = [source for source in sources if self.files.pop(source, None)]
        for source in sources:
            self.damaged.pop(source, None)
        if not known:
            return
        kinds, versions, envs = (self.columns[name] for name in ("kind", "version", "env"))
        steps = [source.number for source in known if source.kind is Kind.STEP]
        gone = (kinds == Kind.STEP) & np.isin(self.columns["step"], steps)
        if PENDING in known:
            gone |= kinds == Kind.PENDING
        for source in known:
            if source.kind is Kind.EVAL:
                gone |= (
                    (kinds == Kind.EVAL)
                    & (versions == source.number)
                    & (envs == self.columns.code("env", source.name))
                )
        self._drop(gone)

    def _drop(self, rows: np.ndarray) -> None:
        """Removes rows; a selection that was made before keeps them. rows: [size] bool."""
        if rows.any():
            self.columns = self.columns.only(~rows)

    def _read(self, sources: list[Source]) -> None:
        """Reads files, in place of what was read of them before. sources: sorted."""
        self._forget(sources)
        for kind, several in groupby(sources, key=lambda source: source.kind):
            lines, places = list[Line](), list[tuple[int, int]]()
            for source in several:
                path = self.path(source)
                if (identity := identity_of(path)) is None:
                    continue  # deleted, or in a folder that is denied
                try:
                    found = list(decoded(path, sound_rollouts(path)))
                except FileNotFoundError:
                    continue  # just compressed, deleted or moved: the next refresh handles it
                except (CorruptFileError, PermissionError) as error:
                    self.damaged[source], found = str(error), []
                self.files[source] = identity
                lines += [line for line, _ in found]
                places += [place for _, place in found]
                if len(lines) >= CHUNK:
                    self.columns.add(kind, lines, places)
                    lines, places = [], []
            self.columns.add(kind, lines, places)


def decoded(path: Path, data: bytes) -> Iterator[tuple[Line, tuple[int, int]]]:
    """Yields (line, (offset, length)) of each complete line. Raises CorruptFileError for a line
    that is not a rollout."""
    offset = 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            yield DECODER.decode(text), (offset, len(text))
        except UNREADABLE as error:
            raise CorruptFileError(
                f"{path}:{number}: not a rollout of this version of rl: {error}"
            ) from None
        offset += len(text)


def identity_of(path: Path) -> cache.Identity | None:
    """The size and mtime of a file or folder; None if it does not exist or is not accessible."""
    try:
        there = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    return there.st_size, there.st_mtime_ns
