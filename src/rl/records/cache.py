"""Keeps the index of a run's rollouts in the user's cache, so that not every process reads a long
run again. Safe to delete any time."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl.records.columns import Columns, Words, columns_of

FORMAT = 5
MAX_BYTES = 1 << 30
"""Maximum size of all indices together; the oldest are deleted first."""
Identity = tuple[int, int]
"""Size of a file in bytes, and its mtime in ns."""


def cache_file(root: Path) -> Path:
    """The path of a run's index, in $XDG_CACHE_HOME/rl/records (by default ~/.cache/rl/records)."""
    home, root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), root.resolve()
    name = hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()
    return home / "rl" / "records" / f"{root.name}-{name}.{FORMAT}.safetensors"


def save(path: Path, columns: Columns, words: Words, files: Mapping[str, Identity]) -> None:
    """Writes an index of files if the cache is writable, and deletes old ones to make room."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    about = {"words": json.dumps(words.words), "files": json.dumps(files)}
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(columns, temporary, about)
        temporary.rename(path)
        total = 0
        for file in sorted(path.parent.iterdir(), key=lambda file: -file.stat().st_mtime):
            total += file.stat().st_size
            if total > MAX_BYTES:
                file.unlink(missing_ok=True)


def load(path: Path) -> tuple[Columns, Words, dict[str, Identity]]:
    """The columns of an index, and the files that they are of; none if there is no readable one."""
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata()
            files = {
                name: (size, mtime) for name, (size, mtime) in json.loads(about["files"]).items()
            }
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return columns, Words(json.loads(about["words"])), files
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        words = Words()
        return columns_of([], words), words, {}
