"""The memory in which a policy version lies as in a safetensors file, and this rank's part of it.

The ranks of a host share one file in memory (see `rl.run_dir.in_memory`), made by the first of
them. Each touches only the pages of its own slices. Servers of the host read the whole as one file
if all ranks are there.

A delta is what differs between a version and the one before: XOR of the published bits, compressed.
`rl.run_dir.checksums` reads it.
"""

import fcntl
import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from zstandard import ZstdCompressor

from rl.run_dir import in_memory
from rl.run_dir.digests import MAX_THREADS
from rl.run_dir.files import UNSUPPORTED, with_path
from rl.run_dir.in_memory import InMemory
from rl.trainer.optim import local
from rl.trainer.store.layout import (
    PAGE,
    Slice,
    VersionTensor,
    converted,
    dtype_of,
    file_tensors,
    header,
    own_slices,
    published,
)
from rl.trainer.store.threads import RankThreads

ANYONE = InMemory("", 1, 0, "rl-" + "0" * 32)
"""A file whose mark has the size of every mark."""


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Prints an OSError of the block, after which servers cannot read the memory."""
    try:
        yield
    except OSError as error:
        text = f"{what} ({error.strerror}): servers read each version from its folder"
        print(text, file=sys.stderr, flush=True)


class Image:
    """Memory for one version at a time. Every rank calls every method."""

    def __init__(
        self, tensors: Sequence[VersionTensor], slices: Sequence[Slice], ranks: RankThreads
    ):
        """`tensors`: all of a version, in their order; `slices`: this rank's."""
        self.tensors, self.slices, self.ranks = list(tensors), list(slices), ranks
        self.start = len(header(self.tensors, ANYONE.mark))
        """Bytes before the tensors."""
        self.size = self.start + (self.tensors[-1].end if self.tensors else 0)
        self.file: InMemory | None = None
        """The file, which the first rank of this host holds open; None if the system provides
        none."""
        self.memory: Tensor | None = None
        self.is_shared = False
        """Whether this rank's slices lie in the file."""
        self.before_change: Callable[[], object] = lambda: None
        """Called on each rank before any rank's content changes."""

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self.file and self.ranks.rank == self.ranks.first_here:
            os.close(self.file.fd)
        self.file = None

    def claim(self) -> None:
        """Makes room for new values: the same memory, or other memory if a process reads it."""
        is_first = self.ranks.rank == self.ranks.first_here
        self.before_change()
        files = self.ranks.share(lambda: msgspec.to_builtins(self._free()) if is_first else None)
        file = msgspec.convert(files[self.ranks.first_here], InMemory | None)
        if self.memory is None or (file and file.fd) != (self.file and self.file.fd):
            self._close()
            self.memory = self._map(file)
        self.file = file

    def _free(self) -> InMemory | None:
        """Returns a file that nobody reads, with a new name; None if there is none on this
        system."""
        if self.file and (again := in_memory.make_again(self.file)):
            return again
        if self.memory is not None and not self.file:
            return None
        with warned("cannot create a file in memory"):
            return in_memory.make(self.size)

    def _map(self, file: InMemory | None) -> Tensor:
        """Returns the bytes of the file, all zero at first, or private memory."""
        self.is_shared = False
        with warned(f"cannot open the memory of rank {self.ranks.first_here}"):
            if file:
                with open(f"/proc/{file.pid}/fd/{file.fd}", "r+b", buffering=0) as shared:
                    memory = mmap.mmap(shared.fileno(), self.size)
                self.is_shared = True
                return torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(self.size, dtype=torch.uint8)

    def bytes_of(self, tensor: VersionTensor, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the bytes first..end of a tensor in this memory."""
        assert self.memory is not None
        start = self.start + tensor.start
        return self.memory[start + first : start + (tensor.size if end is None else end)]

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Casts the model's values into this rank's slices. Nothing is gathered but the tensors
        that must be converted, one at a time."""
        values = published(model)
        slices = [part for part in self.slices if part.tensor.offset is not None]
        for source, group in itertools.groupby(sorted(slices, key=source_of), source_of):
            value = local(values[source].detach())
            # cast here: a copy between devices casts after the transfer, with twice the bytes
            if value.is_cuda:
                value = value.to(dtype_of(values[source], dtype))
            for part in group:
                target = self.bytes_of(part.tensor, part.first, part.end).view(part.tensor.dtype)
                target.copy_(value.reshape(-1)[part.element : part.element + len(target)])
        held = {part.tensor.name for part in self.slices}
        for sources, group in converted(self.tensors).items():
            whole = {}
            for name in sources:
                value = values[name].detach().to(dtype_of(values[name], dtype))
                whole[name] = value.full_tensor() if isinstance(value, DTensor) else value
            if group[0].name in held:
                named = revert_weight_conversion(model, whole)
                for tensor in group:
                    memory = self.bytes_of(tensor).view(tensor.dtype).view(tensor.shape)
                    memory.copy_(named[tensor.name])

    def write_header(self) -> None:
        """Makes the file readable for other processes, once all ranks have filled it."""
        if self.file:
            os.pwrite(self.file.fd, header(self.tensors, self.file.mark), 0)

    def write_slices(self, path: Path, past_cache: bool = False) -> None:
        """Writes this rank's slices into the version's file at `path`. Raises OSError that names
        it.

        `past_cache`: for a file that nobody will read soon. New pages of the cache cost more than
        all else of a version, beside the sampling of the next batch: of 270 MB 0.6 s of a processor
        on a virtual machine, past the cache 0.05.
        """
        assert self.memory is not None
        data = len(header(self.tensors))
        try:
            with path.open("r+b", buffering=0) as file:
                for first, end in ranges(self.slices):
                    memory = self.memory[self.start + first : self.start + end].numpy()
                    write_pages(file.fileno(), memoryview(memory), data + first, past_cache)
                if self.ranks.first_here:
                    os.fsync(file.fileno())  # on rank 0's host its own fsync, later, covers this
        except OSError as error:
            raise with_path(error, path) from None


def write_pages(fd: int, data: memoryview, offset: int, past_cache: bool) -> None:
    """Writes all of `data` at `offset`; `past_cache`: its whole pages past the cache, unless the
    file system refuses that."""
    begin = min(-offset % PAGE, len(data))
    end = begin + (len(data) - begin) // PAGE * PAGE
    write_at(fd, data[:begin], offset)
    if past_cache:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
            write_at(fd, data[begin:end], offset + begin)
            begin = end
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    write_at(fd, data[begin:], offset + begin)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def image_of(model: PreTrainedModel, dtype: torch.dtype, ranks: RankThreads) -> Image:
    """Returns the image of a model's versions."""
    tensors = file_tensors(model, dtype)
    return Image(tensors, own_slices(tensors, published(model), ranks.rank, ranks.size), ranks)


def source_of(part: Slice) -> str:
    return part.tensor.sources[0]


def ranges(slices: Iterable[Slice]) -> Iterator[tuple[int, int]]:
    """Yields the ranges (first, end) of a version's bytes that ascending slices cover, as few as
    possible."""
    first = end = 0
    for part in slices:
        if part.tensor.start + part.first != end:
            if first < end:
                yield first, end
            first = part.tensor.start + part.first
        end = part.tensor.start + part.end
    if first < end:
        yield first, end


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
