"""Contiguous tensors in a file in memory, which a header in front of them turns into a safetensors file."""

import functools
import json
import mmap
import os
import sys
from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor

from rl.run_dir import in_memory
from rl.run_dir.in_memory import InMemory

HEADER_BYTES, HEADER_BYTES_EACH = 4096, 512
"""Space reserved for the header and for each tensor's entry; the format allows trailing spaces. A longer header is not written."""


def allocate(size: int) -> tuple[InMemory | None, Tensor]:
    """Returns a file in memory and its bytes, all zero; (None, private memory) if the system provides no such file."""
    try:
        file = in_memory.make(size)
        return file, torch.frombuffer(mmap.mmap(file.fd, size), dtype=torch.uint8)
    except OSError as error:
        print(f"cannot create a file in memory ({error.strerror}): servers read each version from its folder", file=sys.stderr, flush=True)
        return None, torch.empty(size, dtype=torch.uint8)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Returns the format's name of a type."""
    return json.loads(save({"none": torch.empty(0, dtype=dtype)})[8:])["none"]["dtype"]


def header_of(tensors: Mapping[str, Tensor], mark: bytes) -> bytes:
    """Returns the header's JSON, which begins with `mark`, for contiguous tensors in this order."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    return mark + b"," + json.dumps(entries).encode()[1:] if entries else mark + b"}"


class VersionBuffer:
    """Memory for tensors of known sizes, without gaps between them."""

    def __init__(self, like: Mapping[str, tuple[torch.Size, torch.dtype]]):
        """`like`: shape and type of each tensor."""
        self.like = dict(like)
        sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in like.items()}
        self.start = HEADER_BYTES + HEADER_BYTES_EACH * len(like)
        self.size = self.start + sum(sizes.values())
        self.file, self.memory = allocate(self.size)
        self.tensors: dict[str, Tensor] = {}
        """The tensors, to be filled, by the names of `like`."""
        end = self.start
        for name in sorted(like, key=lambda name: -like[name][1].itemsize):  # aligns each to its item size
            shape, dtype = like[name]
            self.tensors[name] = self.memory[end : end + sizes[name]].view(dtype).view(shape)
            end += sizes[name]

    def __del__(self) -> None:
        if self.file:
            os.close(self.file.fd)

    def claim(self, like: Mapping[str, tuple[torch.Size, torch.dtype]]) -> bool:
        """Prepares the memory for new values. Returns False if shapes or types differ, or if another process reads the file."""
        if self.like != like:
            return False
        if self.file is None:
            return True
        file = in_memory.make_again(self.file)
        self.file = file or self.file
        return file is not None

    def write_header(self, named: Mapping[str, Tensor]) -> InMemory | None:
        """Writes the header for `named` and returns the file. Returns None, without a header, if there is no file or if `named` is anything
        but this buffer's own tensors or parts of them."""
        if self.file is None:
            return None
        tensors = dict(sorted(named.items(), key=lambda item: item[1].data_ptr()))
        end = self.memory.data_ptr() + self.start
        for tensor in tensors.values():
            if not tensor.is_contiguous() or tensor.data_ptr() != end:
                return None
            end += tensor.nbytes
        header = header_of(tensors, self.file.content_id)
        if end != self.memory.data_ptr() + self.size or len(header) > self.start - 8:
            return None
        os.pwrite(self.file.fd, (self.start - 8).to_bytes(8, "little") + header.ljust(self.start - 8), 0)
        return self.file
