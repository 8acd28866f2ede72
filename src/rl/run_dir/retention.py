"""Which numbered entries of a run stay on disk: one rule for batches, rollouts, checkpoints and policy versions."""

from collections.abc import Collection
from pathlib import Path

from rl.run_dir.files import remove_directory

NEVER = 2**62


def delete_old(
    entries: dict[int, Path], keep_last: int | None, keep_every: int | None, needed: Collection[int] = (), needed_from: int = NEVER
) -> None:
    """Deletes files and directories, in the order of `entries`, by their numbers.

    What stays: the newest `keep_last` (None: all), multiples of `keep_every`, those `needed`, all from `needed_from` on.
    """
    newest = entries.keys() if keep_last is None else sorted(entries)[max(0, len(entries) - keep_last) :]
    for number, path in entries.items():
        if number in newest or number in needed or number >= needed_from or (keep_every and number % keep_every == 0):
            continue
        if path.is_dir():
            remove_directory(path)
        else:
            path.unlink(missing_ok=True)
