"""Where workers come from: the first one in a home is started, and leaves a copy of itself behind once its imports are made; the others
there, of whichever environment, and those that take the place of dead ones, are forked from that copy. One in a sandbox is started from
nothing (`isolation`).

A copy has imported the adapter and the library of environments, no environment itself, which may start threads. Where there is no
copy, a worker is started from nothing.
"""

import asyncio
import errno
import os
import sys
import time
from pathlib import Path

import msgspec

from rl.homes.home import home_of, is_of_package
from rl.orchestrator.isolation import variables_of
from rl.system import process_table
from rl.system.children import Child, add_marker, start
from rl.system.errors import RunError
from rl.system.linux import adopt_orphans
from rl.system.sandbox import Sandbox
from rl.system.standby import Standby
from rl.wire.worker_messages import WorkerSetup

BOOTSTRAP = """
import importlib.util, runpy, sys
folder, setup_file = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rl", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["rl"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rl"])
sys.argv = ["worker", setup_file]
runpy.run_module("rl.envs.worker", run_name="__main__")
"""
"""Runs the worker in another virtual environment: of ours it sees this package alone, nothing that is installed beside it."""
POLL_S = 0.01
COPY_S = 60.0
"""After so long a worker is started from nothing."""


def command_of(setup: WorkerSetup, setup_path: Path) -> list[str]:
    """How a worker with this setup is started from nothing."""
    if not setup.python:
        return [sys.executable, "-m", "rl.envs.worker", str(setup_path)]
    # Of a package not the current directory, where a folder of its name would be found before it.
    safe = ["-P"] if is_of_package(setup.python) else []
    return [setup.python, *safe, "-c", BOOTSTRAP, str(Path(__file__).parents[1]), str(setup_path)]


class Nursery:
    """Starts worker processes. One copy for each interpreter waits, at most."""

    def __init__(self) -> None:
        self.standbys: dict[str, Standby] = {}
        """By interpreter."""
        adopt_orphans()

    def start(self, setup: WorkerSetup, setup_path: Path, log_path: Path, marker: str, warm: bool, sandbox: Sandbox | None = None) -> Child:
        """Starts a process, from a copy if it may be `warm` and one waits; what it starts bears `marker` in its environment. Raises
        RunError when its interpreter is not there.

        Its setup is in a file: an argument is limited to 128 KiB, and shown to everyone on the machine.
        """
        setup_path.write_bytes(msgspec.json.encode(setup))
        standby = self.standbys.get(setup.python) if not sandbox else None
        if warm and standby and (pid := standby.call(log_path, {process_table.MARKER: add_marker(marker)}, [str(setup_path)])):
            return Child(setup.worker_id, pid, log_path, marker)
        command, env = command_of(setup, setup_path), dict(os.environ)
        if setup.python:  # what the environment calls by name is what is installed with it
            env["PATH"] = f"{Path(setup.python).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        try:
            if not os.path.exists(command[0]):  # bubblewrap would not say so
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if sandbox:
                return start(setup.worker_id, sandbox.wrap(command), variables_of(setup, env), log_path, new_session=False, marker=marker)
            if standby:
                standby.close()
            standby = self.standbys[setup.python] = Standby(marker)
            try:
                env |= standby.environment
                return start(setup.worker_id, command, env, log_path, inherited=standby.inherited, new_session=False, marker=marker)
            finally:
                standby.started()
        except OSError as error:
            remedy = "give one that is there as orchestrator.environment.python"
            if home_of(setup.python):
                remedy = "its home was deleted: --resume makes it anew, as any start does"
            raise RunError(f"environment {setup.env.name}: {command[0]} does not start: {error.strerror}; {remedy}") from None

    async def copy(self, python: str) -> None:
        """Waits until a copy with this interpreter waits, or none will come: a worker ends, or goes on without leaving one, or takes
        longer than COPY_S for its imports."""
        standby, deadline = self.standbys.get(python), time.monotonic() + COPY_S
        while standby and not standby.poll() and not standby.over and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def waiting(self) -> set[int]:
        """Pids of the copies that wait."""
        return {standby.poll() for standby in self.standbys.values()} - {0}

    def close(self) -> None:
        """Ends the copies that wait."""
        while self.standbys:
            self.standbys.popitem()[1].close()
