"""How a process ends badly: the error that names a remedy, the exit codes, and which errors of the system last."""

import errno

RESTART, WRONG_SETTINGS, GIVE_UP, DAMAGED = 1, 2, 3, 4
"""Exit codes of our processes: worth another start, as any other failure is; wrong settings; a diagnosis that starting again does not
change (a missing model, a full disk); a damaged file in the run directory, to be repaired before the next start."""


CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a disk that is full or not to be written, and of a file that may not become so large. Not of one that fails, which may pass."""


LASTING = (*CANNOT_WRITE, errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Errors of the system that another start does not mend."""


class RunError(Exception):
    """A process cannot start or go on; the message says why and what to do.

    Every process prints the message and ends with `exit_code`. A class of its own is only for what some code catches apart from the rest.
    """

    exit_code = GIVE_UP

    def __init__(self, message: str, exit_code: int | None = None, resume_at: int | None = None):
        """`resume_at`: the step of the `--resume` that the message recommends; None: the newest."""
        super().__init__(message)
        self.resume_at = resume_at
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(RunError):
    """Settings that cannot be used; the message lists every fault with its remedy. Commands catch it to end with 2, or to name a file."""

    exit_code = WRONG_SETTINGS
