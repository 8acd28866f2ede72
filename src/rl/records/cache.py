"""The index of a run's rollouts in the user's cache, so that a long run is not read again by every process. It may be deleted any time."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl.records.columns import DTYPES, WORDS, Columns, Kind, Words

FORMAT = "1"
MAX_BYTES = 1 << 30
"""Of all indices together; the ones that were not used for longest go first."""
Key = tuple[int, int, str]
Identities = dict[Key, tuple[int, int]]


def cache_file(root: Path) -> Path:
    """Where the index of a run is kept: $XDG_CACHE_HOME/rl/records, by default ~/.cache/rl/records."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl" / "records"
    name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=8).hexdigest()
    return folder / f"{root.resolve().name}-{name}.safetensors"


def save(path: Path, columns: Columns, files: Mapping[Key, tuple[int, int]]) -> None:
    """Writes an index, if the cache can be written, and makes room for it."""
    kept = columns.only((columns["gone"] == 0) & (columns["kind"] != Kind.PENDING))
    tensors = {f"column/{name}": np.ascontiguousarray(kept[name]) for name in DTYPES}
    tensors |= {f"metric/{name}": np.ascontiguousarray(values) for name, values in kept.metrics.items()}
    tensors["identities"] = np.array([*files.values()], np.int64).reshape(-1, 2)
    about = {
        "format": FORMAT,
        "words": json.dumps({name: kept.words[name].words for name in WORDS}),
        "left_out": json.dumps(sorted(kept.left_out)),
        "files": json.dumps([*files]),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=about)
        temporary.rename(path)
        make_room(path.parent)


def make_room(folder: Path) -> None:
    """Deletes the oldest indices beyond MAX_BYTES."""
    files = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MAX_BYTES:
            path.unlink(missing_ok=True)


def load(path: Path) -> tuple[Columns, Identities] | None:
    """An index as it was kept; None if there is none that can be read."""
    try:
        with safe_open(path, framework="np") as file:
            about, columns = file.metadata() or {}, Columns()
            if about.get("format") != FORMAT:
                return None
            columns.words = {name: Words(words) for name, words in json.loads(about["words"]).items()}
            columns.left_out = set(json.loads(about["left_out"]))
            columns.arrays = {name: file.get_tensor(f"column/{name}") for name in DTYPES}
            prefix = "metric/"
            columns.metrics = {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
            identities = file.get_tensor("identities").tolist()
            keys = [(kind, number, name) for kind, number, name in json.loads(about["files"])]
            columns.size = len(columns.arrays["kind"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    same = {len(array) for arrays in (columns.arrays, columns.metrics) for array in arrays.values()} == {columns.size}
    return (columns, dict(zip(keys, map(tuple, identities), strict=True))) if same and len(keys) == len(identities) else None
