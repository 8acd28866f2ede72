"""uv as a child process: found, watched, ended at a deadline, and its complaint in words with a remedy."""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from rl.system.children import start
from rl.system.errors import RunError

Say = Callable[[str], None]
PROGRESS_S = 10.0
"""Seconds between two lines that tell what is waited for."""
SHOWN_LINES = 12
"""Last lines of uv's output that an error shows."""
HIDDEN = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT", "UV_OVERRIDE", "UV_CONSTRAINT")
"""Variables of the shell's own environment that mean another one than the home."""
NO_SPACE, OTHER_PYTHON = (
    re.compile(r"os error (28|122)\b|No space left|quota"),
    re.compile(r"(?:does not satisfy|requires) Python *((?:[<>=!~]=?[\d.*]+,?\s*)+)"),
)
NO_SPACE_AT = re.compile(r"(?:file|directory|folder|path|to|from|in|at) [`'\"]?(/[^\s`'\":]+)")
OFFLINE = re.compile(r"error sending request|Failed to fetch|[Nn]etwork|dns error|Connection refused|timed out|Could not connect")


class UvError(RunError):
    """uv failed. Caught by those that can try again in another way."""

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output

    @property
    def python(self) -> str:
        """The versions of Python that the packages want in place of this one, such as `>=3.12`; empty if that was not the reason."""
        found = OTHER_PYTHON.search(" ".join(self.output.split()))
        with contextlib.suppress(InvalidSpecifier):
            return str(SpecifierSet(found[1].strip(" ,"))) if found else ""
        return ""

    @property
    def offline(self) -> bool:
        """Whether an index did not answer."""
        return bool(OFFLINE.search(self.output))


def uv_binary() -> str:
    """The path of uv: the one that was installed beside us, or one on the PATH. Raises RunError."""
    try:
        import uv

        return uv.find_uv_bin()
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
    raise RunError("uv is not there, which makes the homes of environments: `pip install uv`, or name an interpreter with `python`")


def run_uv(arguments: list[str], folder: Path, log: Path, what: str, say: Say, deadline: float) -> str:
    """Runs uv in `folder` and returns its output, which is appended to `log`. `deadline` is on time.monotonic's clock. Raises UvError."""
    env = {key: value for key, value in os.environ.items() if key not in HIDDEN} | {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    before = log.stat().st_size if log.exists() else 0
    began = time.monotonic()
    child = start("uv", [uv_binary(), "--directory", str(folder), *arguments], env, log)  # it reads settings from there upwards
    try:
        while (code := child.wait(min(PROGRESS_S, max(0.0, deadline - time.monotonic())))) is None:
            seconds = time.monotonic() - began
            if time.monotonic() >= deadline:
                raise UvError(f"{what}: not made after {seconds:.0f} s; {last_lines(log, before)}", "")
            say(f"  {what}: uv works for {seconds:.0f} s (log: {log})")
    finally:
        child.kill_tree()
        child.wait()
        child.reap()
    output = log.read_bytes()[before:].decode(errors="replace")
    if code:
        raise UvError(f"{what}: {reason(output, folder)}\n{last_lines(log, before)}", output)
    return output


def reason(output: str, folder: Path) -> str:
    """Why uv failed, and the remedy."""
    if NO_SPACE.search(output):
        found = NO_SPACE_AT.search(output)
        place = found[1] if found else f"{folder}, or of uv's own cache"
        ways = "`uv cache clean` empties uv's cache, UV_CACHE_DIR and RL_ENVIRONMENTS name folders elsewhere"
        return f"no space left on the disk of {place}; make room: {ways}"
    if "was not found in the package registry" in output:
        return "a package is not in the index; check the name"
    if OFFLINE.search(output):
        return "a package index does not answer; check the network, then try again"
    if "No solution found" in output:
        return "what it needs does not go together; mend its dependencies, or give an interpreter of your own with `python`"
    return "uv could not install it; mend the package, or give an interpreter of your own with `python`"


def last_lines(log: Path, before: int) -> str:
    """The end of what uv has printed since byte `before` of the log."""
    lines = log.read_bytes()[before:].decode(errors="replace").rstrip().splitlines()[-SHOWN_LINES:]
    return "uv says:\n" + "\n".join(f"  {line}" for line in lines) if lines else "uv said nothing"
