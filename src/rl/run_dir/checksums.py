"""Verifies that a checkpoint or a policy version is what was written, and compares versions.

Does not import torch: rl, repair and doctor use it.

`checkpoints/000012/manifest.json` has size and hash of each file. `weights/000012/digests.json` has
the hash of each tensor's bytes (or of each slice of them, if several ranks held it) under its name
in the safetensors files, and of the small files beside it; a copy without the small files stays in
`digests/000012.json`. Each hash is stored with the name of its function. A function other than
BLAKE3 is not damage: a newer rl wrote it. It raises RunError, because after a CorruptFileError
files are moved away.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.run_dir.deltas import Mirror
from rl.run_dir.digests import HASH, Digest, digest, hash_each
from rl.run_dir.files import CorruptFileError, reading
from rl.run_dir.paths import numbered
from rl.run_dir.version_files import (
    DIGESTS,
    MANIFEST,
    checksum,
    first_difference,
    is_delta,
    is_remote,
    newer,
    read_digests,
    verify_files_of_tensors,
    verify_small_files,
)
from rl.system.errors import RunError


def verify_files(
    folder: Path,
    checksums: Mapping[str, Mapping[str, Any]],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Raises CorruptFileError naming the first file of a folder that is missing or does not match
    its checksum.

    Reads several files at once, and only `rank`'s share of them if `ranks` processes divide the
    work. Raises RunError if all files use the same unknown hash function: a flipped bit would
    change the name of only one.
    """
    functions = {
        key
        for entry in checksums.values()
        if isinstance(entry, Mapping)
        for key in entry.keys() - {"size"}
    }
    if len(functions) == 1 and HASH not in functions:
        raise newer(folder / MANIFEST, functions.pop())

    def found(name: str) -> str:
        file, expected = folder / name, checksums[name]
        if not file.is_file():
            raise CorruptFileError(f"{file}: missing")
        size = expected.get("size") if isinstance(expected, Mapping) else None
        # Size first: a sparse file may have terabytes.
        if file.stat().st_size != size or (sums := checksum(file)) != expected:
            raise CorruptFileError(f"{file}: damaged")
        return sums[HASH]

    hash_each(found, [*checksums][rank::ranks])


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint. Raises CorruptFileError if it is missing or damaged."""
    try:
        with reading(path / MANIFEST):
            manifest = json.loads((path / MANIFEST).read_text())
        if not all(
            re.fullmatch(r"[\w.-]{1,100}", name) and isinstance(entry, dict)
            for name, entry in manifest["files"].items()
        ):
            raise ValueError("names of files")
        return {key: manifest[key] for key in ("step", "world_size", "model", "files")} | {
            "base": manifest.get("base", "")
        }
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CorruptFileError(f"{path / MANIFEST}: missing or damaged") from None


def verify_checkpoint(path: Path, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Verifies a checkpoint's files, or `rank`'s share of them, and returns its manifest. Raises
    as `read_manifest` and `verify_files`."""
    manifest = read_manifest(path)
    verify_files(path, manifest["files"], rank, ranks)
    return manifest


def newest_sound_checkpoint(
    directory: Path, at_most: int | None = None
) -> tuple[int, dict[int, str]]:
    """Returns (step of the newest intact checkpoint, 0 if none; fault of each newer checkpoint).
    Reads those checkpoints completely."""
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


def content_id(record: Path) -> str:
    """Returns an id that distinguishes versions with the same number, from a record in
    `digests/`; empty if that cannot be read."""
    try:
        return content_of(read_digests(record)["tensors"])
    except RunError:
        return ""


def content_of(digests: Mapping[str, Digest]) -> str:
    """Returns the content_id of a version with these digests."""
    return digest(json.dumps(digests, sort_keys=True).encode())


def slices_of(value: Digest) -> list[list[int]]:
    """Returns (first, end) of each slice of a digest; none if it is a single hash."""
    return [each[:2] for each in value] if isinstance(value, list) else []


def verify_version(folder: Path, mirror: Mirror | None = None) -> dict[str, Any]:
    """Verifies all tensors and files of a version, of a delta those that result, and returns the
    content of its digests.json.

    `mirror`: where deltas are applied, for several versions one after the other. Raises
    CorruptFileError naming the first tensor or file that does not match, and as `read_digests`
    does. Reads the whole version: 0.14 s for 270 MB on one core.
    """
    content = read_digests(folder / DIGESTS)
    verify_tensors(folder, content, mirror)
    verify_small_files(folder, content)
    return content


def verify_tensors(folder: Path, content: Mapping[str, Any], mirror: Mirror | None = None) -> None:
    """Raises CorruptFileError naming the first tensor of a version that does not match the
    content of a digests file. `mirror`: see `verify_version`."""
    if is_remote(folder):
        return  # its only tensor stands for the place, which verify_small_files checks
    if is_delta(folder):
        mirror = mirror or Mirror()
        folder = mirror.become(folder)
        if mirror.tensors == content["tensors"]:
            return
    verify_files_of_tensors(folder, content)


def check_version(folder: Path, record: Path | None = None, mirror: Mirror | None = None) -> str:
    """Runs `verify_version` if the version has checksums, and otherwise `verify_tensors` if it has
    a `record` in `digests/`.

    Returns the content_id of what was verified. A model without either passes, and the result is
    empty. `mirror`: see `verify_version`.
    """
    if (folder / DIGESTS).exists():
        return content_of(verify_version(folder, mirror)["tensors"])
    if record and record.exists():
        verify_tensors(folder, content := read_digests(record), mirror)
        return content_of(content["tensors"])
    return ""


def check_record(record: Path, folder: Path) -> None:
    """Raises CorruptFileError if the record of a version cannot be read or contradicts the
    version's own digests.json."""
    content = read_digests(record)
    try:
        own = read_digests(folder / DIGESTS)
    except CorruptFileError:  # a fault of the version, or there is no version
        return
    ours, theirs = own["tensors"], content["tensors"]
    if (name := first_difference(ours, theirs)) is not None:
        # made by other ranks: only the bytes can tell
        if slices_of(ours.get(name, "")) != slices_of(theirs.get(name, "")):
            return verify_tensors(folder, content)
        raise CorruptFileError(f"{record}: differs from {folder / DIGESTS} in tensor {name}")
    if "made_by" in own and "made_by" in content and own["made_by"] != content["made_by"]:
        raise CorruptFileError(f"{record}: differs from {folder / DIGESTS} in made_by")
