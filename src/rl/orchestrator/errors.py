"""What ends the orchestrator, and what its exit code then tells `rl`."""

import errno

from rl.processes import GIVE_UP

FOR_THE_USER = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""A disk that is full or cannot be written: starting again changes nothing about it."""


class RunError(Exception):
    """The run cannot go on; the message says why and what to do."""


def code_of(error: OSError) -> int:
    """The exit code for a failed system call."""
    return GIVE_UP if error.errno in FOR_THE_USER else 1
