"""The index of a run's rollouts: follows rollouts/ and evals/, and locates each rollout. Writes
nothing to the run."""

import heapq
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rl.records import cache
from rl.records.columns import DECODER, Line, columns_of, joined, some
from rl.run_dir.files import UNREADABLE, CorruptFileError
from rl.run_dir.paths import PENDING_LOG, RunDir
from rl.wire.batch_file import sound_rollouts
from rl.wire.pending import waiting_lines

CHUNK = 8192
"""Number of rows added at once."""
MOST_TABLES = 16
"""Maximum number of tables of CHUNK rows before they are joined: more would fragment the memory."""
SUSPECTS = 3
"""Number of newest steps that are checked again: an orchestrator that was killed before its commit
rewrites their files."""
CACHE_S = 2.0
"""An index that took more seconds to read is kept in the user's cache."""
TICK_NS = 100_000_000
"""A folder that changed within this time may change again with the same mtime."""
ROLLOUTS, EVALS = "rollouts/", "evals/"
NUMBER = "([0-9]{6}|[1-9][0-9]{6,})"
"""How a step or version is named, see rl.run_dir.paths."""
PENDING = f"batches/{PENDING_LOG}"


class RolloutIndex:
    """Columns of all rollouts. `refresh` reads what is new, and is not thread-safe. Files are named
    by their path in the run, without the suffix that they have once they are compressed."""

    def __init__(self, run_dir: RunDir, cache_file: Path):
        """cache_file: where the index is kept beyond this process."""
        self.run_dir, self.cache_file = run_dir, cache_file
        self.columns, self.words, self.files = cache.load(cache_file)
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
            sound = self.files.keys() - self.damaged.keys() - {PENDING}
            files = {file: self.files[file] for file in sound}
            columns = some(self.columns, ~self._of([PENDING]))
            cache.save(self.cache_file, columns, self.words, files)

    def _changed_steps(self, looked: int) -> set[str]:
        """The files of steps that are new, gone or replaced. Old ones are assumed to be unchanged,
        unless the newest ones are gone or were replaced: then the run was rolled back, or is
        another one (see --clean)."""
        folder = self.run_dir.rollouts_dir
        if looked and looked == self.looked and folder not in self.denied:
            return set()
        names = self._listed(folder, rf"{NUMBER}\.jsonl(\.gz)?")
        files = {ROLLOUTS + name.removesuffix(".gz") for name in names}
        known, suspects = self._steps(), self._newest_steps()
        if self.looked is None or suspects - files or any(map(self._replaced, suspects)):
            suspects = known
        return known ^ files | set(filter(self._replaced, suspects))

    def _changed_evals(self) -> set[str]:
        files = {file for file in self.files if file.startswith(EVALS)}
        for version in self._listed(self.run_dir.evals, NUMBER):
            names = self._listed(self.run_dir.evals / version, r".*\.jsonl")
            files |= {f"{EVALS}{version}/{name}" for name in names}
        return set(filter(self._replaced, files))

    def _steps(self) -> set[str]:
        return {file for file in self.files if file.startswith(ROLLOUTS)}

    def _newest_steps(self) -> set[str]:
        return set(heapq.nlargest(SUSPECTS, self._steps(), key=lambda file: (len(file), file)))

    def _drop_settled(self) -> None:
        """Drops pending rollouts that the newest steps have, too."""
        waits, groups = self._of([PENDING]), self.columns["group_id"]
        if waits.any():
            settled = np.isin(groups, groups[self._of(self._newest_steps())])
            self.columns = some(self.columns, ~(waits & settled))

    def _of(self, files: Iterable[str]) -> np.ndarray:
        """Which rows are of some files."""
        return np.isin(self.columns["file"], [self.words.code(file) for file in files])

    def _replaced(self, file: str) -> bool:
        """Whether a file is not the one that was read; a missing one was not read."""
        return identity_of(self.path(file)) != self.files.get(file)

    def _listed(self, folder: Path, pattern: str) -> list[str]:
        """The names in a folder that match; none if it may not be read: `denied` says so."""
        self.denied.pop(folder, None)
        try:
            return list(filter(re.compile(pattern, re.DOTALL).fullmatch, os.listdir(folder)))
        except PermissionError as error:
            self.denied[folder] = str(error)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return []

    def paths(self, file: str) -> list[Path]:
        """The possible paths of a file: a step's is compressed once it is old."""
        return [self.run_dir.root / file, self.run_dir.root / f"{file}.gz"]

    def path(self, file: str) -> Path:
        """The path of a file, or its default path if it does not exist."""
        paths = self.paths(file)
        return next(filter(os.path.exists, paths), paths[0])

    def _read(self, files: Iterable[str]) -> bool:
        """Reads files, in place of what was read of them before. Returns whether there are any. A
        selection that was made before keeps its rows."""
        files = sorted(files)
        known = [file for file in files if self.files.pop(file, None)]
        if known:
            self.columns = some(self.columns, ~self._of(known))
        tables, lines, identities = [self.columns], list[Line](), dict[str, cache.Identity]()
        for file in files:
            self.damaged.pop(file, None)
            path = self.path(file)
            if (identity := identity_of(path)) is None:
                continue  # deleted, or in a folder that is denied
            try:
                data = waiting_lines(path) if file == PENDING else sound_rollouts(path)
                lines += list(decoded(path, file, data))
            except FileNotFoundError:
                continue  # just compressed, deleted or moved: the next refresh handles it
            except (CorruptFileError, PermissionError) as error:
                self.damaged[file] = str(error)
            identities[file] = identity
            if len(lines) >= CHUNK:
                tables.append(columns_of(lines, self.words, tables[-1]))
                lines = []
            if len(tables) > MOST_TABLES:
                tables = [joined(tables)]
        if files:
            self.columns = joined([*tables, columns_of(lines, self.words, tables[-1])])
            self.files |= identities  # not before: whoever interrupts this loses no rows
        return bool(files)


def decoded(path: Path, file: str, data: bytes) -> Iterator[Line]:
    """Yields each complete line. Raises CorruptFileError for a line that is not a rollout."""
    kind = "eval" if file.startswith(EVALS) else "pending" if file == PENDING else "train"
    offset = 0
    for number, text in enumerate(data[: data.rfind(b"\n") + 1].splitlines(keepends=True), start=1):
        try:
            line = DECODER.decode(text)
        except UNREADABLE as error:
            fault = f"not a rollout of this version of rl: {error}"
            raise CorruptFileError(f"{path}:{number}: {fault}") from None
        vars(line).update(kind=kind, file=file, offset=offset, length=len(text))
        offset += len(text)
        yield line


def identity_of(path: Path) -> cache.Identity | None:
    """The size and mtime of a file or folder; None if it does not exist or is not accessible."""
    try:
        status = path.stat()
    except (FileNotFoundError, PermissionError):
        return None
    return status.st_size, status.st_mtime_ns
