"""Long output, a screen at a time where someone reads it."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import FrameType


def page(texts: Iterable[str]) -> None:
    """Prints texts, a line end behind each: on a terminal through $PAGER (default: less), elsewhere as they are.

    They are made as they are read, and no more of them once the reader has left. Nothing bounds how long someone reads.
    """
    try:
        command = shlex.split(os.environ.get("PAGER") or "less") if sys.stdout.isatty() else []
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env={"LESS": "FRX", **os.environ}) if command else None
    except (OSError, ValueError):  # it is not installed, or no command
        pager = None
    if pager is None:
        for text in texts:
            print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
        return

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        """Leaves Ctrl-C to the pager, which shares our terminal, as long as it is there."""
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
