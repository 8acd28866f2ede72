"""Runs whose hosts die as a whole: on two hosts over one directory, started by hand, or on the
machines of a cluster, in which `rl node` runs.

A host is a pid namespace with its own /proc, name, boot id, /tmp and /dev/shm (tests/hosts.py;
unshare, as root), so that the others' processes are seen from it in the run directory alone. Each
that dies is followed by a new one of another name, with the same roles or index.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rl.config.command_line import write_config
from rl.config.plan import plan
from rl.launch import devices
from rl.launch.roles import Role, roles
from rl.run_dir.nodes import Nodes
from rl.run_dir.status import RoleStatus, read_status
from rl.system.errors import RunError
from rl.system.linux import LIBC
from rl.system.machine import machine
from tests.hosts import Host, permitted
from tests.proofs.chaos_run import END_S, FRESH_S, EndedError, Run

HOSTS = {"host-train": ("orchestrator", "trainer"), "host-serve": ("inference",)}
"""Target -> the roles on that host."""
POLL_S = 0.1


class RoleEndedError(RunError):
    """A role on a host ended by itself; the host ends with its code."""


class Hosts(Run):
    """A run on hosts, as its schedule sees it."""

    replaced_s = 0.0
    """Seconds after which a dead host is followed by a new one."""
    well = (0,)
    """Exit codes of hosts that have ended well."""

    def __init__(self, args: list[str], folder: Path):
        super().__init__(args, folder)
        if not permitted():
            raise SystemExit("chaos: hosts are pid namespaces, which only root may make")
        self.hosts: dict[str, Host] = {}
        self.words: dict[str, str] = {}
        self.due: dict[str, float] = {}
        """Dead host -> when it is followed by a new one."""

    def work(self, target: str, environment: dict[str, str], log: Path) -> Callable[[], None]:
        """What a host does."""
        raise NotImplementedError

    def start_host(self, target: str) -> None:
        self.attempt += 1
        name, environment = f"{target}-{self.attempt}", self.environment()
        self.words[target] = environment["RL_CHAOS"]
        log = self.folder.absolute() / f"{name}.log"
        self.hosts[target] = Host(name, self.work(target, environment, log), log)

    def revive(self) -> None:
        """Replaces dead hosts. Raises EndedError when one ended by itself."""
        for target, host in list(self.hosts.items()):
            if (code := host.poll()) is not None:
                if code != -signal.SIGKILL:
                    raise EndedError(code)
                self.doomed.append((time.monotonic(), self.words[target]))
                self.due[target] = time.monotonic() + self.replaced_s
                del self.hosts[target]
        for target, at in list(self.due.items()):
            if time.monotonic() >= at:
                del self.due[target]
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
                raise TimeoutError(f"hosts do not end on SIGTERM within {END_S:.0f} s")
            time.sleep(POLL_S)
        codes = [0 if host.code in self.well else host.code or 0 for host in hosts]
        return max(codes, default=None)

    def up(self, role: str) -> bool:
        return super().up(role) and not self.due

    def lives(self, role: str, status: RoleStatus) -> bool:
        """By its host: a pid of there means nothing here."""
        return status.host in [host.name for host in self.hosts.values()]


class HostRun(Hosts):
    """A run on two hosts, started by hand: orchestrator and trainer on one, inference on the
    other."""

    def start(self) -> None:
        config = self.config.with_absolute_paths()
        division = devices.split(config, machine())
        write_config(self.run_dir.config, config)
        self.commands = {role.name: role for role in roles(config, self.run_dir, division)}
        for target in HOSTS:
            self.start_host(target)

    def work(self, target: str, environment: dict[str, str], log: Path) -> Callable[[], None]:
        added = {key: value for key, value in environment.items() if os.environ.get(key) != value}
        return partial(keep, [self.commands[role] for role in HOSTS[target]], added, self.output)

    def note_kill(self, target: str) -> None:
        self.not_before |= dict.fromkeys(HOSTS[target], time.time())

    def status(self, role: str) -> RoleStatus:
        if role != "inference" or "host-serve" not in self.hosts:
            return super().status(role)
        paths = self.run_dir.status_dir.glob(f"inference-{self.hosts['host-serve'].name}-*.json")
        return next(filter(None, map(read_status, paths)), RoleStatus())

    def find(self, target: str) -> tuple[int, str] | None:
        """(pid of the process that the host ends with, the trainer's phase)."""
        return self.hosts[target].pid, self.status("trainer").phase or "?"


class MachinesRun(Hosts):
    """A run on the machines of `[cluster]`: `machine-0`, `machine-1`, ... A dead one is replaced,
    with its index, as an engine would."""

    replaced_s, well = 5.0, (0, 75)

    def start(self) -> None:
        assert self.config.cluster, "give --cluster.nodes"
        self.plan = plan(self.config)
        write_config(self.folder / "run.toml", self.config.with_absolute_paths())
        for index in range(self.plan.nodes):
            self.start_host(f"machine-{index}")

    def work(self, target: str, environment: dict[str, str], log: Path) -> Callable[[], None]:
        config = self.folder.absolute() / "run.toml"
        return partial(run_node, config, target[8:], environment, log)

    def note_kill(self, target: str) -> None:
        index = int(target[8:])
        role = "trainer" if index < self.plan.trainers else f"inference-node{index}"
        self.not_before[role] = time.time()

    def roles(self) -> list[str]:
        servers = range(self.plan.trainers, self.plan.nodes)
        return ["trainer", "orchestrator", *(f"inference-node{index}" for index in servers)]

    def find(self, target: str) -> tuple[int, str] | None:
        """(pid of the process that the machine ends with, what the machine does)."""
        host, status = self.hosts.get(target), Nodes(self.run_dir).statuses().get(int(target[8:]))
        if not host or not status or status.host != host.name:
            return None
        beats = time.time() - status.heartbeat <= FRESH_S
        return (host.pid, " and ".join(status.roles)) if beats else None


def own_memory(environment: dict[str, str]) -> None:
    for folder in ("/dev/shm", environment["TMPDIR"]):
        LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None)


def begin(command: list[str], env: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def keep(mine: list[Role], environment: dict[str, str], output: Path) -> None:
    """On a host: runs its roles until SIGTERM. Raises RoleEndedError when one ended by itself."""
    own_memory(environment)
    stopped, processes = [], []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    for role in mine:
        os.sched_setaffinity(0, role.cores or range(os.cpu_count() or 1))
        processes.append(begin(role.command, os.environ | role.env | environment, output))
    while not stopped and all(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    ended = {role.name: process.poll() for role, process in zip(mine, processes, strict=True)}
    for process in processes:
        process.terminate()
    codes = {role.name: process.wait() for role, process in zip(mine, processes, strict=True)}
    if not stopped or not {*codes.values()} <= {0, 128 + signal.SIGTERM, -signal.SIGTERM}:
        raise RoleEndedError(f"the roles ended with {ended}, and then with {codes}")


def run_node(config: Path, index: str, environment: dict[str, str], log: Path) -> None:
    """On a machine: runs `rl node` until its end, which is the machine's."""
    own_memory(environment)
    command = [sys.executable, "-m", "rl.main", "node", "@", str(config), "--cluster.index", index]
    process = begin(command, environment, log)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    os._exit(process.wait() & 0xFF)
