"""A run on two hosts over one directory, started by hand: orchestrator and trainer on one,
inference on the other. Hosts die as a whole.

A host is a pid namespace with its own /proc, name, boot id, /tmp and /dev/shm (tests/hosts.py;
unshare, as root), so that the other's processes are seen from it in the run directory alone. Each
that dies is followed by a new one of another name, with the same roles.
"""

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

from rl.config.command_line import write_config
from rl.launch import devices
from rl.launch.roles import Role, roles
from rl.run_dir.status import RoleStatus, read_status
from rl.system.errors import RunError
from rl.system.linux import LIBC
from rl.system.machine import machine
from tests.hosts import Host, permitted
from tests.proofs.chaos_run import END_S, EndedError, Run

HOSTS = {"host-train": ("orchestrator", "trainer"), "host-serve": ("inference",)}
"""Target -> the roles on that host."""
POLL_S = 0.1


class RoleEndedError(RunError):
    """A role on a host ended by itself; the host ends with its code."""


class HostRun(Run):
    """The run as its schedule sees it."""

    def __init__(self, args: list[str], folder: Path):
        super().__init__(args, folder)
        if not permitted():
            raise SystemExit("chaos: hosts are pid namespaces, which only root may make")
        self.hosts: dict[str, Host] = {}
        self.words: dict[str, str] = {}
        self.commands: dict[str, Role] = {}

    def start(self) -> None:
        config = self.config.with_absolute_paths()
        division = devices.split(config, machine())
        write_config(self.run_dir.config, config)
        self.commands = {role.name: role for role in roles(config, self.run_dir, division)}
        for target in HOSTS:
            self.start_host(target)

    def start_host(self, target: str) -> None:
        self.attempt += 1
        name, environment = f"{target}-{self.attempt}", self.environment()
        self.words[target] = environment["RL_CHAOS"]
        added = {key: value for key, value in environment.items() if os.environ.get(key) != value}
        mine = [self.commands[role] for role in HOSTS[target]]
        self.hosts[target] = Host(
            name, partial(keep, mine, added, self.output), self.folder.absolute() / f"{name}.log"
        )

    def revive(self) -> None:
        """Starts the roles of a dead host on a new one. Raises EndedError when one ended by
        itself."""
        for target, host in list(self.hosts.items()):
            if (code := host.poll()) is not None:
                if code != -signal.SIGKILL:
                    raise EndedError(code)
                self.doomed.append((time.monotonic(), self.words[target]))
                self.start_host(target)

    def end(self) -> int | None:
        """Ends all hosts. Returns the first exit code that is not 0, None if there are none.
        Raises TimeoutError."""
        hosts, self.hosts, deadline = list(self.hosts.values()), {}, time.monotonic() + END_S
        for host in hosts:
            if process := host.process():
                process.terminate()
        while any(host.poll() is None for host in hosts):
            if time.monotonic() > deadline:
                for host in hosts:
                    host.close()
                raise TimeoutError(f"a host's roles do not end on SIGTERM within {END_S:.0f} s")
            time.sleep(POLL_S)
        return max((host.code or 0 for host in hosts), default=None)

    def note_kill(self, target: str) -> None:
        self.not_before |= dict.fromkeys(HOSTS[target], time.time())

    def status(self, role: str) -> RoleStatus:
        if role != "inference":
            return super().status(role)
        paths = self.run_dir.status_dir.glob(f"inference-{self.hosts['host-serve'].name}-*.json")
        return next(filter(None, map(read_status, paths)), RoleStatus())

    def lives(self, role: str, status: RoleStatus) -> bool:
        """By its host: a pid of there means nothing here."""
        return status.host in [
            self.hosts[target].name for target, on_it in HOSTS.items() if role in on_it
        ]

    def find(self, target: str) -> tuple[int, str] | None:
        """(pid of the process that the host ends with, the trainer's phase)."""
        return self.hosts[target].pid, self.status("trainer").phase or "?"


def keep(mine: list[Role], environment: dict[str, str], output: Path) -> None:
    """On a host: runs its roles until SIGTERM. Raises RoleEndedError when one ended by itself."""
    for folder in ("/dev/shm", environment["TMPDIR"]):
        LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None)
    stopped, processes = [], []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for role in mine:
        os.sched_setaffinity(0, role.cores or range(os.cpu_count() or 1))
        with output.open("ab") as file:
            process = subprocess.Popen(
                role.command,
                env=os.environ | role.env | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        processes.append(process)
    while not stopped and all(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    ended = {role.name: process.poll() for role, process in zip(mine, processes, strict=True)}
    for process in processes:
        process.terminate()
    codes = {role.name: process.wait() for role, process in zip(mine, processes, strict=True)}
    if not stopped or not {*codes.values()} <= {0, 128 + signal.SIGTERM, -signal.SIGTERM}:
        raise RoleEndedError(f"the roles ended with {ended}, and then with {codes}")
