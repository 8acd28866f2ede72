"""What a policy version is in files and in memory.

Where each byte lies in the files, and which of them each rank holds, follows from names, shapes,
types and placements alone, so every rank knows it without asking. A tensor of the files is usually
a contiguous part of one parameter (all of it, or one expert of many), and FSDP cuts parameters into
rows: a rank's part of the tensor is a range of its bytes, which that rank casts, hashes and writes
by itself. Only tensors that files hold in another order than the model (transposed, or joined out
of several) are gathered, one at a time, each by one rank.

In memory a version lies as in a safetensors file. The ranks of a host share one file in memory (see
`rl.run_dir.in_memory`), made by the first of them. Each touches only the pages of its own slices.
Servers of the host read the whole as one file if all ranks are there.

A delta is what differs between a version and the one before: XOR of the published bits, compressed.
`rl.run_dir.checksums` reads it.
"""

import fcntl
import itertools
import json
import mmap
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype
from zstandard import ZstdCompressor

from rl.run_dir import in_memory
from rl.run_dir.files import UNSUPPORTED, with_path
from rl.run_dir.in_memory import InMemory
from rl.run_dir.safetensors import MAX_THREADS
from rl.system.errors import RunError
from rl.trainer.model import lora
from rl.trainer.optim import local
from rl.trainer.store.threads import RankThreads

PAGE = 1 << 16
"""Bytes, a multiple of the pages of any machine's memory and of any disk's blocks."""
FORMAT = b'{"__metadata__":{"format":"pt"}'
"""The beginning of the header of a file on disk, as the safetensors library writes it."""
ATEN = torch.ops.aten


@dataclass(frozen=True)
class VersionTensor:
    """A tensor of a version's files."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Its first byte, counted from the first byte of the first tensor; tensors follow each other
    without gaps."""
    sources: tuple[str, ...]
    """The model's parameters and buffers that it is made of."""
    offset: int | None
    """Index in its only source of its first element; None if it is no contiguous part of one
    source, and must be converted."""

    @property
    def size(self) -> int:
        """In bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Slice:
    """The bytes first..end of a tensor, which this rank holds."""

    tensor: VersionTensor
    first: int
    end: int
    element: int = 0
    """Index in this rank's part of the tensor's source of the first element."""


class Tracing(TorchDispatchMode):
    """Follows tensors on the meta device through a conversion. A contiguous copy stays a view of
    what is copied, so that strides tell how elements are ordered; `sources` has the names of the
    tensors that the content of each storage is made of."""

    def __init__(self, named: dict[str, Tensor]):
        super().__init__()
        self.named, self.seen = named, list(named.values())
        self.sources = {storage(tensor): (name,) for name, tensor in named.items()}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is ATEN.clone.default:
            return ATEN.alias(args[0])
        try:
            result = function(*args, **(kwargs or {}))
        except RuntimeError:
            if function not in (ATEN.view.default, ATEN._unsafe_view.default):
                raise
            # of what is no copy here: its elements are in another order
            result = torch.empty(args[1], dtype=args[0].dtype, device="meta")
        inputs = [
            self.sources[storage(tensor)]
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        ]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage(tensor) not in self.sources:
                self.sources[storage(tensor)] = tuple(
                    sorted({name for names in inputs for name in names})
                )
                self.seen.append(tensor)  # kept, or a later storage might get its address
        return result

    def offset(self, tensor: Tensor) -> int | None:
        """See VersionTensor.offset."""
        source = self.named[self.sources[storage(tensor)][0]]
        return (
            tensor.storage_offset()
            if storage(source) == storage(tensor) and tensor.is_contiguous()
            else None
        )


def storage(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors of a version by their names in the model: parameters (a tied head
    once) and persistent buffers, or of a model with adapters these alone."""
    if lora.has_adapters(model):
        return {**lora.trainable(model)}
    persistent = model.state_dict().keys()
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which a tensor is published: parameters in the one in which they are
    computed with, which is `dtype` unless parallel/loading.py has found another in the files.
    Buffers stay as they are, for nothing casts them: with the biases of a router in bfloat16,
    tokens would go to other experts than in the trainer."""
    return (
        getattr(tensor, "file_type", dtype)
        if tensor.is_floating_point() and isinstance(tensor, Parameter)
        else tensor.dtype
    )


@torch.no_grad()
def file_tensors(model: PreTrainedModel, dtype: torch.dtype) -> list[VersionTensor]:
    """Returns the tensors of a version's files, in their order. Raises RunError if a part of
    them cannot be converted by itself."""
    empty = {
        name: torch.empty(value.shape, dtype=dtype_of(value, dtype), device="meta")
        for name, value in published(model).items()
    }
    with Tracing(empty) as tracing:
        if lora.has_adapters(model):
            named = {lora.name_in_file(name): tensor for name, tensor in empty.items()}
        else:
            named = revert_weight_conversion(model, dict(empty))
    tensors: list[VersionTensor] = []
    end = 0
    # aligns each to its item size
    for name, tensor in sorted(named.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        sources, offset = tracing.sources[storage(tensor)], tracing.offset(tensor)
        tensors.append(VersionTensor(name, tensor.dtype, tensor.shape, end, sources, offset))
        end = tensors[-1].end
    for sources, group in converted(tensors).items():
        alone = revert_weight_conversion(model, {name: empty[name] for name in sources})
        for tensor in group:
            if tensor.name not in alone or alone[tensor.name].shape != tensor.shape:
                raise RunError(
                    f"{type(model).__name__}: {tensor.name} cannot be made of "
                    f"{', '.join(sources)} alone; please report this"
                )
    return tensors


def converted(tensors: Sequence[VersionTensor]) -> dict[tuple[str, ...], list[VersionTensor]]:
    """Returns the tensors that must be converted, by what they are made of."""
    groups = defaultdict[tuple[str, ...], list[VersionTensor]](list)
    for tensor in tensors:
        if tensor.offset is None:
            groups[tensor.sources].append(tensor)
    return groups


def runs(value: Tensor, is_main: bool) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, element) of the elements of a tensor that this rank publishes, in
    row-major order: first..end in the whole tensor are the elements from `element` on of the rank's
    own part.

    Of several replicas the first publishes; what is not distributed belongs to rank 0 (`is_main`).
    """
    whole, shape, offset = tuple(value.shape), tuple(value.shape), (0,) * value.ndim
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None or any(
            index and placement.is_replicate()
            for index, placement in zip(coordinate, placements, strict=True)
        ):
            return
        shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    elif not is_main:
        return
    if not prod(shape):
        return
    # later dimensions are whole
    last = max((dim for dim in range(value.ndim) if shape[dim] != whole[dim]), default=0)
    length = prod(shape[last:])
    for number, index in enumerate(itertools.product(*map(range, shape[:last]))):
        first = 0
        for size, start, step in itertools.zip_longest(whole, offset, index, fillvalue=0):
            first = first * size + start + step
        yield first, first + length, number * length


def own_slices(
    tensors: Sequence[VersionTensor], values: dict[str, Tensor], rank: int, size: int
) -> list[Slice]:
    """Returns what rank `rank` of `size` ranks publishes of each tensor; converted ones are
    dealt out to the ranks in turn."""
    held = {name: list(runs(value, rank == 0)) for name, value in values.items()}
    slices = []
    for tensor in tensors:
        offset, width = tensor.offset, tensor.dtype.itemsize
        for first, end, element in held[tensor.sources[0]] if offset is not None else ():
            low, high = max(first, offset), min(end, offset + tensor.shape.numel())
            if low < high:
                bounds = (low - offset) * width, (high - offset) * width
                slices.append(Slice(tensor, *bounds, element + low - first))
    for number, group in enumerate(converted(tensors).values()):
        if number % size == rank:
            slices += [Slice(tensor, 0, tensor.size) for tensor in group if tensor.size]
    return sorted(slices, key=lambda part: part.tensor.start + part.first)


NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
"""The format's names of types."""


def header(tensors: Sequence[VersionTensor], begins: bytes = FORMAT) -> bytes:
    """Returns what a safetensors file with these tensors has in front of them: the length of its
    JSON and the JSON, which `begins` so. Its size is whole pages, so that a byte of a version lies
    at the same place of its page in memory and on disk, as `write_pages` needs it."""
    entries = {
        tensor.name: {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.end],
        }
        for tensor in tensors
    }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()[1:]
    text = begins + (b"," if entries else b"") + text
    text += b" " * ((-8 - len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


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

    def data(self, first: int, end: int) -> Tensor:
        """Returns the bytes first..end of the version in this memory, counted from the first byte
        of the first tensor."""
        assert self.memory is not None
        return self.memory[self.start + first : self.start + end]

    def bytes_of(self, tensor: VersionTensor, first: int = 0, end: int | None = None) -> Tensor:
        """Returns the bytes first..end of a tensor in this memory."""
        last = tensor.size if end is None else end
        return self.data(tensor.start + first, tensor.start + last)

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
        start = len(header(self.tensors))
        try:
            with path.open("r+b", buffering=0) as file:
                for first, end in ranges(self.slices):
                    data = memoryview(self.data(first, end).numpy())
                    write_pages(file.fileno(), data, start + first, past_cache)
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
        self.parts = {}  # frees the version before
        self.parts = {part: image.data(*part).numpy().copy() for part in parts(image)}
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
        new, old = image.data(*part).numpy(), self.parts[part]
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
