"""Whether a disk has room for what is about to be written."""

import errno
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

SLACK_BYTES = 1 << 16
"""Room for headers, manifests and other small files."""


def require_space(directory: Path, tensors: Iterable[Tensor]) -> None:
    """Raises OSError (no space left) if tensors, each as a whole, do not fit on the file system of `directory`.

    To be called before a large write: safetensors and torch report a full disk in ways that cannot be recognised.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SLACK_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        needed_mib, free_mib = math.ceil(100 * needed / 2**20) / 100, math.floor(100 * free / 2**20) / 100  # never the same number
        raise OSError(errno.ENOSPC, f"no space left: {needed_mib:.2f} MiB are needed, {free_mib:.2f} MiB are free", str(directory))
