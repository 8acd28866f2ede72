"""All children of `rl`: started with a marker, watched, and ended so that no process is left,
however `rl` itself ends.

No single mechanism is complete, so several are combined: SIGTERM goes to the group of every child;
`rl` adopts orphans, so processes that left their group (torchrun's workers) or lost their parent
are still found below it; all descendants of a child bear its marker in the environment, so that
leftovers of a dead child can be told from processes of the others; and if `rl` is killed by
SIGKILL, the kernel sends SIGTERM to each child that asked for it (PR_SET_PDEATHSIG), which they
pass on, and the guard, a small process that survives that, ends the rest.
"""

import contextlib
import getpass
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from rl.run_dir.logs import next_log, trim_logs
from rl.system import process_table
from rl.system.children import (
    STOP_DEADLINE_S,
    Child,
    Stopped,
    add_marker,
    descendants,
    inherited,
    start,
)
from rl.system.linux import adopt_orphans, socket_base
from rl.system.prefork import PreforkedProcess
from rl.system.process_table import Table


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
        for session, ticks in self.sessions.items():
            self._send(f"+ {session} {ticks}")

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


OF_AN_ATTEMPT = (process_table.MARKER, "TMPDIR", "VLLM_RPC_BASE_PATH")
"""Environment variables that differ between attempts of a role."""
OF_A_WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Those of a rank of a cluster, too."""
SOCKET_ROOM = 67
"""Bytes that the paths of Unix sockets add to the temporary directory's: ours, and those of vLLM
and of the environment workers."""

REPEAT_S = 1.0
"""Seconds after which Stopped is raised again if it was lost."""

FORWARDED_S = 0.5
"""Seconds in which a second signal is the first one again: `uv run` passes on what the whole
process group was sent, too."""

SHOW_CURSOR = b"\x1b[?25h"
"""Shows the cursor, which a progress bar hides."""


class Children:
    """All children of this process, which adopts orphans below it. Use it only from the main
    thread.

    The first child brings a guard and a directory for temporary files; both are removed when all
    children have ended.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self.not_ours: set[int] = set()
        """Descendants that existed before the first child: W&B's service, which must outlive the
        children."""
        self.guard: Guard | None = None
        self.num_started = 0
        self.held: list[int] | None = None
        """The signal that came while a child was being started; None at other times."""
        self.forwarded_s = FORWARDED_S
        """Seconds after the first signal in which another one is the first again."""
        entry = process_table.entry(os.getpid())
        assert entry is not None
        self.marker = f"{os.getpid()}:{entry.start}:"
        """Prefix of the markers of all processes that this one starts."""
        self.preforked: dict[str, PreforkedProcess] = {}
        """Waiting copies by the name of their role."""
        adopt_orphans()

    def start(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        logs: Path,
        cores: Iterable[int] | None = None,
        warm: bool | None = None,
    ) -> Child:
        """Starts a child with the log of the next attempt, and with a marker and a directory for
        temporary files in its environment.

        `env`: its variables beside those that every child inherits.

        `warm`: True starts it from its predecessor's copy if there is one; False starts it cold;
        None does, too, and it leaves no copy.
        """
        log = next_log(logs, name)
        env = inherited() | env
        if self.guard is None:
            self.not_ours = set(descendants(self.waiting()))
            self.directory = Path(tempfile.mkdtemp(prefix="rl-", dir=socket_base(SOCKET_ROOM)))
            self.guard = Guard(self.marker, self.directory, STOP_DEADLINE_S)
        marker = f"{self.marker}{name}:{log.stem.rpartition('-')[2]}"
        self.num_started += 1
        temporary = self.directory / str(self.num_started)  # short, for the names of sockets
        temporary.mkdir()
        env = env | environment(env, marker, temporary)
        keep_compiled(Path(env["TORCHINDUCTOR_CACHE_DIR"]), temporary)
        with self._holding_signal():
            child = self._start(name, command, env, log, cores, marker, warm)
            child.temporary = temporary
            self.children.append(child)
        self.guard.watch(child)
        return child

    @contextlib.contextmanager
    def _holding_signal(self) -> Iterator[None]:
        """Context in which SIGINT and SIGTERM wait: Stopped in the middle of a start would leave
        a child that nobody ends."""
        self.held = []
        try:
            yield
        finally:
            held, self.held = self.held, None
            for signum in held:
                signal.raise_signal(signum)

    def _start(
        self,
        name: str,
        command: list[str],
        env: dict[str, str],
        log: Path,
        cores: Iterable[int] | None,
        marker: str,
        warm: bool | None,
    ) -> Child:
        preforked = self.preforked.get(name)
        if (
            warm
            and preforked
            and (
                pid := preforked.call(
                    log, {name: env[name] for name in (*OF_AN_ATTEMPT, *OF_A_WORLD) if name in env}
                )
            )
        ):
            return Child(name, pid, log, marker, ancestor=preforked.marker)
        if warm is None:
            return start(name, command, env, log, cores=cores, marker=marker)
        if preforked:
            preforked.close()
        preforked = self.preforked[name] = PreforkedProcess(marker)
        env |= preforked.environment
        try:
            return start(
                name, command, env, log, cores=cores, inherited=preforked.inherited, marker=marker
            )
        finally:
            preforked.started()

    def stop_on_signals(self) -> None:
        """Has the first SIGINT or SIGTERM raise Stopped in the main thread; a second one, or one
        while stopping, kills all children.

        One within `forwarded_s` of the first is the first one again. Stopped is raised again after
        a second unless somebody has caught it: Python only prints what is raised inside a finalizer
        or a hook of fork. `stop_caught` ends that.
        """

        def raise_again(signum: int) -> None:
            if not unwinds(sys.exception()):
                raise Stopped(signum)

        first_at = held_at = -math.inf

        def on_signal(signum: int, _frame: FrameType | None) -> None:
            nonlocal first_at, held_at
            if self.held is not None and not self.held:
                self.held.append(signum)
                held_at = time.monotonic()
                return
            if time.monotonic() - (held_at if self.held else first_at) < self.forwarded_s:
                return
            if self.stopping or self.held:
                self.kill()
                if sys.stderr.isatty():
                    os.write(2, SHOW_CURSOR)
                os._exit(128 + signum)
            self.stopping, first_at = True, time.monotonic()
            signal.signal(signal.SIGALRM, lambda *_: raise_again(signum))
            signal.setitimer(signal.ITIMER_REAL, REPEAT_S, REPEAT_S)
            raise Stopped(signum)

        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)

    def stop_caught(self) -> None:
        """Call it where Stopped is caught."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def poll(self) -> None:
        """Replaces a guard that is gone, reaps adopted orphans that have ended, and shortens
        logs. Call it every few seconds."""
        if self.guard:
            self.guard.poll()
            self._running()
            trim_logs(child.log for child in self.children)

    def stopped(self, child: Child, whole_tree: bool) -> list[int]:
        """Returns the processes that a signal has stopped: the child, or any in its whole tree."""
        if not whole_tree:
            line = process_table.entry(child.pid)
            return [child.pid] if line and line.state == "T" else []
        processes = process_table.table()
        return [
            pid
            for pid in process_table.trees(processes, [child.pid])
            if processes[pid].state == "T"
        ]

    def end(self, child: Child, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """Ends one child: SIGTERM, and after the deadline SIGKILL to all that it has started.
        Returns the pids that are still alive."""
        child.terminate()
        child.wait(deadline_s)
        return self.kill_tree(child)

    def kill_tree(self, child: Child) -> list[int]:
        """Kills a child and all that it has started, even if moved to other groups, then reaps
        and forgets it. Returns the pids that are still alive."""

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
        """Returns the pids of the waiting copies."""
        return {preforked.poll() for preforked in self.preforked.values()} - {0}

    def _end_waiting(self) -> None:
        while self.preforked:
            self.preforked.popitem()[1].close()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> list[int]:
        """Sends SIGTERM to every group, SIGKILL after the deadline, and reaps. Returns the pids
        that are still alive."""
        if self.stopping:
            self.stop_caught()
        self.stopping = True
        self._end_waiting()
        for child in self.children:
            child.terminate()
        deadline = time.monotonic() + deadline_s
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.kill()

    def kill(self) -> list[int]:
        """Sends SIGKILL to everything that is left, and reaps. Returns the pids that are still
        alive (stuck in the kernel)."""
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
        """Returns the live processes below this one that its children started; also reaps
        orphans that have ended."""
        if not self.guard:
            return {}
        processes = process_table.table()
        return self._not_ended({pid: processes[pid] for pid in self._ours(processes)})

    def _not_ended(self, processes: Table) -> Table:
        """Returns those that have not ended; reaps ended orphans, while children wait for their
        `reap`."""
        leaders = {child.pid for child in self.children}
        for pid, line in processes.items():
            if line.state == "Z" and line.parent == os.getpid() and pid not in leaders:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return {pid: line for pid, line in processes.items() if line.state != "Z"}

    def _ours(self, processes: Table) -> set[int]:
        """Returns the processes below this one without the guard, the waiting copies, and the
        trees that existed before the first child."""
        without = (
            self.not_ours | ({self.guard.process.pid} if self.guard else set()) | self.waiting()
        )
        return process_table.trees(processes, [os.getpid()], without) - {os.getpid()}


def environment(given: dict[str, str], marker: str, temporary: Path) -> dict[str, str]:
    """Returns the variables that a child gets in addition to those `given`."""
    return {
        process_table.MARKER: add_marker(marker),
        # otherwise setproctitle, which vLLM uses, overwrites the environment that has the marker
        "SPT_NOENV": "1",
        "TMPDIR": str(temporary),
        # Kept in torch's default location, outside of the temporary directory: it saves half a
        # minute of an engine's first step.
        "TORCHINDUCTOR_CACHE_DIR": given.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user_name()}"
        ),
        "VLLM_RPC_BASE_PATH": given.get("VLLM_RPC_BASE_PATH", str(temporary)),
    }


def keep_compiled(cache: Path, temporary: Path) -> None:
    """Keeps torch's compiled code in `cache`, even the headers, which ignore the variable: they
    save 10 s of a start that compiles."""
    with contextlib.suppress(OSError):  # it is only a cache
        cache.mkdir(parents=True, exist_ok=True)
        (temporary / f"torchinductor_{user_name()}").symlink_to(cache.absolute())


def user_name() -> str:
    """Returns the user's name, or the user id if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have none
        return str(os.getuid())


def unwinds(error: BaseException | None) -> bool:
    """Whether the code that handles this error was entered because of Stopped."""
    while error and not isinstance(error, Stopped):
        error = error.__context__
    return error is not None
