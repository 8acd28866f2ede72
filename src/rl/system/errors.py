"""Errors that name a remedy, the exit codes of processes, and the system errors that do not pass
by themselves."""

import errno
import signal

RESTART, WRONG_SETTINGS, GIVE_UP, DAMAGED = 1, 2, 3, 4
"""Exit codes of our processes: worth a restart, like any other failure; wrong settings; a fault
that a restart does not fix (a missing model, a full disk); a damaged file in the run directory,
to be repaired before the next start."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a trainer whose ranks were ended from outside: by SIGKILL, or with the machine
that they were on."""


CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""Errors of a full or unwritable disk, and of a file above its size limit. Errors of a failing
disk are left out: they may pass."""


LASTING = (*CANNOT_WRITE, errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""System errors that a restart does not fix."""


class RunError(Exception):
    """A process cannot start or continue; the message says why and what to do.

    Every process prints the message and ends with `exit_code`. Subclasses exist only for errors
    that some code handles separately.
    """

    exit_code = GIVE_UP

    def __init__(self, message: str, exit_code: int | None = None, resume_at: int | None = None):
        """`resume_at`: the step at which the message recommends to `--resume`; None: the newest."""
        super().__init__(message)
        self.resume_at = resume_at
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(RunError):
    """Settings are invalid; the message lists every fault with its remedy. Commands catch it to
    exit with 2, or to add a file name."""

    exit_code = WRONG_SETTINGS


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code by which a process that ends with an error tells `rl` whether to
    repair, to give up, or to restart."""
    if isinstance(error, RunError):
        return error.exit_code
    return GIVE_UP if isinstance(error, OSError) and error.errno in LASTING else RESTART


def system_error(error: OSError) -> str:
    """Describes a system error, with the remedy if a disk cannot be written."""
    remedy = (
        "; free space or make it writable, or use another directory (for a run: output_dir)"
        if error.errno in CANNOT_WRITE
        else ""
    )
    return f"{error.filename or 'the run directory'}: {error.strerror or error}{remedy}"
