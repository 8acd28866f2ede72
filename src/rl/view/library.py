"""The runs that are shown: finds them, opens each once, and looks them up by the key in a
request."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rl.records.run import Run, plain
from rl.run_dir.paths import is_model, is_run
from rl.run_dir.status import Staleness
from rl.system.errors import RunError
from rl.system.terminal import visible

LOOK_S = 2.0
"""Seconds for which the list of runs is cached."""
KEPT = 16
"""Most runs that stay open: each may hold a hundred megabytes for a million rollouts."""
DEPTH = 3
"""Maximum depth of a run below a place; `outputs/sweep/x` has depth 2 below `outputs`."""


def find_runs(folder: Path, denied: list[Path], depth: int = DEPTH) -> list[Path]:
    """The runs in a folder: the folder itself, or those below it; inside a run only the models
    of an `rl serve`. Adds unreadable folders to `denied`."""
    try:
        if is_run(folder):
            models = [model for model in sorted(folder.glob("models/*")) if is_model(model)]
            return [folder, *filter(is_run, models)]
        entries = [entry for entry in os.scandir(folder) if entry.name[0] != "."] if depth else []
        below = sorted(Path(entry) for entry in entries if entry.is_dir())
    except PermissionError:
        denied.append(folder)
        return []
    except OSError:
        return []
    return [run for path in below for run in find_runs(path, denied, depth - 1)]


def identity(root: Path) -> tuple[int, ...]:
    """Distinguishes a run from another one at the same path: inodes of its directory and
    configuration, and the latter's mtime."""
    config = os.stat(root / "config.toml")
    return os.stat(root).st_ino, config.st_ino, config.st_mtime_ns


class Library:
    """The runs in some places, which are runs or folders with runs. Thread-safe."""

    def __init__(self, places: Sequence[Path]):
        self.places = [plain(folder) for folder in places]
        folders = [folder.parent if is_run(folder) else folder for folder in self.places]
        self.base = os.path.commonpath(folders)
        self.lock = threading.Lock()
        self.opened: dict[str, tuple[tuple[int, ...], Run]] = {}
        """Key -> identity of the opened directory, and the run; the KEPT that were asked for
        last, in this order."""
        self.runs: dict[str, Path] = {}
        self.denied: list[Path] = []
        """Folders without read permission."""
        self.looked = -LOOK_S

    def keys(self) -> dict[str, Path]:
        """The directory of each run by its key: the path below what all places share, with control
        characters and invalid UTF-8 escaped."""
        with self.lock:
            if time.monotonic() - self.looked >= LOOK_S:
                self.denied = list[Path]()
                roots = [run for folder in self.places for run in find_runs(folder, self.denied)]
                self.runs = {visible(os.path.relpath(root, self.base)): root for root in roots}
                self.looked = time.monotonic()
            return dict(self.runs)

    @property
    def folders(self) -> str:
        """The places that were searched for runs, as text."""
        denied = ", ".join(map(str, self.denied))
        suffix = f" (no permission to read: {denied})" if denied else ""
        return visible(", ".join(map(str, self.places)) + suffix)

    def run(self, key: str) -> Run:
        """A run by its key. Raises RunError for any other: only runs in the places are ever
        opened."""
        root = self.keys().get(key)
        if root is None:
            raise RunError(f"{key}: no such run here; it may have been deleted")
        with self.lock:
            current = identity(root)
            before, run = self.opened.pop(key, ((), None))
            if run is None or before != current:
                run = Run(root)
                run.heartbeats = Staleness()
            self.opened[key] = current, run
            for oldest in [*self.opened][:-KEPT]:
                del self.opened[oldest]
            return run
