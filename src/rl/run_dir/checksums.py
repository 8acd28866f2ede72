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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rl.run_dir.digests import HASH, Digest, digest, digest_of_file, hash_each
from rl.run_dir.files import UNREADABLE, CorruptFileError, reading
from rl.run_dir.paths import numbered
from rl.run_dir.safetensors import model_files, tensor_digests
from rl.system.errors import RunError

if TYPE_CHECKING:
    from rl.run_dir.deltas import Mirror

MANIFEST, DIGESTS = "manifest.json", "digests.json"
DELTA = "delta.json"
"""Of a version that is only what differs from the one before: see `rl.run_dir.deltas`."""
REMOTE = "tinker.json"
"""Of a version whose weights a service with the Tinker API has: where they are there."""
MAX_NAME = 256
"""File names are shorter than this, in bytes and therefore in characters."""
NAME = rf"^(?!\.\.?$)[^/]{{1,{MAX_NAME - 1}}}$"


class Manifest(msgspec.Struct):
    """The manifest of a checkpoint. It may have more fields."""

    step: Any
    world_size: Any
    model: Any
    files: dict[Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,100}$")], dict[str, Any]]
    base: Any = ""


class Checked(msgspec.Struct):
    """What a digests file must have; it may have more."""

    tensors: dict[str, str | list[tuple[int, int, str]]]
    files: dict[Annotated[str, msgspec.Meta(pattern=NAME)], str] = {}


def newer(path: Path, name: str) -> RunError:
    """Returns the error for a file whose checksums use an unknown hash function."""
    damaged = path.parent if path.name in (MANIFEST, DIGESTS) else path
    return RunError(
        f"{path}: its hash is {name!r}, which this rl does not know: a newer rl wrote it. Use the "
        f"newer rl; if there was none, the file is damaged: move {damaged} away"
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
        name = content["hash"]
        if name == HASH:
            msgspec.convert(content, Checked)
            return content
    except (OSError, ValueError, KeyError, TypeError, *UNREADABLE):
        name = None
    if isinstance(name, str):
        raise newer(path, name)
    raise CorruptFileError(f"{path}: missing or damaged")


def first_difference(expected: Mapping[str, Digest], found: Mapping[str, Digest]) -> str | None:
    """Returns the first tensor, in the order of `expected`, whose digest differs or that one
    side lacks; None if all are equal."""
    names = [*expected, *found]
    return next((name for name in names if expected.get(name) != found.get(name)), None)


def is_delta(folder: Path) -> bool:
    return (folder / DELTA).exists()


def is_remote(folder: Path) -> bool:
    """Returns whether a service has the weights of a version, and its folder only their place."""
    return (folder / REMOTE).exists()


def verify_small_files(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CorruptFileError naming the first file of a version, other than those with whole
    tensors, that does not match its digest."""
    for name, expected in content.get("files", {}).items():
        file = folder / name
        if not file.is_file():
            raise CorruptFileError(f"{file}: missing")
        if checksum(file)[HASH] != expected:
            raise CorruptFileError(f"{file}: damaged")


def verify_files_of_tensors(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CorruptFileError naming the first tensor of a whole version, a folder or a file,
    that does not match the content of a digests file."""
    digests, files = {}, {}
    for file in model_files(folder):
        tensors = tensor_digests(file, content["tensors"])
        digests |= tensors
        files |= dict.fromkeys(tensors, file)
    if (name := first_difference(content["tensors"], digests)) is not None:
        raise CorruptFileError(f"{files.get(name, file)}: tensor {name} is not what was written")


def verify_files(
    folder: Path, checksums: Mapping[str, Mapping[str, Any]], rank: int = 0, ranks: int = 1
) -> None:
    """Raises CorruptFileError naming the first file of a folder that is missing or does not match
    its checksum.

    Reads several files at once, and only `rank`'s share of them if `ranks` processes divide the
    work. Raises RunError if all files use the same unknown hash function: a flipped bit would
    change the name of only one.
    """
    functions = {name for entry in checksums.values() for name in entry if name != "size"}
    if len(functions) == 1 and HASH not in functions:
        raise newer(folder / MANIFEST, functions.pop())

    def verified(name: str) -> str:
        file, expected = folder / name, checksums[name]
        if not file.is_file():
            raise CorruptFileError(f"{file}: missing")
        # Size first: a sparse file may have terabytes.
        is_size = file.stat().st_size == expected.get("size")
        if not is_size or (sums := checksum(file)) != expected:
            raise CorruptFileError(f"{file}: damaged")
        return sums[HASH]

    hash_each(verified, [*checksums][rank::ranks])


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint. Raises CorruptFileError if it is missing or damaged."""
    try:
        with reading(path / MANIFEST):
            content = (path / MANIFEST).read_bytes()
        return msgspec.structs.asdict(msgspec.json.decode(content, type=Manifest))
    except (FileNotFoundError, *UNREADABLE):
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


def verify_version(folder: Path, mirror: "Mirror | None" = None) -> dict[str, Any]:
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


def verify_tensors(
    folder: Path, content: Mapping[str, Any], mirror: "Mirror | None" = None
) -> None:
    """Raises CorruptFileError naming the first tensor of a version that does not match the
    content of a digests file. `mirror`: see `verify_version`."""
    from rl.run_dir.deltas import Mirror  # it uses this module

    if is_remote(folder):
        return  # its only tensor stands for the place, which verify_small_files checks
    if is_delta(folder):
        mirror = mirror or Mirror()
        folder = mirror.become(folder)
        if mirror.tensors == content["tensors"]:
            return
    verify_files_of_tensors(folder, content)


def check_version(folder: Path, record: Path | None = None, mirror: "Mirror | None" = None) -> str:
    """Runs `verify_version` if the version has checksums, and otherwise `verify_tensors` if it has
    a `record` in `digests/`.

    Returns the content_id of what was verified. A model without either passes, and the result is
    empty. `mirror`: see `verify_version`.
    """
    if (folder / DIGESTS).exists():
        return content_of(verify_version(folder, mirror)["tensors"])
    if not (record and record.exists()):
        return ""
    content = read_digests(record)
    verify_tensors(folder, content, mirror)
    return content_of(content["tensors"])


def check_record(record: Path, folder: Path) -> None:
    """Raises CorruptFileError if the record of a version cannot be read or contradicts the
    version's own digests.json."""

    def slices(content: Mapping[str, Any]) -> list[list[int]] | None:
        value = content["tensors"].get(name)
        return [part[:2] for part in value] if isinstance(value, list) else None

    recorded = read_digests(record)
    try:
        content = read_digests(folder / DIGESTS)
    except CorruptFileError:  # a fault of the version, or there is no version
        return
    name = first_difference(content["tensors"], recorded["tensors"])
    if name is not None:
        if slices(content) != slices(recorded):  # made by other ranks: only the bytes can tell
            return verify_tensors(folder, recorded)
        raise CorruptFileError(f"{record}: differs from {folder / DIGESTS} in tensor {name}")
    makers = [each["made_by"] for each in (content, recorded) if "made_by" in each]
    if makers and makers[0] != makers[-1]:
        raise CorruptFileError(f"{record}: differs from {folder / DIGESTS} in made_by")
