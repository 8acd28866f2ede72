"""All children of `rl` together: started with a marker, watched, and ended so that none is left, however `rl` itself ends.

Several nets, because each has a hole: SIGTERM goes to the group of every child; `rl` adopts orphans, so what left its group (torchrun's
workers) or lost its parent is still found below it; all that a child starts bears its marker in the environment, so that what a dead
child left is told from what the others need; and if `rl` is killed with SIGKILL, the kernel sends SIGTERM to each child that asked for it
(PR_SET_PDEATHSIG), which they hand down, and the guard ends what that does not reach.
"""

import contextlib
import getpass
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from rl.launch.guard import Guard
from rl.run_dir.logs import next_log
from rl.system import process_table
from rl.system.children import STOP_DEADLINE_S, Child, Stopped, add_marker, descendants, start
from rl.system.linux import adopt_orphans
from rl.system.process_table import Table
from rl.system.standby import Standby

OF_AN_ATTEMPT = (process_table.MARKER, "TMPDIR", "VLLM_RPC_BASE_PATH")
"""Variables whose values differ from attempt to attempt of a role."""
LONGEST_BASE = 40
"""Bytes of the path of the directory for temporary files: the name of a Unix socket, which some put there, has at most 107."""

SHOW_CURSOR = b"\x1b[?25h"
"""A progress bar hides it."""


class Children:
    """All children of this process, which adopts orphans below it. Used from the main thread alone.

    With the first child come a guard and a directory for temporary files; both go with the last one.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self.not_ours: set[int] = set()
        """Processes below this one that were there before the first child: W&B's service, which is to outlive the children."""
        self.guard: Guard | None = None
        self.num_started = 0
        own = process_table.entry(os.getpid())
        assert own is not None
        self.marker = f"{os.getpid()}:{own.start}:"
        """The beginning of the marker of all that this process starts."""
        self.standbys: dict[str, Standby] = {}
        """The copies that wait, by the name of their role."""
        adopt_orphans()

    def start(
        self, name: str, command: list[str], env: dict[str, str], logs: Path, cores: Iterable[int] | None = None, warm: bool | None = None
    ) -> Child:
        """Starts a child under the next attempt's log, with a marker and a directory for temporary files in its environment.

        `warm`: True: from the copy that its predecessor has left behind, if there is one; None: it shall leave no copy either.
        """
        log = next_log(logs, name)
        if self.guard is None:
            self.not_ours = set(descendants(self.waiting()))
            base = tempfile.gettempdir()
            self.directory = Path(tempfile.mkdtemp(prefix="rl-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
            self.guard = Guard(self.marker, self.directory, STOP_DEADLINE_S)
        marker = f"{self.marker}{name}:{log.stem.rpartition('-')[2]}"
        self.num_started += 1
        temporary = self.directory / str(self.num_started)  # short, for the names of sockets
        temporary.mkdir()
        env = env | environment(env, marker, temporary)
        keep_compiled(Path(env["TORCHINDUCTOR_CACHE_DIR"]), temporary)
        standby = self.standbys.get(name)
        if warm and standby and (pid := standby.call(log, {variable: env[variable] for variable in OF_AN_ATTEMPT})):
            child = Child(name, pid, log, marker, ancestor=standby.marker)
        elif warm is None:
            child = start(name, command, env, log, cores=cores, marker=marker)
        else:
            if standby:
                standby.close()
            standby = self.standbys[name] = Standby(marker)
            child = start(name, command, env | standby.environment, log, cores=cores, inherited=standby.inherited, marker=marker)
            standby.started()
        child.temporary = temporary
        self.children.append(child)
        self.guard.watch(child)
        return child

    def stop_on_signals(self) -> None:
        """The first SIGINT or SIGTERM raises Stopped in the main thread, wherever it is; a second one, or one while stopping, kills."""

        def on_signal(signum: int, _frame: FrameType | None) -> None:
            if self.stopping:
                self.kill()
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR)
                os._exit(128 + signum)
            self.stopping = True
            raise Stopped(signum)

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)

    def poll(self) -> None:
        """Replaces a guard that is gone, and reaps orphans that became ours and have ended. Call it every few seconds."""
        if self.guard:
            self.guard.poll()
            self._running()

    def stopped(self, child: Child, whole_tree: bool) -> list[int]:
        """Which processes a signal has stopped: the child, or any in its whole tree."""
        if not whole_tree:
            line = process_table.entry(child.pid)
            return [child.pid] if line and line.state == "T" else []
        processes = process_table.table()
        return [pid for pid in process_table.trees(processes, [child.pid]) if processes[pid].state == "T"]

    def end(self, child: Child, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """Ends one child: SIGTERM, and after the deadline SIGKILL to all that it has started. Returns what even that did not end."""
        child.terminate()
        child.wait(deadline_s)
        return self.kill_tree(child)

    def kill_tree(self, child: Child) -> list[int]:
        """Kills a child and all that it has started, wherever that has gone, reaps, and forgets it. Returns the pids that even that did
        not end."""

        def left() -> Table:
            processes = process_table.table()
            return self._not_ended(child.tree(processes, self._ours(processes)))

        stuck = process_table.kill(left, 0.02)
        self.children = [other for other in self.children if other is not child]
        child.reap()
        if self.guard and not stuck:
            self.guard.forget(child)
            if child.temporary:
                shutil.rmtree(child.temporary, ignore_errors=True)
        return stuck

    def waiting(self) -> set[int]:
        """Pids of the copies that wait."""
        return {standby.poll() for standby in self.standbys.values()} - {0}

    def _end_waiting(self) -> None:
        while self.standbys:
            self.standbys.popitem()[1].close()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """SIGTERM to every group, SIGKILL after the deadline, and reaps. Returns the pids that even that did not end."""
        self.stopping = True
        self._end_waiting()
        for child in self.children:
            child.terminate()
        deadline = time.monotonic() + deadline_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.kill()

    def kill(self) -> list[int]:
        """SIGKILL to everything that is left, and reaps. Returns the pids that are still there (stuck in the kernel)."""
        self._end_waiting()
        stuck = process_table.kill(self._running, 0.02 if self.guard else 0.0)
        for child in self.children:
            child.reap()
        if self.guard and not stuck:
            self.children = []
            self.guard.close()
            self.guard = None
            shutil.rmtree(self.directory, ignore_errors=True)
        return stuck

    def _running(self) -> Table:
        """Processes below this one that its children brought and that have not ended; orphans that have are reaped on the way."""
        if not self.guard:
            return {}
        processes = process_table.table()
        return self._not_ended({pid: processes[pid] for pid in self._ours(processes)})

    def _not_ended(self, processes: Table) -> Table:
        """Those of them that have not ended; an orphan that has is reaped, a child waits for its `reap`."""
        leaders = {child.pid for child in self.children}
        for pid, line in processes.items():
            if line.state == "Z" and line.parent == os.getpid() and pid not in leaders:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return {pid: line for pid, line in processes.items() if line.state != "Z"}

    def _ours(self, processes: Table) -> set[int]:
        """Processes under this one, without the guard, the copies that wait, and the trees that were there before the first child."""
        without = self.not_ours | ({self.guard.process.pid} if self.guard else set()) | self.waiting()
        return process_table.trees(processes, [os.getpid()], without) - {os.getpid()}


def environment(given: dict[str, str], marker: str, temporary: Path) -> dict[str, str]:
    """The variables of a child beside those that it is `given`."""
    return {
        process_table.MARKER: add_marker(marker),
        "SPT_NOENV": "1",  # setproctitle, which vLLM uses, would write the title over the environment that we look for the marker in
        "TMPDIR": str(temporary),
        # The one thing there that is worth keeping, and where torch keeps it by default: half a minute of an engine's first step.
        "TORCHINDUCTOR_CACHE_DIR": given.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user_name()}"),
        "VLLM_RPC_BASE_PATH": given.get("VLLM_RPC_BASE_PATH", str(temporary)),
    }


def keep_compiled(cache: Path, temporary: Path) -> None:
    """Has what torch compiles stay in `cache`, also the headers, for which it does not ask the variable: 10 s of a start that compiles."""
    with contextlib.suppress(OSError):  # no more than a cache
        cache.mkdir(parents=True, exist_ok=True)
        (temporary / f"torchinductor_{user_name()}").symlink_to(cache.absolute())


def user_name() -> str:
    """The user's name; the number of one that has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        return str(os.getuid())
