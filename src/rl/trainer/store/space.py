"""Writes tensors to a disk that may be full."""

import errno
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

SLACK_BYTES = 1 << 16
"""Bytes reserved for headers, manifests and other small files."""


def require_space(directory: Path, tensors: Iterable[Tensor]) -> None:
    """Raises OSError (no space left) if the unsharded tensors do not fit on the file system of
    `directory`.

    Call it before a large write: safetensors and torch report a full disk in ways that cannot be
    recognised.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SLACK_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        # rounded so that they differ
        needed_mib, free_mib = (
            math.ceil(100 * needed / 2**20) / 100,
            math.floor(100 * free / 2**20) / 100,
        )
        raise OSError(
            errno.ENOSPC,
            f"no space left: {needed_mib:.2f} MiB are needed, {free_mib:.2f} MiB are free",
            str(directory),
        )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file. Raises an OSError again that the library has turned into text."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise
