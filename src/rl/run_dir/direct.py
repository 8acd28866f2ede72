"""Large files written past the page cache (O_DIRECT): a run's versions and checkpoints, which are read after a death at the earliest.

In the page cache they cost new pages, dearer than what is written to them (of 270 MB 0.6 s of a core on a virtual machine, past it 0.05),
and take away those that somebody else still needs. Where the file system has no such writing the page cache is used.
"""

import errno
import fcntl
import io
import mmap
import os
from pathlib import Path
from typing import Any

from rl.run_dir.digests import HASHES, NEWEST

BLOCK_BYTES = 4096
"""Places and lengths of what is written this way are multiples of it, on any disk."""
PIECE_BYTES = 8 << 20
"""What is written with one call, and held meanwhile."""


class DirectFile(io.RawIOBase):
    """A new file, or an old one emptied, written from its begin to its end. Durable once it is closed and fsync has been called for it.

    `hashed`: whether its checksum is wanted, one core's second for 5 GB. Every method raises OSError as the system does, a write's with the
    name of the file.
    """

    fd = -1

    def __init__(self, path: Path, hashed: bool = False):
        self.path, self.held, self.size = path, 0, 0
        self.hash = HASHES[NEWEST]() if hashed else None
        self.piece = mmap.mmap(-1, PIECE_BYTES)  # shared, and at a page's begin, as direct writing wants it
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags, 0o666)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def tell(self) -> int:
        return self.size

    def write(self, data: bytes | memoryview) -> int:
        """Takes all of `data`, which may be changed afterwards."""
        if not memoryview(data).nbytes:
            return 0
        with memoryview(data) as given, given.cast("B") as view:
            taken = 0
            while taken < len(view):
                count = min(len(view) - taken, PIECE_BYTES - self.held)
                self.piece[self.held : self.held + count] = view[taken : taken + count]
                taken, self.held = taken + count, self.held + count
                if self.held == PIECE_BYTES:
                    self._put(PIECE_BYTES)
            self.size += taken
            return taken

    def _put(self, length: int) -> None:
        """Writes what is held, and as many bytes of the piece behind it as make `length`."""
        with memoryview(self.piece) as piece:
            if self.hash:
                self.hash.update(piece[: self.held])
            done = 0
            while done < length:
                try:
                    done += os.write(self.fd, piece[done:length])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._through_cache():
                        error.filename = str(self.path)  # the system knows a number alone
                        raise
        self.held = 0

    def _through_cache(self) -> bool:
        """Goes on through the page cache, as file systems want that open such files and then write none; False if it does so already."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def close(self) -> None:
        """Writes the rest. A second call does nothing."""
        if self.closed:
            return
        try:
            if self.held:
                self._put(-(-self.held // BLOCK_BYTES) * BLOCK_BYTES)
                os.ftruncate(self.fd, self.size)
        finally:
            del self.piece
            if self.fd >= 0:
                os.close(self.fd)
            super().close()

    def checksum(self) -> dict[str, Any]:
        """Size and hash of what was written, as rl.run_dir.checksums has them. For one that is `hashed` and closed."""
        assert self.closed and self.hash
        return {"size": self.size, NEWEST: self.hash.hexdigest()}
