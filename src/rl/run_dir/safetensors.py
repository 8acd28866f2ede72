"""Reads safetensors files without torch: their headers, checked against the file size, and the
BLAKE3 of their tensors.

The format: 8 bytes little-endian header length, JSON header with byte ranges, data
(https://huggingface.co/docs/safetensors). Hashes are in hexadecimal: 0.2 s per GB on one core,
while SHA-256 takes 1 s. Not for what workers import: their interpreters may lack blake3.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from blake3 import blake3

from rl.run_dir.files import CorruptFileError, reading

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


INDEX = "model.safetensors.index.json"
"""Of a model with several files: which tensor is in which."""
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 32 << 20
"""Of some 200,000 tensors with long names, three times those of the largest models. The
safetensors library reads 100 MB: more than a million tensors, which take 20 s to parse."""


@dataclass(frozen=True)
class TensorEntry:
    """The header's entry for a tensor."""

    dtype: str
    """Name in the safetensors format: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Returns the tensors of a file by name, in the header's order. Raises CorruptFileError with
    the fault if the file is incomplete."""
    try:
        size = path.stat().st_size
        with reading(path), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if MAX_HEADER_BYTES < length <= size - 8:
                raise CorruptFileError(
                    f"{path}: not read: its header has {length:,} bytes, and no model needs "
                    f"{MAX_HEADER_BYTES:,}"
                )
            if not 2 <= length <= size - 8:
                raise CorruptFileError(
                    f"{path}: not a safetensors file (a header of {length} bytes in a file "
                    f"of {size})"
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: entry_of(entry, 8 + length) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path}: not readable as safetensors: {error}") from None
    end = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if size != end:
        raise CorruptFileError(f"{path}: has {size} bytes, its header says {end}")
    return tensors


def entry_of(entry: dict, data_start: int) -> TensorEntry:
    """Parses an entry of the JSON header. Raises ValueError, KeyError, TypeError or
    AttributeError if it is not valid."""
    start, end = (data_start + offset for offset in entry["data_offsets"])
    if not data_start <= start <= end:
        raise ValueError(f"bytes {entry['data_offsets']}")
    if not all(type(size) is int and size >= 0 for size in entry["shape"]):
        raise ValueError("an invalid shape")
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), start, end)


def tensor_digests(path: Path, like: Mapping[str, Digest] | None = None) -> dict[str, Digest]:
    """Returns tensor name -> hash of the tensor's bytes, or the hashes of the slices that the
    tensor's digest in `like` has.

    Raises CorruptFileError as `read_header` does, and if a read fails.
    """
    tensors, others = read_header(path), like or {}
    try:
        with path.open("rb", buffering=0) as file:
            hashes = hash_each(
                lambda name: digest_like(
                    others.get(name, ""), read_at(file.fileno(), tensors[name])
                ),
                tensors,
            )
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror})") from None
    return dict(zip(tensors, hashes, strict=True))


def read_at(fd: int, tensor: TensorEntry) -> bytearray:
    """Returns the bytes of a tensor; if the file was truncated meanwhile, missing bytes are
    zeros."""
    data = bytearray(tensor.end - tensor.start)
    rest, offset = memoryview(data), tensor.start
    while rest and (got := os.preadv(fd, [rest], offset)):
        rest, offset = rest[got:], offset + got
    return data


def model_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that are a folder's model or adapters: those of its index,
    else the only one; of a file, itself. Raises CorruptFileError if it lacks one, or if
    transformers, which prefers `model.safetensors`, and vLLM would not read the same ones."""
    if folder.is_file():
        return [folder]
    names = {file.name for file in folder.glob("*.safetensors") if file.exists()}
    listed = names
    if (folder / INDEX).exists():
        try:
            listed = {*json.loads((folder / INDEX).read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptFileError(f"{folder / INDEX}: not readable as an index: {error}") from None
    elif names not in ({SINGLE}, {"adapter_model.safetensors"}):
        what = (
            "weights (*.safetensors; no others are read: write *.bin again with transformers' "
            "save_pretrained)"
        )
        if names:
            what = (
                f"an index ({INDEX}) of {', '.join(sorted(names))}; add it, or leave {SINGLE} "
                "alone there"
            )
        raise CorruptFileError(f"{folder}: lacks {what}")
    if wrong := sorted(listed - names) or sorted({SINGLE} & names - listed):
        raise CorruptFileError(f"{folder}: lacks {wrong[0]}{' in its index' * (wrong[0] in names)}")
    return [folder / name for name in sorted(listed)]
