"""Warm starts: a process that has just finished its imports leaves a forked copy of itself behind,
which waits to be its next attempt.

    role: imports, copy -> its work ... dies
    copy: waits ... order of `rl`, copy -> the work, under a new log

Imports are most of a start (6 of 9 s for the trainer, 9 of 12 s for inference). A copy made by
fork(2) saves that time and shares its memory until one side writes. The copy is made before the
role opens files, starts threads or touches a GPU, none of which survives a fork. It is a child of
`rl` in its own session, bears the run's marker, and ends with `rl`. The next attempt is a cold
start if there is no copy, or if the attempt made from one died without progress.

The same applies to the orchestrator and the workers of an environment in place of `rl` and a role.
The process that starts such roles must adopt orphans (`linux.adopt_orphans`).
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl.system import process_table
from rl.system.prefork import PIPES


class PreforkedProcess:
    """The copies of one role, as seen by `rl`; at most one waits at a time. Holds `rl`'s ends of
    the pipes that all copies share."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """The marker of the first process, which /proc also shows for all its copies."""
        self.pid = 0
        self.over = False
        """Whether there will be no more copies: the last process that could leave one is gone or
        failed to."""
        child_in, self.orders = os.pipe()
        self.answers, child_out = os.pipe()
        os.set_blocking(self.answers, False)
        self.inherited = child_in, child_out
        """File descriptors for the first process and its copies."""
        self.environment = {PIPES: f"{child_in},{child_out}"}
        """Environment variables that ask the first process for a copy."""

    def started(self) -> None:
        """Closes the ends that the first process has inherited, so that the pipes break once it
        and all copies are gone."""
        for fd in self.inherited:
            os.close(fd)

    def poll(self) -> int:
        """Returns the pid of the waiting copy; 0 if there is none."""
        with suppress(BlockingIOError):
            data = os.read(self.answers, 4096)
            self.over = not data
            if lines := data.split():
                self.pid = int(lines[-1])
        line = process_table.entry(self.pid) if self.pid else None
        if not line or line.parent != os.getpid() or line.state == "Z":
            self._reap()
        return self.pid

    def call(
        self, log: Path, env: dict[str, str], arguments: Sequence[str] | None = None
    ) -> int | None:
        """Has the waiting copy take over with these variables, and with these command-line
        arguments if given. Returns its pid, or None if no copy can take over."""
        pid = self.poll()
        line = process_table.entry(pid) if pid else None
        if not line or line.state == "T":
            return None
        log.touch()
        order = {"log": str(log.absolute()), "env": env, "arguments": arguments}
        with suppress(BrokenPipeError):
            os.write(self.orders, json.dumps(order).encode() + b"\n")
            self.pid = 0  # the next copy will send its own
            return pid
        return None

    def close(self) -> None:
        """Kills the waiting copy."""
        if self.poll():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._reap(0)
        for fd in (self.orders, self.answers):
            os.close(fd)

    def _reap(self, flags: int = os.WNOHANG) -> None:
        if self.pid:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, flags)
        self.pid = 0
