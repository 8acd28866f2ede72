"""Reads safetensors files without torch: their headers, checked against the file size, and their tensors as bytes.

The format: 8 bytes little-endian header length, JSON header with byte ranges, data (https://huggingface.co/docs/safetensors).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rl.run_dir.digests import digest, hash_each
from rl.run_dir.files import CorruptFileError

MAX_HEADER_BYTES = 32 << 20
"""Of some 200,000 tensors with long names, three times those of the largest models. The safetensors library reads 100 MB: more than a
million tensors, which take 20 s to parse."""


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
    """Returns the tensors of a file by name, in the header's order. Raises CorruptFileError with the fault if the file is incomplete."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if MAX_HEADER_BYTES < length <= size - 8:
                raise CorruptFileError(f"{path}: not read: its header has {length:,} bytes, and no model needs {MAX_HEADER_BYTES:,}")
            if not 2 <= length <= size - 8:
                raise CorruptFileError(f"{path}: not a safetensors file (a header of {length} bytes in a file of {size})")
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
    """Parses an entry of the JSON header. Raises ValueError, KeyError, TypeError or AttributeError if it is not valid."""
    start, end = (data_start + offset for offset in entry["data_offsets"])
    if not data_start <= start <= end:
        raise ValueError(f"bytes {entry['data_offsets']}")
    if not all(type(size) is int and size >= 0 for size in entry["shape"]):
        raise ValueError("an invalid shape")
    return TensorEntry(entry["dtype"], tuple(entry["shape"]), start, end)


def tensor_digests(path: Path) -> dict[str, str]:
    """Returns tensor name -> hash of the tensor's bytes.

    Raises CorruptFileError as `read_header` does, and if a read fails.
    """
    tensors = read_header(path)
    try:
        with path.open("rb", buffering=0) as file:
            hashes = hash_each(lambda tensor: digest(read_at(file.fileno(), tensor)), tensors.values())
    except OSError as error:
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror})") from None
    return dict(zip(tensors, hashes, strict=True))


def read_at(fd: int, tensor: TensorEntry) -> bytearray:
    """Returns the bytes of a tensor; if the file was truncated meanwhile, missing bytes are zeros."""
    data = bytearray(tensor.end - tensor.start)
    rest, offset = memoryview(data), tensor.start
    while rest and (got := os.preadv(fd, [rest], offset)):
        rest, offset = rest[got:], offset + got
    return data


def weights_file(folder: Path) -> Path:
    """Returns the one file with the tensors of a version, full weights or adapters. Raises CorruptFileError unless there is exactly one."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise CorruptFileError(f"{folder}: has {len(files)} *.safetensors files instead of one")
    return files[0]
