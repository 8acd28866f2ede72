"""Which numbered entries of a run stay on disk: one rule for batches, rollouts, checkpoints and policy versions."""

from bisect import bisect_left, insort
from collections.abc import Collection
from pathlib import Path

from rl.run_dir.files import remove_directory
from rl.run_dir.paths import numbers

NEVER = 2**62


class Retention:
    """Deletes what is old in a directory. It lists that once: the one process that adds entries tells of each.

    What stays: the newest `keep_last` (None: all), multiples of `keep_every`, and what the caller needs.
    """

    def __init__(self, directory: Path, suffixes: Collection[str], keep_last: int | None, keep_every: int | None):
        """`suffixes`: of the files or directories that one entry consists of."""
        self.directory, self.suffixes, self.keep_last, self.keep_every = directory, suffixes, keep_last, keep_every
        self.newest: list[int] | None = None
        """Ascending; None: the directory was not listed yet."""
        self.old: list[int] = []
        """Those before them that stay as long as they are needed, ascending."""

    def delete_old(self, added: int, needed: Collection[int] = (), needed_from: int = NEVER) -> None:
        """Deletes entries, oldest first, now that `added` is there: not those `needed`, nor any from `needed_from` on."""
        if self.keep_last is None:
            return
        if self.newest is None:
            self.newest = []
            for number in sorted({number for suffix in self.suffixes for number in numbers(self.directory, suffix)}):
                self._add(number, self.newest, self.keep_last)
        self._add(added, self.newest, self.keep_last)
        end = bisect_left(self.old, needed_from)
        for number in self.old[:end]:
            if number not in needed:
                self._delete(number)
        self.old = [number for number in self.old[:end] if number in needed] + self.old[end:]

    def _add(self, number: int, newest: list[int], keep_last: int) -> None:
        if number not in newest[bisect_left(newest, number) :][:1]:
            insort(newest, number)
        while len(newest) > keep_last:
            oldest = newest.pop(0)
            if not (self.keep_every and oldest % self.keep_every == 0) and oldest not in self.old[-1:]:
                insort(self.old, oldest)

    def _delete(self, number: int) -> None:
        for suffix in self.suffixes:
            path = self.directory / f"{number:06d}{suffix}"
            if path.is_dir():
                remove_directory(path)
            else:
                path.unlink(missing_ok=True)
