"""Shows long output in a pager if stdout is a terminal."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import FrameType


def page(texts: Iterable[str]) -> None:
    """Prints texts, each followed by a newline: on a terminal through $PAGER (default: less),
    otherwise directly.

    Texts are generated on demand, and no more of them after the pager has quit. There is no time
    limit for reading.
    """
    try:
        command = shlex.split(os.environ.get("PAGER") or "less") if sys.stdout.isatty() else []
        pager = (
            subprocess.Popen(command, stdin=subprocess.PIPE, env={"LESS": "FRX", **os.environ})
            if command
            else None
        )
    except (OSError, ValueError):  # not installed, or not a valid command
        pager = None
    if pager is None:
        for text in texts:
            print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        """Leaves Ctrl-C to the pager, which shares the terminal, while it is running."""
        if pager.poll() is not None and callable(before):
            before(signum, frame)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with contextlib.suppress(BrokenPipeError), pager.stdin:
            for text in texts:
                pager.stdin.write(f"{text}\n".encode(errors="backslashreplace"))
                pager.stdin.flush()
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
