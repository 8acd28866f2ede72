"""Virtual environments of workers with one version of verifiers each, built once for this machine: hard links, two seconds."""

import shutil
import subprocess
from hashlib import blake2b
from pathlib import Path

from rl.models.folder import cache_root, make_once

PACKAGES = ("msgspec", "jinja2", "tokenizers", "uvloop", "pytest", "pytest-timeout")
"""What a worker needs beside verifiers, and what plays tests in it."""


def interpreter(verifiers: str) -> Path:
    """The Python of a virtual environment with this version of verifiers."""
    uv = shutil.which("uv") or "uv"
    packages = [f"verifiers=={verifiers}", *PACKAGES]
    name = f"verifiers-{verifiers}-{blake2b(repr(packages).encode(), digest_size=4).hexdigest()}"

    def build(folder: Path) -> None:  # not in the project's own folder, whose constraints uv would obey
        python = str(folder / "bin" / "python")
        subprocess.run([uv, "venv", "-q", "--allow-existing", "--relocatable", str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "-q", "--python", python, *packages], check=True, cwd=folder)

    return make_once(cache_root().parent / "tests" / name, build) / "bin" / "python"
