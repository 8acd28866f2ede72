"""How a thing gets its final name: by an operation that fails if the name is taken. `files` alone uses it.

For a file that is link(2), for a directory renameat2(2) with RENAME_NOREPLACE, or rename(2), which never replaces a directory that holds
something. Of two writers, even on two hosts, one learns that it lost.
"""

import ctypes
import errno
import os
from pathlib import Path

from rl.system import faults
from rl.system.errors import RunError
from rl.system.linux import LIBC

AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2  # linux/fcntl.h, linux/fs.h
NO_FLAGS = (errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP)
"""Errors of file systems that cannot swap two names, or rename only onto a free one: NFS, some FUSE ones."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, *NO_FLAGS)
"""Errors of hard links to another file system, or on one that has none."""
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


class TakenError(RunError):
    """What this process was to make is there already: another one made it. A caller that knows who that is says it instead."""

    def __init__(self, path: Path):
        super().__init__(f"{path} is there already: another process has made it; this one ends, and changes nothing of it")


def link_new(temporary: Path, path: Path) -> None:
    """Gives a file its final name, which must be free. Raises TakenError.

    Without links the kernel is asked for a rename onto a free name, and if it has none, either, the name is looked at before: then two
    writers at the same instant are kept apart by the role's lease alone.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in NO_LINK:
            return rename_new(temporary, path)
        if error.errno not in TAKEN:
            raise
        if not is_same_file(temporary, path):  # else NFS: the answer to the first attempt was lost, and the second found its work done
            raise TakenError(path) from None
    faults.point(f"{faults.kind_of(path)}.linked")
    temporary.unlink(missing_ok=True)


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two names are of one file; False if one is gone meanwhile."""
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def rename_new(temporary: Path, path: Path) -> None:
    """Renames to a name that must be free. Raises TakenError."""
    try:
        if rename_with(temporary, path, RENAME_NOREPLACE):
            return
        if path.exists():
            raise TakenError(path)
        temporary.rename(path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise TakenError(path) from None


def rename_with(path: Path, target: Path, flag: int) -> bool:
    """Renames with a flag of renameat2(2). Returns False if kernel or file system does not know it."""
    if LIBC.renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number not in NO_FLAGS:
        raise OSError(number, os.strerror(number), str(target))
    return False
