"""The runs that are shown: which there are, each opened once, and what a request names by its key."""

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rl.diagnosis.state import Heartbeats
from rl.records.run import Run
from rl.run_dir.paths import is_run
from rl.system.errors import RunError
from rl.system.terminal import visible

LOOK_S = 2.0
"""For so long a list of the runs is believed."""
DEPTH = 3
"""How many folders below a place a run may lie, as `outputs/sweep/x` does below `outputs`."""


class UnknownRunError(RunError):
    """A request names a run that is not shown; the answer is 404."""


def find_runs(folder: Path, denied: list[Path], depth: int = DEPTH) -> list[Path]:
    """The runs in a folder: itself, or those below it; none within a run. `denied` gets the folders that may not be looked into."""
    try:
        if is_run(folder):
            return [folder]
        below = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".") if depth else []
    except PermissionError:
        denied.append(folder)
        return []
    except OSError:
        return []
    return [run for path in below for run in find_runs(Path(path), denied, depth - 1)]


def identity(root: Path) -> tuple[int, ...]:
    """What tells that a run is not another one of the same name: its directory and its configuration, by inode and time of change."""
    config = os.stat(root / "config.toml")
    return os.stat(root).st_ino, config.st_ino, config.st_mtime_ns


class Library:
    """The runs in some places, which are runs or folders with runs. Several threads may use it."""

    def __init__(self, places: Sequence[Path]):
        self.places = [place.expanduser().absolute() for place in places]
        self.lock = threading.Lock()
        self.opened: dict[str, tuple[tuple[int, ...], Run]] = {}
        """Key -> what tells that its directory is the one that was opened, and the run."""
        self.found: dict[str, Path] = {}
        self.denied: list[Path] = []
        """Folders that may not be looked into."""
        self.looked = -LOOK_S

    def keys(self) -> dict[str, Path]:
        """The directory of each run by its key: its path below the place that it lies in."""
        with self.lock:
            if time.monotonic() - self.looked >= LOOK_S:
                self.denied = list[Path]()
                self.found = self._by_key([run for place in self.places for run in find_runs(place, self.denied)])
                self.looked = time.monotonic()
            return dict(self.found)

    @property
    def place(self) -> str:
        """Where the runs were looked for, in words."""
        denied = f" (not to be looked into: {', '.join(map(str, self.denied))})" if self.denied else ""
        return visible(", ".join(map(str, self.places)) + denied)

    def run(self, key: str) -> Run:
        """A run by its key. Raises UnknownRunError: nothing but the runs in the places is ever opened."""
        root = self.keys().get(key)
        if root is None:
            raise UnknownRunError(f"{key}: there is no such run here (any more)")
        with self.lock:
            there = identity(root)
            if key not in self.opened or self.opened[key][0] != there:
                run = Run(root)
                run.heartbeats = Heartbeats()
                self.opened[key] = there, run
            return self.opened[key][1]

    def _by_key(self, runs: list[Path]) -> dict[str, Path]:
        """The runs by their keys; of those that would have the same one each has its whole path. What would act on a page, or is no
        UTF-8, is escaped."""
        keys = Counter(self._key(run) for run in set(runs))
        return {visible(key if keys[key] == 1 else str(run)): run for run in runs for key in [self._key(run)]}

    def _key(self, root: Path) -> str:
        """`x` for outputs/x; of several places the folder's name stands before it."""
        for place in self.places:
            if root == place:
                same = [other for other in self.places if other.name == root.name]
                return root.name if len(same) == 1 else str(root)
            if root.is_relative_to(place):
                inner = str(root.relative_to(place))
                return inner if len(self.places) == 1 else f"{place.name}/{inner}"
        return str(root)
