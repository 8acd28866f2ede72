"""The hashes of files and tensors: BLAKE3, and SHA-256, which older runs have."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

T = TypeVar("T")
MAX_THREADS = 8

HASHES = {"blake3": blake3, "sha256": hashlib.sha256}
"""The newest first. BLAKE3 takes a core a fifth of a second for a GB, SHA-256 a whole one."""
NEWEST, OLDEST = HASHES


def digest(data: bytes | bytearray | memoryview, name: str = NEWEST) -> str:
    """The hash of some bytes by one of HASHES, in hexadecimal."""
    return HASHES[name](data).hexdigest()


def digest_of_file(path: Path, name: str = NEWEST) -> str:
    """The hash of a file of any size by one of HASHES, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, HASHES[name]).hexdigest()


def hash_each(hash_of: Callable[[T], str], things: Iterable[T]) -> list[str]:
    """The hash of each thing, on as many threads as there are cores, MAX_THREADS at most: hashes let others run meanwhile."""
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(hash_of, things))
