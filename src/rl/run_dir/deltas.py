"""Delta versions: folders that hold what differs from the version before, until the next whole
version, the anchor.

`weights/000012/` of a delta has `delta.json`, `digests.json` of the resulting tensors, and for each
rank of the trainer `delta-00001-of-00002.zst`: zstd frames, each the XOR of a range of the
version's bytes with the same bytes of version 11. `delta.json` lists [first, end, size of the
frame] of each, counted from the first byte of the first tensor. Config and tokenizer lie in the
anchor.
"""

import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.run_dir.checksums import (
    DELTA,
    DIGESTS,
    is_delta,
    read_digests,
    verify_files_of_tensors,
    verify_small_files,
)
from rl.run_dir.digests import MAX_THREADS
from rl.run_dir.files import CorruptFileError, reading
from rl.run_dir.safetensors import INDEX, model_files, read_header
from rl.system.errors import RunError
from rl.system.machine import memory_bytes

READ_BYTES = 64 << 20


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
            lacks = f"{size / 2**30:.1f} GiB of memory are needed, {free / 2**30:.1f} GiB are free"
            remedy = (
                "free memory, or move the versions with a delta.json away: a resume makes those "
                "since its checkpoint again"
            )
            raise RunError(
                f"delta versions cannot be read: {lacks}; {remedy}. With "
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
