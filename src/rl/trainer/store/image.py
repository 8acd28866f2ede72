"""The memory in which a policy version lies as in a safetensors file, and this rank's part of it.

The ranks of a host share one file in memory (see `rl.run_dir.in_memory`), made by the first of
them. Each touches only the pages of its own slices. Servers of the host read the whole as one file
if all ranks are there.
"""

import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl.run_dir import in_memory
from rl.run_dir.files import UNSUPPORTED, with_path
from rl.run_dir.in_memory import InMemory
from rl.trainer.optim import local
from rl.trainer.store.layout import (
    PAGE,
    FileTensor,
    Slice,
    converted,
    dtype_of,
    file_tensors,
    header,
    own_slices,
    published,
)
from rl.trainer.store.ranks import Ranks

ANYONE = InMemory("", 1, 0, "rl-" + "0" * 32)
"""A file whose mark has the size of every mark."""
FOLDERS = "servers read each version from its folder"


class Image:
    """Memory for one version at a time. Every rank calls every method."""

    def __init__(self, tensors: Sequence[FileTensor], slices: Sequence[Slice], ranks: Ranks):
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
        try:
            return in_memory.make(self.size)
        except OSError as error:
            print(
                f"cannot create a file in memory ({error.strerror}): {FOLDERS}",
                file=sys.stderr,
                flush=True,
            )
            return None

    def _map(self, file: InMemory | None) -> Tensor:
        """Returns the bytes of the file, all zero at first, or private memory."""
        self.is_shared = False
        if file:
            try:
                with open(f"/proc/{file.pid}/fd/{file.fd}", "r+b", buffering=0) as shared:
                    memory = torch.frombuffer(
                        mmap.mmap(shared.fileno(), self.size), dtype=torch.uint8
                    )
                self.is_shared = True
                return memory
            except OSError as error:
                print(
                    f"cannot open the memory of rank {self.ranks.first_here} "
                    f"({error.strerror}): {FOLDERS}",
                    file=sys.stderr,
                    flush=True,
                )
        return torch.empty(self.size, dtype=torch.uint8)

    def bytes_of(self, tensor: FileTensor, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the bytes first..end of a tensor in this memory."""
        assert self.memory is not None
        start = self.start + tensor.start
        return self.memory[start + first : start + (tensor.size if end is None else end)]

    @torch.no_grad()
    def fill(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Casts the model's values into this rank's slices. Nothing is gathered but the tensors
        that must be converted, one at a time."""
        values, own = published(model), {part.tensor.name for part in self.slices}
        parts = sorted(
            (part for part in self.slices if part.tensor.offset is not None), key=source_of
        )
        for source, group in itertools.groupby(parts, source_of):
            value = local(values[source].detach())
            # cast here: a copy between devices casts after the transfer, with twice the bytes
            if value.is_cuda:
                value = value.to(dtype_of(values[source], dtype))
            for part in group:
                target = self.bytes_of(part.tensor, part.first, part.end).view(part.tensor.dtype)
                target.copy_(value.reshape(-1)[part.element : part.element + len(target)])
        for sources, group in converted(self.tensors).items():
            whole = {
                name: gathered(values[name].detach().to(dtype_of(values[name], dtype)))
                for name in sources
            }
            if group[0].name in own:
                made = revert_weight_conversion(model, whole)
                for tensor in group:
                    self.bytes_of(tensor).view(tensor.dtype).view(tensor.shape).copy_(
                        made[tensor.name]
                    )

    def write_header(self) -> None:
        """Makes the file readable for other processes, once all ranks have filled it."""
        if self.file:
            os.pwrite(self.file.fd, header(self.tensors, self.file.mark), 0)

    def write_slices(
        self, path: Path, tensors: Sequence[FileTensor], past_cache: bool = False
    ) -> None:
        """Writes this rank's slices of some tensors, which follow each other, into their file at
        `path`. Raises OSError that names it.

        `past_cache`: for a file that nobody will read soon. New pages of the cache cost more than
        all else of a version, beside the sampling of the next batch: of 270 MB 0.6 s of a processor
        on a virtual machine, past the cache 0.05.
        """
        data = len(header(tensors)) - tensors[0].start
        try:
            with written(path) as fd, written(path, os.O_DIRECT if past_cache else 0) as direct:
                for first, end in ranges(
                    part
                    for part in self.slices
                    if tensors[0].start <= part.tensor.start < tensors[-1].end
                ):
                    assert self.memory is not None
                    write_pages(
                        fd,
                        direct,
                        memoryview(self.memory[self.start + first : self.start + end].numpy()),
                        data + first,
                    )
                if self.ranks.first_here:
                    os.fsync(fd)  # on rank 0's host its own fsync, later, covers this
        except OSError as error:
            raise with_path(error, path) from None


@contextmanager
def written(path: Path, flags: int = 0) -> Iterator[int]:
    """Opens an existing file to be written, without the flags if its file system does not know
    them."""
    try:
        fd = os.open(path, os.O_WRONLY | flags)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        fd = os.open(path, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def write_pages(fd: int, direct: int, data: memoryview, offset: int) -> None:
    """Writes `data` into a file at `offset`: its whole pages by the descriptor `direct`, unless
    the file system refuses that."""
    begin = min(-offset % PAGE, len(data))
    end = begin + (len(data) - begin) // PAGE * PAGE
    write_at(fd, data[:begin], offset)
    try:
        write_at(direct, data[begin:end], offset + begin)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        write_at(fd, data[begin:end], offset + begin)
    write_at(fd, data[end:], offset + end)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def image_of(model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> Image:
    """Returns the image of a model's versions."""
    tensors = file_tensors(model, dtype)
    return Image(tensors, own_slices(tensors, published(model), ranks.rank, ranks.size), ranks)


def source_of(part: Slice) -> str:
    return part.tensor.sources[0]


def gathered(value: Tensor) -> Tensor:
    """Returns the whole of a tensor of which each rank has a part. Every rank calls this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


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
