"""Checksums that tell a damaged checkpoint or policy version, and whether two versions are the same.

No torch: rl, repair and doctor use it.

`checkpoints/000012/manifest.json` has size and SHA-256 of each file. `weights/000012/digests.json` has the SHA-256 of each tensor's bytes
under its name in the safetensors file, and of the small files beside it; a copy without those stays in `digests/000012.json`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.files import CorruptFileError, reading
from rl.run_dir import numbered

MANIFEST, DIGESTS = "manifest.json", "digests.json"
READ_BYTES = 1 << 22


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file. Raises CorruptFileError when the disk cannot give it back."""
    digest = hashlib.sha256()  # processors have instructions for it: more than twice as fast as BLAKE2b here
    with reading(path), path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


# Checkpoints --------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CorruptFileError when it cannot be read."""
    try:
        with reading(path / MANIFEST):
            manifest = json.loads((path / MANIFEST).read_text())
        if not all(re.fullmatch(r"[\w.-]{1,100}", name) and isinstance(entry, dict) for name, entry in manifest["files"].items()):
            raise ValueError("names of files")
        return {key: manifest[key] for key in ("step", "world_size", "model", "files")}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptFileError(f"{path / MANIFEST}: missing or damaged") from None


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest, after every file has been found to be what was written. Raises CorruptFileError naming the first that is not."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file() or checksum(file) != expected:
            raise CorruptFileError(f"{file}: {'damaged' if file.is_file() else 'missing'}")
    return manifest


def newest_sound_checkpoint(directory: Path, at_most: int | None = None) -> tuple[int, dict[int, str]]:
    """(step of the newest intact checkpoint, 0 without any; what is wrong with each newer one). Reads those checkpoints whole."""
    faults: dict[int, str] = {}
    for step, path in reversed(numbered(directory).items()):
        if at_most is not None and step > at_most:
            continue
        try:
            verify_checkpoint(path)
            return step, faults
        except CorruptFileError as error:
            faults[step] = str(error)
    return 0, faults


# Policy versions ----------------------------------------------------------------------------------------------------------


def digest(data: bytes | memoryview) -> str:
    """Of a tensor's bytes, or of any buffer."""
    return hashlib.sha256(data).hexdigest()


def read_digests(path: Path) -> dict[str, Any]:
    """The content of a digests file, with `tensors`. Raises CorruptFileError when it is missing or cannot be read."""
    try:
        content = json.loads(path.read_text())
        if isinstance(content["tensors"], dict) and not any("/" in name for name in content.get("files", {})):
            return content
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise CorruptFileError(f"{path}: missing or damaged")


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Name of the first tensor, in the order of `expected`, whose digest differs or that only one of the two has; None: all are equal."""
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            return name
    return None


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a safetensors file, in bytes, and its shape."""

    start: int
    end: int
    shape: list[int]


def places_of_tensors(path: Path) -> dict[str, Place]:
    """Name -> place of each tensor of a safetensors file. Raises CorruptFileError for a file whose header does not fit its size.

    The format: 8 bytes little-endian header length, JSON header with byte ranges, data (huggingface.co/docs/safetensors).
    """
    try:
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            header = json.loads(file.read(length)) if length <= size else {}
        header.pop("__metadata__", None)
        data = 8 + length
        places = {name: Place(*(data + offset for offset in entry["data_offsets"]), entry["shape"]) for name, entry in header.items()}
        if size != max((place.end for place in places.values()), default=data):
            raise CorruptFileError(f"{path}: cut short, or its header is damaged")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CorruptFileError(f"{path}: missing, or damaged in its header") from None
    return places


def tensors_of_file(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of each tensor in a safetensors file. Raises CorruptFileError as `places_of_tensors` does."""
    places = places_of_tensors(path)
    try:
        with path.open("rb") as file:
            for name, place in places.items():
                file.seek(place.start)
                yield name, file.read(place.end - place.start)
    except (OSError, ValueError, OverflowError):
        raise CorruptFileError(f"{path}: cannot be read, or is damaged in its header") from None


def weights_file(folder: Path) -> Path:
    """The one file with the tensors of a version, whole or adapters."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise CorruptFileError(f"{folder}: has {len(files)} *.safetensors files instead of one")
    return files[0]


def verify_version(folder: Path) -> dict[str, Any]:
    """The content of a version's digests.json, after all its files have been found to be what was written.

    Raises CorruptFileError naming the first tensor or file that is not. Reads the version whole.
    """
    content, file = read_digests(folder / DIGESTS), weights_file(folder)
    found = {name: digest(data) for name, data in tensors_of_file(file)}
    if (name := first_difference(content["tensors"], found)) is not None:
        raise CorruptFileError(f"{file}: tensor {name} is not what was written")
    for name, expected in content.get("files", {}).items():
        if not (folder / name).is_file() or checksum(folder / name)["sha256"] != expected:
            raise CorruptFileError(f"{folder / name}: {'damaged' if (folder / name).is_file() else 'missing'}")
    return content
