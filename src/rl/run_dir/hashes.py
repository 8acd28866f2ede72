"""The two hashes of a run directory: BLAKE2b of records, SHA-256 of files and tensors."""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MAX_THREADS = 8


def blake2b(data: bytes | memoryview) -> bytes:
    """BLAKE2b-128: of records, which are read and written one by one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 in hexadecimal: of tensors and files. Processors have instructions for it, and `sha256sum --check` reads it."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file of any size, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_each(hash_of: Callable[[T], str], things: Iterable[T]) -> list[str]:
    """The hash of each thing, on as many threads as there are cores, MAX_THREADS at most: hashlib lets others run meanwhile."""
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(hash_of, things))
