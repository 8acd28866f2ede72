"""Writes what differs between a version and the one before: XOR of the published bits,
compressed. `rl.run_dir.checksums` reads it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from zstandard import ZstdCompressor

from rl.run_dir.files import with_path
from rl.run_dir.safetensors import MAX_THREADS
from rl.trainer.store.image import Image, ranges

FRAME_BYTES = 16 << 20
"""Of a version, in one frame at most: frames are made and applied side by side."""
LEVEL = 1


class LastVersion:
    """This rank's bytes of the version published last."""

    def __init__(self) -> None:
        self.number = -1
        """The version; -1 if there is none."""
        self.parts: dict[tuple[int, int], np.ndarray] = {}
        """The bytes first..end of the version, counted from the first byte of the first tensor."""

    def keep(self, number: int, image: Image) -> None:
        """Copies a version."""
        self.parts = self.parts or {
            part: np.empty(part[1] - part[0], np.uint8) for part in parts(image)
        }
        for part, old in self.parts.items():
            np.copyto(old, bytes_of(image, part))
        self.number = number

    def write(self, image: Image, folder: Path) -> tuple[str, list[tuple[int, int, int]]]:
        """Writes this rank's file of the next version's delta, and keeps that version. Returns
        the file's name and (first, end, size) of its frames. Raises OSError that names the file."""
        ranks, number, self.number = image.ranks, self.number + 1, -1
        path = folder / f"delta-{ranks.rank + 1:05d}-of-{ranks.size:05d}.zst"
        frames = []
        try:
            with path.open("xb") as file, ThreadPoolExecutor(MAX_THREADS) as threads:
                for part, frame in zip(
                    self.parts,
                    threads.map(lambda part: self._changes(image, part), self.parts),
                    strict=True,
                ):
                    frames.append((*part, file.write(frame)))
                file.flush()
                if ranks.first_here:
                    os.fsync(file.fileno())  # on rank 0's host its own fsync, later, covers this
        except OSError as error:
            raise with_path(error, path) from None
        self.number = number
        return path.name, frames

    def _changes(self, image: Image, part: tuple[int, int]) -> bytes:
        """Returns the frame of a part, which becomes that of the new version."""
        new, old = bytes_of(image, part), self.parts[part]
        np.bitwise_xor(old, new, out=old)
        frame = ZstdCompressor(level=LEVEL).compress(old)
        np.copyto(old, new)
        return frame


def parts(image: Image) -> Iterator[tuple[int, int]]:
    """Yields the ranges (first, end) of a version's bytes that this rank holds, none longer than
    a frame may be."""
    for first, end in ranges(image.slices):
        for start in range(first, end, FRAME_BYTES):
            yield start, min(start + FRAME_BYTES, end)


def bytes_of(image: Image, part: tuple[int, int]) -> np.ndarray:
    """Returns a range of a version's bytes in its memory."""
    assert image.memory is not None
    first, end = part
    return image.memory[image.start + first : image.start + end].numpy()
