"""BLAKE3 of files and tensors, in hexadecimal: 0.2 s per GB on one core, while SHA-256 takes 1 s."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

T = TypeVar("T")
MAX_THREADS = 8
HASH = "blake3"
"""Name of the hash function, stored beside its values in files."""


def digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the hash of some bytes."""
    return blake3(data).hexdigest()


def digest_of_file(path: Path) -> str:
    """Returns the hash of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # ty: ignore[no-matching-overload] - blake3 has no `name`


def hash_each(hash_of: Callable[[T], str], things: Iterable[T]) -> list[str]:
    """Returns the hash of each thing, computed on one thread per core, at most MAX_THREADS: hashing releases the GIL."""
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(hash_of, things))
