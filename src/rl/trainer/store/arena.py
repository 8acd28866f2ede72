"""Tensors side by side in a file in memory, which becomes a safetensors file by a header in front of them."""

import mmap
import os
import sys
from collections.abc import Mapping

import torch
from torch import Tensor

from rl.run_dir import in_memory
from rl.run_dir.in_memory import InMemory
from rl.trainer.store.weights_file import NAMES, header_of

HEADER_BYTES, HEADER_BYTES_EACH = 4096, 512
"""Room for the header, and for each tensor's entry; the format allows spaces behind it. A longer one is not written."""


def room(size: int) -> tuple[InMemory | None, Tensor]:
    """A file in memory and its bytes, all zero; (None, memory of this process alone) where the system gives no such file."""
    try:
        file = in_memory.make(size)
        return file, torch.frombuffer(mmap.mmap(file.fd, size), dtype=torch.uint8)
    except OSError as error:
        print(f"no file in memory ({error.strerror}): servers read each version from its folder", file=sys.stderr, flush=True)
        return None, torch.empty(size, dtype=torch.uint8)


class Arena:
    """Room for tensors of known sizes, without a hole between them."""

    def __init__(self, like: Mapping[str, tuple[torch.Size, torch.dtype]]):
        """`like`: shape and type of each tensor."""
        self.like = dict(like)
        sizes = {name: shape.numel() * dtype.itemsize for name, (shape, dtype) in like.items()}
        self.start = HEADER_BYTES + HEADER_BYTES_EACH * len(like)
        self.size = self.start + sum(sizes.values())
        self.file, self.memory = room(self.size)
        self.tensors: dict[str, Tensor] = {}
        """By the names of `like`, to be filled."""
        end = self.start
        for name in sorted(like, key=lambda name: -like[name][1].itemsize):  # so that each begins at a multiple of its items' size
            shape, dtype = like[name]
            self.tensors[name] = self.memory[end : end + sizes[name]].view(dtype).view(shape)
            end += sizes[name]

    def __del__(self) -> None:
        if self.file:
            os.close(self.file.fd)

    def empty(self, like: Mapping[str, tuple[torch.Size, torch.dtype]]) -> bool:
        """Makes room for other values. False if it is no room for these tensors, or while somebody reads the file."""
        if self.like != like:
            return False
        if self.file is None:
            return True
        file = in_memory.make_again(self.file)
        self.file = file or self.file
        return file is not None

    def seal(self, named: Mapping[str, Tensor]) -> InMemory | None:
        """Writes the header: the file holds `named`. None, and no header, unless these are the arena's own tensors, or parts of them, and
        in a file."""
        if self.file is None:
            return None
        tensors = dict(sorted(named.items(), key=lambda item: item[1].data_ptr()))
        end = self.memory.data_ptr() + self.start
        for tensor in tensors.values():
            if not tensor.is_contiguous() or tensor.data_ptr() != end or tensor.dtype not in NAMES:
                return None
            end += tensor.nbytes
        header = header_of(tensors, self.file.mark)
        if end != self.memory.data_ptr() + self.size or len(header) > self.start - 8:
            return None
        os.pwrite(self.file.fd, (self.start - 8).to_bytes(8, "little") + header.ljust(self.start - 8), 0)
        return self.file
