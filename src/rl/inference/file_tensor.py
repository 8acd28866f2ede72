"""Tensors of weight files that are read only where they are used, so that a worker reads the slices
it serves and no more.

vLLM's loaders select a worker's part of a tensor by views (its rows, its columns, its experts) and
copy that into a parameter. Given a `FileTensor` they do the same, and only the copy reads: exactly
the bytes of the view. Whatever else a loader does with it, it gets the values. So vLLM's own
loading, for every architecture, split and fused layout, says what is read; nobody has to know it in
advance.
"""

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from rl.inference.weight_files import weight_files
from rl.run_dir.safetensors import read_header
from rl.system.errors import RunError

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}
DTYPES |= {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
"""Types by their names in the safetensors format."""
GAP = 1024
"""Pieces of a tensor that are less than this apart, in bytes, are read together with what lies
between: a read of each takes longer."""


class Reader(Protocol):
    """Where the bytes of a file are read: on a disk, or in the memory of a process. `bytes_read`
    counts."""

    bytes_read: int

    def read(self, starts: list[int], length: int, into: memoryview) -> None:
        """Fills `into` with the `length` bytes at each of `starts`, offsets in the file, one
        after the other. Raises RunError, OSError."""


class FileReader:
    """Reads an open file, which another process may delete or replace meanwhile. `bytes_read`
    counts."""

    def __init__(self, path: Path):
        self.path, self.bytes_read, self.fd = path, 0, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.fd)

    def read(self, starts: list[int], length: int, into: memoryview) -> None:
        for number, start in enumerate(starts):
            rest = into[number * length : (number + 1) * length]
            while rest:
                if not (got := os.preadv(self.fd, [rest], start)):
                    raise RunError(
                        f"{self.path}: ends at byte {start}: it was cut short while it was read"
                    )
                rest, start, self.bytes_read = rest[got:], start + got, self.bytes_read + got


class Zeros:
    """In place of a file, for a tensor that its loader has set to zero."""

    def read(self, starts: list[int], length: int, into: memoryview) -> None:
        into[:] = bytes(len(into))


class FileTensor(Tensor):
    """A tensor of a file, or a view of one: shape and strides without data."""

    @staticmethod
    def __new__(
        cls, place: Tensor, first: int, reader: Reader, is_view: bool = False
    ) -> "FileTensor":
        return Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=place.dtype,
            device="cpu",
        )

    def __init__(self, place: Tensor, first: int, reader: Reader, is_view: bool = False):
        """`place`: a meta tensor whose strides and offset say where the values lie after byte
        `first` of the file."""
        self.place, self.first, self.reader, self.is_view = place, first, reader, is_view

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], cls):
            return args[1].copy_to(args[0])
        if func.is_view:
            source = next(value for value in args if isinstance(value, cls))
            views = func(*tree_map_only(cls, lambda value: value.place, args), **kwargs)
            # not those that had to copy, as `reshape` may
            if all(shares_memory(view, source.place) for view in tree_leaves(views)):
                return tree_map_only(
                    Tensor, lambda place: cls(place, source.first, source.reader, True), views
                )
        # gpt-oss: one worker alone adds a bias
        if func is torch.ops.aten.zero_.default and not args[0].is_view:
            args[0].reader = Zeros()
            return args[0]
        for number, argument in enumerate(func._schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            if (
                isinstance(given, cls)
                and argument.alias_info is not None
                and argument.alias_info.is_write
            ):
                raise RunError(
                    "the model's loader changes a tensor of the weight files in place "
                    f"({func}), which it must not: report it"
                )
        return func(*tree_map_only(cls, cls.values, args), **tree_map_only(cls, cls.values, kwargs))

    def copy_to(self, target: Tensor) -> Tensor:
        """Does `target.copy_(self)`. A meta tensor gets no data: vLLM counts what it would get."""
        if target.is_meta:
            return target.copy_(self.place)
        if (
            target.dtype == self.dtype
            and target.shape == self.shape
            and target.is_contiguous()
            and target.device.type == "cpu"
        ):
            self.values(target.detach())
            return target
        return target.copy_(self.values())

    def values(self, into: Tensor | None = None) -> Tensor:
        """Reads the values into a contiguous tensor: `into`, or a new one."""
        into = torch.empty(self.shape, dtype=self.dtype) if into is None else into
        order = sorted(range(self.dim()), key=lambda dim: -self.stride(dim))  # that of the file
        sorted_place = self.place.permute(order)
        num, length = pieces(sorted_place)
        span = (
            sum((size - 1) * stride for size, stride in zip(self.shape, self.stride(), strict=True))
            + 1
        )
        start, width = self.first + self.storage_offset() * self.itemsize, self.itemsize
        if not into.numel():
            pass
        elif num > 1 and (span - num * length) * width < num * GAP:
            whole = torch.empty(span, dtype=self.dtype)
            self.reader.read([start], span * width, memory(whole))
            into.copy_(whole.as_strided(self.shape, self.stride()))
        elif order == sorted(order):
            self.reader.read(starts(sorted_place, self.first, num), length * width, memory(into))
        else:
            into.permute(order).copy_(FileTensor(sorted_place, self.first, self.reader).values())
        return into


def shares_memory(view: Tensor, place: Tensor) -> bool:
    return view.untyped_storage()._cdata == place.untyped_storage()._cdata


def pieces(place: Tensor) -> tuple[int, int]:
    """(how many, how long): the contiguous pieces that a tensor with descending strides lies in,
    in elements."""
    length, num = 1, 1
    for size, stride in zip(reversed(place.shape), reversed(place.stride()), strict=True):
        if num == 1 and (stride == length or size == 1):
            length *= size
        else:
            num *= size
    return num, length


def starts(place: Tensor, first: int, num: int) -> list[int]:
    """The offsets in the file of the `num` pieces of a tensor, bytes, in its order."""
    found = np.array([place.storage_offset()])
    for size, stride in zip(place.shape, place.stride(), strict=True):
        if len(found) < num:
            found = (found[:, None] + stride * np.arange(size)).ravel()
    return (first + found * place.itemsize).tolist()


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


class Weights:
    """The tensors of a model's files, which stay open until they are read."""

    def __init__(self, folder: Path):
        """Raises RunError if a file is not whole, OSError if it cannot be opened."""
        self.files = [(read_header(file), FileReader(file)) for file in weight_files(folder)]

    def confirm(self) -> None:
        """Raises RunError if what was read may be of another version; an open file stays."""

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for _, reader in self.files)

    def __iter__(self) -> Iterator[tuple[str, FileTensor]]:
        for header, reader in self.files:
            for name, entry in header.items():
                place = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
                yield name, FileTensor(place, entry.start, reader)
