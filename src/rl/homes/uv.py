"""Runs uv as a child process with a deadline. Its failures become messages with a remedy."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from rl.system.children import start
from rl.system.errors import RunError

Say = Callable[[str], None]
PROGRESS_S = 10.0
"""Seconds between two progress messages while waiting."""
SHOWN_LINES = 12
"""Last lines of uv's output that an error shows."""
HIDDEN = re.compile(
    "VIRTUAL_ENV|CONDA_PREFIX|PYTHONPATH|PYTHONHOME"
    "|UV_(PYTHON|PROJECT_ENVIRONMENT|OVERRIDE|CONSTRAINT)"
)
"""Variables of the user's shell that would direct uv to an environment other than the home."""
DEFAULTS = {"UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
"""Settings that the user's take precedence over."""
OFFLINE = "a package index does not answer; check the network, then try again"
REASONS = {
    r"os error (28|122)\b|No space left|quota": (
        "no space left for homes or for uv's cache; free some: `uv cache clean` empties the "
        "cache, and UV_CACHE_DIR and RL_ENVIRONMENTS can name folders elsewhere"
    ),
    "Failed to initialize cache": (
        "uv cannot write to its cache; set UV_CACHE_DIR to a folder that can be written"
    ),
    "was not found in the package registry": "a package is not in the index; check the name",
    "No interpreter found|Python interpreter": (
        "uv finds no such Python; install one with `uv python install VERSION`, or put one on the "
        "PATH"
    ),
    "network was disabled": (
        "a package is not in uv's cache, and uv may not use the network; unset UV_OFFLINE, "
        "or `offline` in uv's configuration"
    ),
    "error sending request|Failed to fetch|[Nn]etwork|dns error|Connection refused|timed out"
    "|Could not connect": OFFLINE,
    "No solution found": (
        "its dependencies conflict; fix them, or name your own interpreter with `python`"
    ),
    "": "uv could not install it; fix the package, or name your own interpreter with `python`",
}
"""Fault and remedy by a pattern of uv's output; the first that matches counts."""


class UvError(RunError):
    """uv failed. Caught by callers that can try again in another way."""

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output


class NetworkError(RunError):
    """A package index or the Hub does not answer. Caught where an older home can be used."""


@dataclass(frozen=True)
class Job:
    """The work on one home, for the programs that are run for it."""

    what: str
    """The environment, for messages."""
    venv: Path
    """The virtual environment while it is made."""
    log: Path
    """The file with the output of the last program."""
    say: Say
    deadline: float
    """On time.monotonic's clock."""

    def pip(self, command: str, *arguments: str) -> str:
        return self.uv("pip", command, f"--python={self.venv}/bin/python", *arguments)

    def uv(self, *arguments: str) -> str:
        """Runs uv, and returns its output. Raises UvError and NetworkError."""
        env = {key: value for key, value in os.environ.items() if not HIDDEN.fullmatch(key)}
        # uv looks for its settings from that directory upwards.
        command = [find_uv_bin(), "--directory", str(self.venv.parent), *arguments]
        code, output = self.run(command, DEFAULTS | env)
        if code == 0:
            return output
        reasons = (text for pattern, text in REASONS.items() if re.search(pattern, output))
        reason = next(reasons) if code else "not made by the deadline"
        message = f"{self.what}: {reason}\n{last_lines('uv', output)}"
        raise NetworkError(message) if reason == OFFLINE else UvError(message, output)

    def run(self, command: list[str], env: dict[str, str]) -> tuple[int | None, str]:
        """Runs a command until the deadline, and says from time to time that it still runs.
        Returns its exit code (None: it did not end by then) and its output."""
        name = Path(command[0]).name
        self.log.unlink(missing_ok=True)
        child = start(name, command, env, self.log)
        try:
            while (code := child.wait(self.pause_s())) is None and self.pause_s():
                self.say(f"  {self.what}: {name} is still running (log: {self.log})")
        finally:
            child.kill_tree()
            child.wait()
            child.reap()
        return code, self.log.read_text(errors="replace")

    def pause_s(self) -> float:
        """Seconds until the next progress message; 0 after the deadline."""
        return min(PROGRESS_S, max(0.0, self.deadline - time.monotonic()))


def last_lines(name: str, output: str) -> str:
    """The last lines that a command has printed."""
    lines = output.rstrip().splitlines()[-SHOWN_LINES:] or ["nothing"]
    return "\n  ".join([f"{name} says:", *lines])
