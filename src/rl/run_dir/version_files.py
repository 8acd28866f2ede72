"""Reads and checks what a version's folder says of itself: `digests.json`, and the files that it
lists."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.run_dir.digests import HASH, Digest, digest_of_file
from rl.run_dir.files import CorruptFileError, reading
from rl.run_dir.safetensors import model_files, tensor_digests
from rl.system.errors import RunError

MANIFEST, DIGESTS = "manifest.json", "digests.json"
DELTA = "delta.json"
"""Of a version that is only what differs from the one before: see `rl.run_dir.deltas`."""
REMOTE = "tinker.json"
"""Of a version whose weights a service with the Tinker API has: where they are there."""
MAX_NAME = 256
"""File names are shorter than this, in bytes and therefore in characters."""


class Checked(msgspec.Struct):
    """What a digests file must have; it may have more."""

    hash: str
    tensors: dict[str, str | list[tuple[int, int, str]]]
    files: dict[str, str] = {}


def newer(path: Path, name: str) -> RunError:
    """Returns the error for a file whose checksums use an unknown hash function."""
    return RunError(
        f"{path}: its hash is {name!r}, which this rl does not know: a newer rl wrote it. "
        "Use the newer rl; "
        "if there was none, the file is damaged: move "
        f"{path.parent if path.name in (MANIFEST, DIGESTS) else path} away"
    )


def checksum(path: Path) -> dict[str, Any]:
    """Returns size and hash of a file. Raises CorruptFileError if the disk cannot read it."""
    with reading(path):
        return {"size": path.stat().st_size, HASH: digest_of_file(path)}


def read_digests(path: Path) -> dict[str, Any]:
    """Reads a digests file. Raises CorruptFileError if it is missing or damaged, RunError if it
    uses another hash function."""
    try:
        content = json.loads(path.read_text())
        if isinstance(content["hash"], str) and content["hash"] != HASH:
            raise newer(path, content["hash"])
        files = msgspec.convert(content, Checked).files
        if all(
            len(name) < MAX_NAME and "/" not in name and name not in ("", ".", "..")
            for name in files
        ):
            return content
    except (OSError, ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError):
        pass
    raise CorruptFileError(f"{path}: missing or damaged")


def first_difference(expected: Mapping[str, Digest], found: Mapping[str, Digest]) -> str | None:
    """Returns the first tensor, in the order of `expected`, whose digest differs or that one
    side lacks; None if all are equal."""
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            return name
    return None


def is_delta(folder: Path) -> bool:
    return (folder / DELTA).exists()


def is_remote(folder: Path) -> bool:
    """Returns whether a service has the weights of a version, and its folder only their place."""
    return (folder / REMOTE).exists()


def verify_small_files(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CorruptFileError naming the first file of a version, other than those with whole
    tensors, that does not match its digest."""
    for name, expected in content.get("files", {}).items():
        if not (folder / name).is_file() or checksum(folder / name)[HASH] != expected:
            raise CorruptFileError(
                f"{folder / name}: {'damaged' if (folder / name).is_file() else 'missing'}"
            )


def verify_files_of_tensors(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CorruptFileError naming the first tensor of a whole version, a folder or a file,
    that does not match the content of a digests file."""
    found, places = {}, {}
    for file in model_files(folder):
        tensors = tensor_digests(file, content["tensors"])
        found |= tensors
        places |= dict.fromkeys(tensors, file)
    if (name := first_difference(content["tensors"], found)) is not None:
        raise CorruptFileError(f"{places.get(name, file)}: tensor {name} is not what was written")
