"""Reads safetensors files without torch: their headers, checked against the file size, and their
tensors as bytes.

The format: 8 bytes little-endian header length, JSON header with byte ranges, data
(https://huggingface.co/docs/safetensors).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.run_dir.digests import Digest, digest_like, hash_each
from rl.run_dir.files import CorruptFileError

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
        with path.open("rb") as file:
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
