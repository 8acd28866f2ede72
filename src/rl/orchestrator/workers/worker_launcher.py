"""Starts workers. The first worker of a home is started cold, and forks a copy of itself once its
imports are done. All others in that home, whatever their environment, and replacements for dead
workers are forked from the copy. Sandboxed workers are started cold (worker_sandbox.py says why),
as is any worker for which there is no copy.

A copy has imported the adapter and the library of environments, but no environment: these may start
threads.
"""

import asyncio
import errno
import os
import time
from pathlib import Path

import msgspec

from rl.homes.home import home_of
from rl.orchestrator.workers.worker_sandbox import variables_of
from rl.system import process_table
from rl.system.children import PYTHON, Child, add_marker, inherited, start
from rl.system.errors import RESTART, RunError
from rl.system.linux import adopt_orphans
from rl.system.prefork import PreforkedProcess
from rl.system.sandbox import Sandbox
from rl.wire.worker_messages import WorkerSetup

BOOTSTRAP = """
import importlib.util, runpy, sys
folder, setup_file = sys.argv[1:]
file, where = folder + "/__init__.py", [folder]
spec = importlib.util.spec_from_file_location("rl", file, submodule_search_locations=where)
sys.modules["rl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rl"])
sys.argv = ["worker", setup_file]
runpy.run_module("rl.envs.worker", run_name="__main__")
"""
"""Runs the worker in another virtual environment: from ours it sees only this package, nothing
installed next to it."""
POLL_S = 0.01
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)
"""Errors of an interpreter that is not there or cannot be run; all others may pass."""
COPY_S = 60.0
"""Longest wait for a copy; after that a worker is started cold."""


def command_of(setup: WorkerSetup, setup_path: Path) -> list[str]:
    """Returns the command that starts a worker with this setup cold."""
    if not setup.python:
        return [*PYTHON, "-m", "rl.envs.worker", str(setup_path)]
    return [setup.python, "-P", "-c", BOOTSTRAP, str(Path(__file__).parents[2]), str(setup_path)]


class WorkerLauncher:
    """Starts worker processes. At most one copy per interpreter is waiting."""

    def __init__(self) -> None:
        self.preforked: dict[str, PreforkedProcess] = {}
        """By interpreter."""
        adopt_orphans()

    def start(
        self,
        setup: WorkerSetup,
        setup_path: Path,
        log_path: Path,
        marker: str,
        warm: bool,
        sandbox: Sandbox | None = None,
    ) -> Child:
        """Starts a process, from a waiting copy if there is one and `warm` is set; `marker` is in
        its environment and is inherited by its children. Raises RunError if its interpreter does
        not exist, or if the system refuses another process, which may pass.

        The setup is passed in a file: arguments are limited to 128 KiB, and visible to everyone on
        the machine.
        """
        setup_path.write_bytes(msgspec.json.encode(setup))
        preforked = self.preforked.get(setup.python) if not sandbox else None
        if (
            warm
            and preforked
            and (
                pid := preforked.call(
                    log_path, {process_table.MARKER: add_marker(marker)}, [str(setup_path)]
                )
            )
        ):
            return Child(setup.worker_id, pid, log_path, marker)
        command, env = command_of(setup, setup_path), inherited()
        # programs that the environment calls by name come from its own virtual environment
        if setup.python:
            env["PATH"] = f"{Path(setup.python).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        try:
            if not os.path.exists(command[0]):  # bubblewrap would not report it
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if sandbox:
                return start(
                    setup.worker_id,
                    sandbox.wrap(command),
                    variables_of(setup, env),
                    log_path,
                    new_session=False,
                    marker=marker,
                )
            if preforked:
                preforked.close()
            preforked = self.preforked[setup.python] = PreforkedProcess(marker)
            try:
                env |= preforked.environment
                return start(
                    setup.worker_id,
                    command,
                    env,
                    log_path,
                    inherited=preforked.inherited,
                    new_session=False,
                    marker=marker,
                )
            finally:
                preforked.started()
        except OSError as error:
            if error.errno not in MISSING:
                text = (
                    f"{command[0]} cannot be started now: {error.strerror}; make room for its "
                    "files or processes"
                )
                raise RunError(f"environment {setup.env.name}: {text}", RESTART) from None
            remedy = "set orchestrator.environment.python to an existing interpreter"
            if home_of(setup.python):
                remedy = "its home was deleted: --resume makes it again, as any start does"
            raise RunError(
                f"environment {setup.env.name}: {command[0]} does not start: "
                f"{error.strerror}; {remedy}"
            ) from None

    async def copy(self, python: str) -> None:
        """Waits until a copy with this interpreter is available, or none will come: the worker
        ended, or continues without forking one, or takes longer than COPY_S for its imports."""
        preforked, deadline = self.preforked.get(python), time.monotonic() + COPY_S
        while (
            preforked
            and not preforked.poll()
            and not preforked.over
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(POLL_S)

    def waiting(self) -> set[int]:
        """Returns the pids of the waiting copies."""
        return {preforked.poll() for preforked in self.preforked.values()} - {0}

    def close(self) -> None:
        """Ends the waiting copies."""
        while self.preforked:
            self.preforked.popitem()[1].close()
