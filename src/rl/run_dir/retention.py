"""Decides which numbered entries of a run stay on disk: one rule for batches, rollouts,
checkpoints and policy versions."""

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
        self.directory, self.suffixes = directory, suffixes
        self.keep_last, self.keep_every = keep_last, keep_every
        self.known: set[int] | None = None
        """Numbers of the entries, but for older ones that stay for ever; None before the directory
        was listed."""
        self.continues: Callable[[int], bool] = lambda number: False
        """Whether there is an entry `number` that is of no use without the one before."""

    def delete_old(
        self, added: int, needed: Collection[int] = (), needed_from: int = NEVER
    ) -> None:
        """Deletes old entries, newest first, now that `added` exists; keeps those in `needed`
        and all from `needed_from` on."""
        if self.keep_last is None:
            return
        if self.known is None:
            listed = [numbers(self.directory, suffix) for suffix in self.suffixes]
            self.known = set().union(*listed)
        self.known.add(added)
        for number in sorted(self.known, reverse=True)[self.keep_last :]:
            if self.keep_every and number % self.keep_every == 0:
                self.known.remove(number)
            elif not (number in needed or number >= needed_from or self.continues(number + 1)):
                self.known.remove(number)
                self._delete(number)

    def _delete(self, number: int) -> None:
        for suffix in self.suffixes:
            path = self.directory / f"{number:06d}{suffix}"
            if path.is_dir():
                remove_directory(path)
            else:
                path.unlink(missing_ok=True)
