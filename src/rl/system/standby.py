"""A warm start: a process that has just imported all that it needs leaves a copy of itself behind, which waits to be its next attempt.

    role: imports, copy -> its work ... dies         copy: waits ... order of `rl`, copy -> the work, under a new log

Imports are most of a start (the trainer 6 s of 9, inference 9 of 12), and a copy by fork(2) costs neither that time nor, as long as
nobody writes, memory. The copy is made before the role opens anything, starts a thread or touches a GPU, none of which a fork survives; it
is a child of `rl`, in a session of its own, bears the marker of the run, and ends with `rl`. Where there is none, or what came of one
died without progress, the next attempt starts from nothing.

What is said here of `rl` and a role holds for the orchestrator and the workers of an environment, too. Whoever starts roles so adopts
orphans (`linux.adopt_orphans`).
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl.system import process_table
from rl.system.warm_start import PIPES


class Standby:
    """The copies of one role as `rl` knows them; at most one at a time waits. Holds the ends of the pipes that all of them share."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        """The marker of the first process: /proc shows its environment for all its copies."""
        self.pid = 0
        self.over = False
        """Whether no copy will come any more: the last process that could leave one is gone, or could not."""
        child_in, self.orders = os.pipe()
        self.answers, child_out = os.pipe()
        os.set_blocking(self.answers, False)
        self.inherited = child_in, child_out
        """File descriptors for the first process and its copies."""
        self.environment = {PIPES: f"{child_in},{child_out}"}
        """What asks the first process for a copy."""

    def started(self) -> None:
        """Closes what the first process has inherited: once it and its copies are gone, the pipes have no other end."""
        for fd in self.inherited:
            os.close(fd)

    def poll(self) -> int:
        """The pid of the copy that waits; 0: there is none."""
        with suppress(BlockingIOError):
            data = os.read(self.answers, 4096)
            self.over = not data
            if lines := data.split():
                self.pid = int(lines[-1])
        line = process_table.entry(self.pid) if self.pid else None
        if not line or line.parent != os.getpid() or line.state == "Z":
            self._reap()
        return self.pid

    def call(self, log: Path, env: dict[str, str], arguments: Sequence[str] | None = None) -> int | None:
        """Has the copy that waits take over, with these variables set, and other arguments of its command if some are given. Returns its
        pid; None when there is none that can."""
        pid = self.poll()
        line = process_table.entry(pid) if pid else None
        if not line or line.state == "T":
            return None
        log.touch()
        order = {"log": str(log.absolute()), "env": env, "arguments": arguments}
        with suppress(BrokenPipeError):
            os.write(self.orders, json.dumps(order).encode() + b"\n")
            self.pid = 0  # the next one will send its own
            return pid
        return None

    def close(self) -> None:
        """Ends the copy that waits."""
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
