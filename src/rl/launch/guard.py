"""Keeps the guard running, a small process that survives when `rl` is killed by SIGKILL."""

import contextlib
import os
import subprocess
import sys

from rl.system import process_table
from rl.system.children import Child


class Guard:
    """The guard as seen by `rl`: restarted when it is gone or stopped, and told which sessions
    the children lead."""

    def __init__(self, marker: str, directory: os.PathLike[str], grace_s: float):
        self.command = [
            sys.executable,
            "-I",
            "-S",
            process_table.__file__,
            marker,
            str(directory),
            str(grace_s),
        ]
        self.sessions: dict[int, str] = {}
        """Leader's pid -> its start in clock ticks."""
        self._start()

    def _start(self) -> None:
        reader, self.pipe = os.pipe()
        # It must not inherit our output: a reader that waits for its end would also wait for the
        # guard.
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(reader)
        for session, start in self.sessions.items():
            self._send(f"+ {session} {start}")

    def _send(self, line: str) -> None:
        # the guard or the pipe is gone: `poll` starts another one and sends all sessions
        with contextlib.suppress(OSError):
            os.write(self.pipe, line.encode() + b"\n")

    def watch(self, child: Child) -> None:
        """Has the guard end the processes of a child's session with the run, even those that
        have overwritten their environment."""
        self.sessions[child.pid] = child.start_ticks
        self._send(f"+ {child.pid} {child.start_ticks}")

    def forget(self, child: Child) -> None:
        """Reverts `watch`: the child's processes are gone, and its pid may be reused."""
        self.sessions.pop(child.pid, None)
        self._send(f"- {child.pid}")

    def poll(self) -> None:
        """Replaces a guard that was killed or stopped. If the system refuses another process,
        the next call tries again."""
        line = process_table.entry(self.process.pid)
        if self.process.poll() is not None or not line or line.state == "T":
            self.close()
            with contextlib.suppress(OSError):
                self._start()

    def close(self) -> None:
        """Kills the guard before it sees the end of the pipe: there is nothing left for it to
        do."""
        self.process.kill()
        self.process.wait()
        pipe, self.pipe = self.pipe, -1  # its number is soon that of another file
        with contextlib.suppress(OSError):  # closed already, if a second signal interrupted us here
            os.close(pipe)
