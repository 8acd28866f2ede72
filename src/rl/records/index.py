"""The index of a run's rollouts: follows rollouts/ and evals/, and locates each rollout. Writes
nothing to the run, and keeps what took long to read in the user's cache, which may be deleted any
time."""

import contextlib
import hashlib
import heapq
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rl.records.columns import DECODER, Columns, RolloutLine, Words, columns_of, joined, some
from rl.run_dir.files import UNREADABLE, CorruptFileError, write_file
from rl.run_dir.paths import PENDING_LOG, RunDir
from rl.wire.batch_file import sound_rollouts
from rl.wire.rollouts import waiting_lines

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
NUMBER = "([0-9]{6}|[1-9][0-9]{6,})"
"""How a step or version is named, see rl.run_dir.paths."""
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
        folder = self.run_dir.rollouts_dir
        if looked and looked == self.looked and folder not in self.denied:
            return set()
        names = self._listed(folder, rf"{NUMBER}\.jsonl(\.gz)?")
        files = {ROLLOUTS + name.removesuffix(".gz") for name in names}
        known, suspects = self._known(ROLLOUTS), self._newest_steps()
        if self.looked is None or suspects - files or any(map(self._replaced, suspects)):
            suspects = known
        return known ^ files | set(filter(self._replaced, suspects))

    def _changed_evals(self) -> set[str]:
        files = self._known(EVALS)
        for version in self._listed(self.run_dir.evals, NUMBER):
            names = self._listed(self.run_dir.evals / version, r".*\.jsonl")
            files |= {f"{EVALS}{version}/{name}" for name in names}
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
    data = waiting_lines(path) if kind == "pending" else sound_rollouts(path)
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
