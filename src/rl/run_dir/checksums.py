"""Verifies that a checkpoint or a policy version is what was written, and compares versions.

Does not import torch: rl, repair and doctor use it.

`checkpoints/000012/manifest.json` has size and hash of each file. `weights/000012/digests.json` has
the hash of each tensor's bytes (or of each slice of them, if several ranks held it) under its name
in the safetensors files, and of the small files beside it; a copy without the small files stays in
`digests/000012.json`. Each hash is stored with the name of its function. A function other than
BLAKE3 is not damage: a newer rl wrote it. It raises RunError, because after a CorruptFileError
files are moved away.

A delta version holds what differs from the version before, until the next whole version, the
anchor. Its folder has `delta.json`, `digests.json` of the resulting tensors, and for each rank of
the trainer `delta-00001-of-00002.zst`: zstd frames, each the XOR of a range of the version's bytes
with the same bytes of the version before. `delta.json` lists [first, end, size of the frame] of
each, counted from the first byte of the first tensor. Config and tokenizer lie in the anchor.
"""

import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rl.run_dir.files import UNREADABLE, CorruptFileError, reading
from rl.run_dir.paths import numbered
from rl.run_dir.safetensors import (
    HASH,
    INDEX,
    MAX_THREADS,
    Digest,
    digest,
    digest_of_file,
    hash_each,
    model_files,
    read_header,
    tensor_digests,
)
from rl.system.errors import RunError
from rl.system.machine import memory_bytes

MANIFEST, DIGESTS = "manifest.json", "digests.json"
DELTA = "delta.json"
"""Of a version that is only what differs from the one before: see above."""
REMOTE = "tinker.json"
"""Of a version whose weights a service with the Tinker API has: where they are there."""
READ_BYTES = 64 << 20
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


def first_difference(expected: Mapping[str, Digest], digests: Mapping[str, Digest]) -> str | None:
    """Returns the first tensor, in the order of `expected`, whose digest differs or that one
    side lacks; None if all are equal."""
    names = [*expected, *digests]
    return next((name for name in names if expected.get(name) != digests.get(name)), None)


def is_delta(folder: Path) -> bool:
    return (folder / DELTA).exists()


def is_remote(folder: Path) -> bool:
    """Returns whether a service has the weights of a version, and its folder only their place."""
    return (folder / REMOTE).exists()


def verify_small_files(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises CorruptFileError naming the first file of a version, other than those with whole
    tensors, that does not match its digest."""
    files = content.get("files", {}).items()
    verify_files(folder, {name: {HASH: expected} for name, expected in files})


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


def chain(folder: Path) -> Iterator[Path]:
    """Yields the folders that a version is made of: its own, those of the versions before it,
    and at last that of the anchor. Raises CorruptFileError if one is missing."""
    here = folder
    while is_delta(here):
        yield here
        before = here.with_name(
            f"{int(here.name) - 1:06d}" if here.name.isdecimal() else "the version before"
        )
        if not before.is_dir():
            raise CorruptFileError(
                f"{folder}: cannot be read: it holds changes since {before}, which is missing"
            )
        here = before
    yield here


class Mirror:
    """A version as one safetensors file in the memory of this process, which others of its host
    may read. It becomes another version in place: XOR with a delta."""

    def __init__(self) -> None:
        self.fd, self.size = -1, 0
        self.data: Any = None
        """Its tensors' bytes: a numpy array."""
        self.tensors: dict[str, Any] | None = None
        """Digests of the version that it holds; None if there is none."""
        self.num_read = 0
        """Bytes read from folders so far."""

    @property
    def path(self) -> Path:
        """The file, which is there as long as this object."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def become(self, folder: Path) -> Path:
        """Makes this the version in a folder, whole or delta, and returns `path`. Nobody may read
        the file meanwhile.

        Reads the deltas since the version that it holds, or else since the anchor. Raises
        CorruptFileError, which names the damaged file, if the result is not what was written, and
        RunError if this host lacks the memory.
        """
        steps: list[Path] = []
        wanted = read_digests(folder / DIGESTS)["tensors"]
        for step in chain(folder):
            content = read_digests(step / DIGESTS)
            if content["tensors"] == self.tensors:
                break
            verify_small_files(step, content)
            steps.append(step)
        if not steps:
            return self.path
        self.tensors = None
        try:
            for step in reversed(steps):
                (self._apply if is_delta(step) else self._read)(step)
            verify_files_of_tensors(self.path, {"tensors": wanted})
        except FileNotFoundError as error:
            raise CorruptFileError(
                f"{error.filename}: was deleted while {folder} was read"
            ) from None
        except CorruptFileError as error:
            *_, anchor = chain(folder)
            verify_files_of_tensors(anchor, read_digests(anchor / DIGESTS))
            raise CorruptFileError(
                f"{folder}: the changes since {anchor} do not give what was written: {error}"
            ) from None
        self.tensors = wanted
        return self.path

    def free(self) -> None:
        """Gives the memory back, also if copies of this process have the file open. Nobody may
        read it any more."""
        if self.fd >= 0:
            self.data = self.tensors = None
            os.ftruncate(self.fd, 0)
            self.size = 0

    def _read(self, anchor: Path) -> None:
        """Copies a whole version."""
        import numpy as np  # takes 0.1 s, which commands must not

        files = {
            file: sorted(read_header(file).items(), key=lambda item: item[1].start)
            for file in model_files(anchor)
        }
        header, end = {}, 0
        for name, entry in itertools.chain(*files.values()):
            start, end = end, end + entry.end - entry.start
            header[name] = {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._make_room(8 + len(text) + end)
        os.pwrite(self.fd, len(text).to_bytes(8, "little") + text, 0)
        self.data = np.memmap(self.path, np.uint8, "r+", offset=8 + len(text), shape=(end,))
        rest = self.data.data
        for path, entries in files.items():
            with reading(path), path.open("rb", buffering=0) as file:
                file.seek(entries[0][1].start)
                while got := file.readinto(rest[:READ_BYTES]):
                    rest, self.num_read = rest[got:], self.num_read + got

    def _make_room(self, size: int) -> None:
        if size - self.size > (free := memory_bytes()[1]):
            raise RunError(
                f"delta versions cannot be read: {size / 2**30:.1f} GiB of memory are needed, "
                f"{free / 2**30:.1f} GiB are free; free memory, or move the versions with a "
                "delta.json away: a resume makes those since its checkpoint again. With "
                "trainer.weights.anchor_every = 1 all are whole"
            )
        if self.fd < 0:
            self.fd = os.memfd_create("rl-mirror")
            weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size)
        self.size = size

    def _apply(self, delta: Path) -> None:
        """Applies the changes since the version that it holds."""
        import numpy as np
        from zstandard import ZstdDecompressor, ZstdError

        def apply(first: int, end: int, frame: bytes) -> None:
            part = self.data[first:end]
            np.bitwise_xor(
                part, np.frombuffer(ZstdDecompressor().decompress(frame), np.uint8), out=part
            )

        try:
            for name, frames in json.loads((delta / DELTA).read_text()).items():
                with (
                    reading(delta / name),
                    (delta / name).open("rb") as file,
                    ThreadPoolExecutor(MAX_THREADS) as threads,
                ):
                    running = [
                        threads.submit(apply, first, end, file.read(size))
                        for first, end, size in frames
                    ]
                    self.num_read += file.tell()
                for each in running:
                    each.result()
        except (ZstdError, ValueError) as error:
            raise CorruptFileError(
                f"{delta}: does not fit the version before it: {error}"
            ) from None


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """Yields a folder that transformers can load the version in `folder` from: itself, or for a
    delta a temporary one with its tensors in memory. Raises as `Mirror.become`."""
    if not is_delta(folder):
        yield folder
        return
    mirror = Mirror()
    with tempfile.TemporaryDirectory(prefix="rl-version-") as name:
        file, (*_, anchor) = mirror.become(folder), chain(folder)
        shutil.copytree(
            anchor,
            name,
            ignore=shutil.ignore_patterns("*.safetensors", INDEX, DIGESTS),
            dirs_exist_ok=True,
        )
        (Path(name) / "model.safetensors").symlink_to(file)
        yield Path(name)


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

    def verify(name: str) -> None:
        file, expected = folder / name, checksums[name]
        if not file.is_file():
            raise CorruptFileError(f"{file}: missing")
        # Size first: a sparse file may have terabytes.
        size = file.stat().st_size
        if size != expected.get("size", size) or checksum(file)[HASH] != expected.get(HASH):
            raise CorruptFileError(f"{file}: damaged")

    hash_each(verify, [*checksums][rank::ranks])


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
