"""Keeps the index of a run's rollouts in the user's cache, so that not every process reads a
long run again. Safe to delete any time."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl.records.columns import DTYPES, WORDS, Columns, Kind, Source, Words

FORMAT = "4"
MAX_BYTES = 1 << 30
"""Maximum size of all indices together; the oldest are deleted first."""
Identity = tuple[int, int]
"""Size of a file in bytes, and its mtime in ns."""


def cache_file(root: Path) -> Path:
    """The path of a run's index, in $XDG_CACHE_HOME/rl/records (by default ~/.cache/rl/records)."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl" / "records"
    name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
    return folder / f"{root.resolve().name}-{name}.safetensors"


def save(path: Path, columns: Columns, files: Mapping[Source, Identity]) -> None:
    """Writes an index of files if the cache is writable, and deletes old ones to make room."""
    kept = columns.only(columns["kind"] != Kind.PENDING)
    tensors = {f"column/{name}": np.ascontiguousarray(kept[name]) for name in DTYPES}
    tensors |= {
        f"metric/{name}": np.ascontiguousarray(values) for name, values in kept.metrics.items()
    }
    about = {
        "format": FORMAT,
        "words": json.dumps({name: kept.words[name].words for name in WORDS}),
        "left_out": json.dumps(sorted(kept.left_out)),
        "files": json.dumps([*files.items()]),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=about)
        temporary.rename(path)
        make_room(path.parent)


def make_room(folder: Path) -> None:
    """Deletes the oldest indices beyond MAX_BYTES."""
    files = sorted(
        folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


def load(path: Path) -> tuple[Columns, dict[Source, Identity]] | None:
    """The columns of an index, and the files that it is of; None if there is no readable one."""
    try:
        with safe_open(path, framework="np") as file:
            about, columns = file.metadata() or {}, Columns()
            if about.get("format") != FORMAT:
                return None
            columns.words = {
                name: Words(words) for name, words in json.loads(about["words"]).items()
            }
            columns.left_out = set(json.loads(about["left_out"]))
            columns.arrays = {name: file.get_tensor(f"column/{name}") for name in DTYPES}
            prefix = "metric/"
            columns.metrics = {
                name.removeprefix(prefix): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
                if name.startswith(prefix)
            }
            files = {
                Source(Kind(kind), number, name): (size, changed)
                for (kind, number, name), (size, changed) in json.loads(about["files"])
            }
            columns.size = len(columns.arrays["kind"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    same = {
        len(array) for arrays in (columns.arrays, columns.metrics) for array in arrays.values()
    } == {columns.size}
    return (columns, files) if same else None
