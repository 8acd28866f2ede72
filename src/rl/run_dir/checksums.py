"""Whether a checkpoint or a policy version is what was written, and whether two versions are the same.

No torch: rl, repair and doctor use it.

`checkpoints/000012/manifest.json` has size and SHA-256 of each file. `weights/000012/digests.json` has the SHA-256 of each tensor's bytes
under its name in the safetensors file, and of the small files beside it; a copy without those stays in `digests/000012.json`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.run_dir.files import CorruptFileError, reading
from rl.run_dir.hashes import sha256_of_file
from rl.run_dir.paths import numbered
from rl.run_dir.safetensors import tensor_digests, weights_file

MANIFEST, DIGESTS = "manifest.json", "digests.json"


def checksum(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file. Raises CorruptFileError when the disk cannot give it back."""
    with reading(path):
        return {"size": path.stat().st_size, "sha256": sha256_of_file(path)}


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
    """The first tensor, in the order of `expected`, whose digest differs or that only one of the two has; None if all are equal."""
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            return name
    return None


def verify_version(folder: Path) -> dict[str, Any]:
    """The content of a version's digests.json, after all its files have been found to be what was written.

    Raises CorruptFileError naming the first tensor or file that is not. Reads the version whole: 0.3 s for 270 MB on one core.
    """
    content, file = read_digests(folder / DIGESTS), weights_file(folder)
    if (name := first_difference(content["tensors"], tensor_digests(file))) is not None:
        raise CorruptFileError(f"{file}: tensor {name} is not what was written")
    for name, expected in content.get("files", {}).items():
        if not (folder / name).is_file() or checksum(folder / name)["sha256"] != expected:
            raise CorruptFileError(f"{folder / name}: {'damaged' if (folder / name).is_file() else 'missing'}")
    return content


def check_version(folder: Path) -> None:
    """Does what `verify_version` does where there are checksums: a model without them passes, and a version of an older rl."""
    if (folder / DIGESTS).exists():
        verify_version(folder)
