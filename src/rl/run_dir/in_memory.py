"""A policy version in the memory of the process that made it, which others read before it is on
disk: over the network from each rank that trains it, or on the same host as a file.

The file is an anonymous file (memfd_create(2)) in safetensors format that others open as
`/proc/PID/fd/FD`. It disappears with the last process that holds it open, however that process
ends.

Allocating pages costs more than writing to them, so the maker writes its next version into the same
file once nobody reads it: a reader holds a shared lock (flock(2)), and each content has a unique
name at the beginning of its header.
"""

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from rl.system.linux import pid_scope

LABEL = "rl-weights"
"""Name of such a file in /proc."""
MARK_AT = 8
"""Offset of the mark: after the header's length."""

TRIES, TRY_AGAIN_S = 3, 0.001
"""Retries and their interval for a lock that the maker holds for some microseconds."""


class InMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The address of such a file."""

    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Scope of the process id, see `rl.system.linux.pid_scope`."""
    pid: Annotated[int, msgspec.Meta(gt=0)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern=r"^rl-[0-9a-f]{32}$")]
    """Unique name of this content: process ids, descriptors and the file itself are reused."""

    @property
    def mark(self) -> bytes:
        """The JSON at the beginning of the header of this content."""
        return f'{{"__metadata__":{{"format":"pt","name":"{self.name}"}}'.encode()


class OverNetwork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The address of rank 0's index of a version in memory. The index begins with the version's
    mark, which is gone before any rank changes a byte of the version; JSON follows (see
    `rl.trainer.store.publisher`)."""

    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Scope of process ids (`rl.system.linux.pid_scope`) within which the memory can be read;
    empty: everywhere."""
    agent: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """NIXL's metadata of rank 0's agent: its address, and the key of the index."""
    address: Annotated[int, msgspec.Meta(gt=0)]
    size: Annotated[int, msgspec.Meta(gt=32, lt=1 << 30)]
    """Of the index, in bytes."""
    name: Annotated[str, msgspec.Meta(pattern=r"^rl-[0-9a-f]{32}$")]
    """Unique name of this content: memory is used again."""

    @property
    def mark(self) -> bytes:
        return self.name.encode()


Memory = InMemory | OverNetwork
"""Where a version can be read before its folder exists."""


def make(size: int) -> InMemory:
    """Makes a new file of `size` zero bytes, which this process holds open until it closes `fd`.
    Raises OSError."""
    fd = os.memfd_create(LABEL)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return InMemory(pid_scope(), os.getpid(), fd, new_name())


def make_again(file: InMemory) -> InMemory | None:
    """Returns the same file for new content; None while somebody reads it. From now on the
    previous content can no longer be opened."""
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    os.pwrite(file.fd, bytes(len(file.mark)), MARK_AT)
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    return msgspec.structs.replace(file, name=new_name())


def new_name() -> str:
    return f"rl-{uuid.uuid4().hex}"


@contextlib.contextmanager
def opened(file: InMemory | None) -> Iterator[Path | None]:
    """Yields a path at which processes of this host can read the content, unchanged, in the
    block, even if its maker closes it meanwhile. Yields None if it is on another host or
    container, not open to this user, or if its process has ended, closed or overwritten it."""
    fd = None
    with contextlib.suppress(OSError):
        if file and file.place == pid_scope():
            fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDONLY)
    try:
        yield (
            Path(f"/proc/{os.getpid()}/fd/{fd}")
            if fd is not None and file is not None and holds(fd, file)
            else None
        )
    finally:
        if fd is not None:
            os.close(fd)


def holds(fd: int, file: InMemory) -> bool:
    """Returns whether an open file has this content; if so, its maker does not change it until
    `fd` is closed."""
    for _ in range(TRIES):
        # not a file in memory, or its maker holds the lock to check for readers
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{LABEL} (deleted)":
                return False
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.pread(fd, len(file.mark), MARK_AT) == file.mark
        time.sleep(TRY_AGAIN_S)
    return False
