"""Files that may not be read, also where tests run as root, who may read everything."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION_3, DAC_OVERRIDE, DAC_READ_SEARCH = 0x20080522, 1, 2
"""Of capset(2): the layout of its structs, and the capabilities by which root reads what it may
not."""


@contextmanager
def denied(*paths: Path) -> Iterator[None]:
    """Takes all permissions from files and folders, and from this thread the privilege to read
    them all the same."""
    modes = {path: path.stat().st_mode for path in paths}
    before = (ctypes.c_uint32 * 6)()
    capability("capget", before)
    for path in paths:
        path.chmod(0)
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    try:
        capability("capset", less)
        yield
    finally:
        capability("capset", before)
        for path, mode in modes.items():
            path.chmod(mode)


def capability(call: str, sets: ctypes.Array) -> None:
    """capget or capset of this thread. sets: effective, permitted and inheritable, of 32
    capabilities each, twice."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, call)(ctypes.byref((ctypes.c_uint32 * 2)(VERSION_3, 0)), ctypes.byref(sets)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
