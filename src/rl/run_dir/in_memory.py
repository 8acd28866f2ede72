"""A policy version in the memory of the process that made it, which others of its host read before it is on disk.

It is a file without a name in a directory (memfd_create(2)), in safetensors format, and others open it as `/proc/PID/fd/FD`. It is gone
with the last process that holds it open, however that one ends.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from rl.system.linux import place


class InMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where such a file is."""

    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Where the process id means something, see `rl.system.linux.place`."""
    pid: Annotated[int, msgspec.Meta(gt=0)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern=r"^rl-[0-9a-f]{32}$")]
    """Its own among all files in memory: a process id, and a descriptor, are used again."""


def make(size: int) -> InMemory:
    """A new file of `size` bytes, all zero, which this process holds open until it closes `fd`."""
    name = f"rl-{uuid.uuid4().hex}"
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return InMemory(place(), os.getpid(), fd, name)


@contextlib.contextmanager
def opened(file: InMemory | None) -> Iterator[Path | None]:
    """A path at which processes of this host can read the file inside the block, also once its maker has closed it. None without one: of
    another host or container, of a process that has ended or closed it, or not for this user."""
    fd = None
    with contextlib.suppress(OSError):
        if file and file.place == place():
            fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDONLY)
    try:
        is_it = fd is not None and file is not None and os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{file.name} (deleted)"
        yield Path(f"/proc/{os.getpid()}/fd/{fd}") if is_it else None
    finally:
        if fd is not None:
            os.close(fd)
