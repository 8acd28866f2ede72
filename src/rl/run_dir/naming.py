"""Gives files and directories their final names by operations that fail if the name is taken. Only
`files` uses it.

For a file that is link(2), for a directory renameat2(2) with RENAME_NOREPLACE, or rename(2), which
never replaces a non-empty directory. Of two writers, even on two hosts, one learns that it lost.
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
"""Errors of file systems that support neither swapping two names nor renames that do not
replace: NFS, some FUSE ones."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, *NO_FLAGS)
"""Errors of hard links across file systems, or on one without hard links."""
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


class TakenError(RunError):
    """Another process has already made what this one was to make. A caller that knows which one
    raises a more precise error."""

    def __init__(self, path: Path):
        super().__init__(
            f"{path} already exists: another process has made it; this one ends without changing it"
        )


def link_new(temporary: Path, path: Path) -> None:
    """Gives a file its final name, which must be free. Raises TakenError.

    Without hard links it uses a rename that does not replace, and if that is not supported either,
    it checks the name first: then only the role's lease protects against two simultaneous writers.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno in NO_LINK:
            return rename_new(temporary, path)
        if error.errno not in TAKEN:
            raise
        # if it is: NFS lost the reply to the first attempt and repeated it
        if not is_same_file(temporary, path):
            raise TakenError(path) from None
    faults.point(f"{faults.kind_of(path)}.linked")
    temporary.unlink(missing_ok=True)


def is_same_file(one: Path, other: Path) -> bool:
    """Returns whether two names belong to the same file; False if one is gone meanwhile."""
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
    """Renames with a flag of renameat2(2). Returns False if the kernel or the file system does
    not support it."""
    if LIBC.renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number not in NO_FLAGS:
        raise OSError(number, os.strerror(number), str(target))
    return False
