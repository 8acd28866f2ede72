"""BLAKE3 of files and tensors, in hexadecimal: 0.2 s per GB on one core, while SHA-256 takes 1 s.

Not for what workers import: their interpreters may lack blake3.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from blake3 import blake3

T = TypeVar("T")
D = TypeVar("D")
MAX_THREADS = 8
HASH = "blake3"
"""Name of the hash function, stored beside its values in files."""
Digest = str | list[list]
"""The hash of a tensor's bytes; if several ranks held them, [first, end, hash] of the bytes of
each slice instead, in order."""


def digest(data: bytes | bytearray | memoryview) -> str:
    return blake3(data).hexdigest()


def covers(slices: list[list], size: int) -> bool:
    """Returns whether slices [first, end, hash] follow each other from byte 0 to byte `size`."""
    ends = [0, *(end for _, end, _ in slices)]
    return ends[-1] == size and all(
        first == end for (first, _, _), end in zip(slices, ends, strict=False)
    )


def bounds(other: Digest, size: int) -> list[tuple[int, int]]:
    """Returns the slices (first, end) that a digest of a tensor of `size` bytes consists of: one
    if it is a single hash."""
    return (
        [(first, end) for first, end, _ in other]
        if isinstance(other, list) and covers(other, size)
        else [(0, size)]
    )


def digest_like(other: Digest, data: bytes | bytearray | memoryview) -> Digest:
    """Returns the digest of a tensor's bytes in the slices of another digest, so that the two
    are equal if the bytes are."""
    slices = bounds(other, len(data))
    if len(slices) == 1:
        return digest(data)
    return [[first, end, digest(memoryview(data)[first:end])] for first, end in slices]


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        # blake3 has no `name`
        return hashlib.file_digest(file, blake3).hexdigest()  # ty: ignore[no-matching-overload]


class HashedStream:
    """A file that is being written, and the hash of what has been: a large file need not be read
    again."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.hash = stream, blake3()

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def hash_each(hash_of: Callable[[T], D], things: Iterable[T]) -> list[D]:
    """Returns the hash of each thing, computed on one thread per core, at most MAX_THREADS:
    hashing releases the GIL."""
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return list(threads.map(hash_of, things))
