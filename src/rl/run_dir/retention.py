"""Decides which numbered entries of a run stay on disk: one rule for batches, rollouts,
checkpoints and policy versions."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from pathlib import Path

from rl.run_dir.files import remove_directory
from rl.run_dir.paths import numbers

NEVER = 2**62


class Retention:
    """Deletes old entries of a directory. Lists it only once: the one process that adds entries
    reports each.

    Keeps the newest `keep_last` (None: all), multiples of `keep_every`, those that the caller
    needs, and what any of these continues.
    """

    def __init__(
        self,
        directory: Path,
        suffixes: Collection[str],
        keep_last: int | None,
        keep_every: int | None,
    ):
        """`suffixes`: suffixes of the files or directories that make up one entry."""
        self.directory, self.suffixes, self.keep_last, self.keep_every = (
            directory,
            suffixes,
            keep_last,
            keep_every,
        )
        self.newest: list[int] | None = None
        """Numbers of the newest entries, ascending; None before the directory was listed."""
        self.old: list[int] = []
        """Earlier entries that stay only while they are needed, ascending."""
        self.continues: Callable[[int], bool] = lambda number: False
        """Whether there is an entry `number` that is of no use without the one before."""

    def delete_old(
        self, added: int, needed: Collection[int] = (), needed_from: int = NEVER
    ) -> None:
        """Deletes old entries, newest first, now that `added` exists; keeps those in `needed`
        and all from `needed_from` on."""
        if self.keep_last is None:
            return
        if self.newest is None:
            self.newest = []
            for number in sorted(
                {number for suffix in self.suffixes for number in numbers(self.directory, suffix)}
            ):
                self._add(number, self.newest, self.keep_last)
        self._add(added, self.newest, self.keep_last)
        end = bisect_left(self.old, needed_from)
        for index in reversed(range(end)):
            if self.old[index] not in needed and not self.continues(self.old[index] + 1):
                self._delete(self.old.pop(index))

    def _add(self, number: int, newest: list[int], keep_last: int) -> None:
        if number not in newest:
            insort(newest, number)
        while len(newest) > keep_last:
            oldest = newest.pop(0)
            if not (self.keep_every and oldest % self.keep_every == 0) and oldest not in self.old:
                insort(self.old, oldest)

    def _delete(self, number: int) -> None:
        for suffix in self.suffixes:
            path = self.directory / f"{number:06d}{suffix}"
            if path.is_dir():
                remove_directory(path)
            else:
                path.unlink(missing_ok=True)
