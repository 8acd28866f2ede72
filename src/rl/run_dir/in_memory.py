"""A policy version in the memory of the process that made it, which others of its host read before it is on disk.

It is a file without a name in a directory (memfd_create(2)), in safetensors format, and others open it as `/proc/PID/fd/FD`. It is gone
with the last process that holds it open, however that one ends.

New pages cost more than what is written to them, so the maker writes its next version into the same file, once nobody reads it: a reader
has a shared lock (flock(2)), and each content a name of its own, with which its header begins.
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

from rl.system.linux import place

LABEL = "rl-weights"
"""The kernel's name of such a file, in /proc."""
MARK_AT = 8
"""Where the mark stands: behind the header's length."""

TRIES, TRY_AGAIN_S = 3, 0.001
"""For a lock that the maker has for some microseconds."""


class InMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where such a file is."""

    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Where the process id means something, see `rl.system.linux.place`."""
    pid: Annotated[int, msgspec.Meta(gt=0)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern=r"^rl-[0-9a-f]{32}$")]
    """Of this content among all there ever were: a process id, a descriptor and the file itself are used again."""

    @property
    def mark(self) -> bytes:
        """The JSON with which the header of this content begins."""
        return f'{{"__metadata__":{{"format":"pt","name":"{self.name}"}}'.encode()


def make(size: int) -> InMemory:
    """A new file of `size` bytes, all zero, which this process holds open until it closes `fd`. Raises OSError."""
    fd = os.memfd_create(LABEL)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return InMemory(place(), os.getpid(), fd, new_name())


def make_again(file: InMemory) -> InMemory | None:
    """The same file for another content; None while somebody reads it. Whoever asks for the content before finds none from now on."""
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
    """A path at which processes of this host can read the content inside the block, also once its maker has closed it: it stays what it is.
    None without one: of another host or container, of a process that has ended, closed it or written another one, or not for this user."""
    fd = None
    with contextlib.suppress(OSError):
        if file and file.place == place():
            fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDONLY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{fd}") if fd is not None and file is not None and holds(fd, file) else None
    finally:
        if fd is not None:
            os.close(fd)


def holds(fd: int, file: InMemory) -> bool:
    """Whether an open file is this one, with this content, which its maker leaves alone until `fd` is closed."""
    for _ in range(TRIES):
        with contextlib.suppress(OSError):  # no file in memory; or its maker looks whether it is read just now
            if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{LABEL} (deleted)":
                return False
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.pread(fd, len(file.mark), MARK_AT) == file.mark
        time.sleep(TRY_AGAIN_S)
    return False
