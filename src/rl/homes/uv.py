"""Runs uv as a child process with a deadline, and turns its failures into messages with a
remedy."""

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
"""Seconds between two progress messages while waiting."""
SHOWN_LINES = 12
"""Last lines of uv's output that an error shows."""
HIDDEN = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "PYTHONHOME",
    "UV_PYTHON",
    "UV_PROJECT_ENVIRONMENT",
    "UV_OVERRIDE",
    "UV_CONSTRAINT",
)
"""Variables of the user's shell that would direct uv to an environment other than the home."""
NO_SPACE, OTHER_PYTHON = (
    re.compile(r"os error (28|122)\b|No space left|quota"),
    re.compile(r"(?:does not satisfy|requires) Python *((?:[<>=!~]=?[\d.*]+,?\s*)+)"),
)
NO_SPACE_AT = re.compile(r"(?:file|directory|folder|path|to|from|in|at) [`'\"]?(/[^\s`'\":]+)")
OFFLINE = re.compile(
    r"error sending request|Failed to fetch|[Nn]etwork|dns error|Connection refused|timed "
    r"out|Could not connect"
)


class UvError(RunError):
    """uv failed. Caught by callers that can try again in another way."""

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output

    @property
    def python(self) -> str:
        """The Python versions that the packages need in place of this one, such as `>=3.12`;
        empty if that was not the reason."""
        found = OTHER_PYTHON.search(" ".join(self.output.split()))
        with contextlib.suppress(InvalidSpecifier):
            return str(SpecifierSet(found[1].strip(" ,"))) if found else ""
        return ""

    @property
    def offline(self) -> bool:
        """Whether an index did not answer."""
        return bool(OFFLINE.search(self.output))


def uv_binary() -> str:
    """The path of uv: the one installed alongside `rl`, or one on the PATH. Raises RunError."""
    try:
        import uv

        return uv.find_uv_bin()
    except (ImportError, FileNotFoundError):
        if found := shutil.which("uv"):
            return found
    raise RunError(
        "uv, which makes the homes of environments, is not installed: `pip install uv`, or "
        "name an interpreter with `python`"
    )


def run_uv(
    arguments: list[str], folder: Path, log: Path, what: str, say: Say, deadline: float
) -> str:
    """Runs uv in `folder` and returns its output, which is appended to `log`. `deadline` is on
    time.monotonic's clock. Raises UvError."""
    env = {key: value for key, value in os.environ.items() if key not in HIDDEN} | {
        "UV_NO_PROGRESS": "1",
        "NO_COLOR": "1",
    }
    began = time.monotonic()
    # uv looks for its settings from there upwards
    command = [uv_binary(), "--directory", str(folder), *arguments]
    code, output = run(command, env, log, what, say, deadline)
    if code is None:
        raise UvError(
            f"{what}: not made after {time.monotonic() - began:.0f} s; {last_lines('uv', output)}",
            "",
        )
    if code:
        raise UvError(f"{what}: {reason(output, folder)}\n{last_lines('uv', output)}", output)
    return output


def run(
    command: list[str], env: dict[str, str], log: Path, what: str, say: Say, deadline: float
) -> tuple[int | None, str]:
    """Runs a command until the deadline (on time.monotonic's clock), and says from time to time
    that it still runs. Returns its exit code (None: it did not end by then) and its output,
    which is appended to `log`."""
    before = log.stat().st_size if log.exists() else 0
    began, name = time.monotonic(), Path(command[0]).name
    child = start(name, command, env, log)
    try:
        while (
            code := child.wait(min(PROGRESS_S, max(0.0, deadline - time.monotonic())))
        ) is None and time.monotonic() < deadline:
            say(
                f"  {what}: {name} has been running for {time.monotonic() - began:.0f} s "
                f"(log: {log})"
            )
    finally:
        child.kill_tree()
        child.wait()
        child.reap()
    return code, log.read_bytes()[before:].decode(errors="replace")


def reason(output: str, folder: Path) -> str:
    """Why uv failed, and the remedy."""
    if NO_SPACE.search(output):
        found = NO_SPACE_AT.search(output)
        place = found[1] if found else f"{folder}, or of uv's own cache"
        ways = (
            "`uv cache clean` empties uv's cache, and UV_CACHE_DIR and RL_ENVIRONMENTS can name "
            "folders elsewhere"
        )
        return f"no space left on the disk of {place}; free some: {ways}"
    if "Failed to initialize cache" in output:
        return "uv cannot write to its cache; set UV_CACHE_DIR to a folder that can be written"
    if "was not found in the package registry" in output:
        return "a package is not in the index; check the name"
    if "network was disabled" in output:
        return (
            "a package is not in uv's cache, and uv may not use the network; unset UV_OFFLINE, "
            "or `offline` in uv's configuration"
        )
    if OFFLINE.search(output):
        return "a package index does not answer; check the network, then try again"
    if "No solution found" in output:
        return "its dependencies conflict; fix them, or name your own interpreter with `python`"
    return "uv could not install it; fix the package, or name your own interpreter with `python`"


def last_lines(name: str, output: str) -> str:
    """The last lines that a command has printed."""
    lines = output.rstrip().splitlines()[-SHOWN_LINES:]
    return (
        f"{name} says:\n" + "\n".join(f"  {line}" for line in lines)
        if lines
        else f"{name} said nothing"
    )
