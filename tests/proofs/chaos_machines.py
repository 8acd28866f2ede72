"""A run on a cluster of machines on this one: each is a pid namespace in which `rl node` runs
(tests/hosts.py), and dies as a whole.

`[cluster]` in the configuration says how many there are. A dead machine is replaced, with its
index, after REPLACED_S, as an engine would.
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from rl.config.command_line import write_config
from rl.config.plan import plan
from rl.run_dir.nodes import Nodes
from rl.run_dir.status import RoleStatus
from rl.system.linux import LIBC
from tests.hosts import Host, permitted
from tests.proofs.chaos_run import END_S, FRESH_S, EndedError, Run

REPLACED_S = 5.0
POLL_S = 0.1


class MachinesRun(Run):
    """The run as its schedule sees it. Its targets are `machine-0`, `machine-1`, ..."""

    def __init__(self, args: list[str], folder: Path):
        super().__init__(args, folder)
        if not permitted():
            raise SystemExit("chaos: machines are pid namespaces, which only root may make")
        assert self.config.cluster, "give --cluster.nodes"
        self.plan = plan(self.config)
        self.machines: dict[str, Host] = {}
        self.words: dict[str, str] = {}
        self.due: dict[str, float] = {}
        """Dead machine -> when it is replaced."""

    def start(self) -> None:
        write_config(self.folder / "run.toml", self.config.with_absolute_paths())
        for index in range(self.plan.nodes):
            self.start_machine(f"machine-{index}")

    def start_machine(self, target: str) -> None:
        self.attempt += 1
        name, environment = f"{target}-{self.attempt}", self.environment()
        self.words[target] = environment["RL_CHAOS"]
        log = self.folder.absolute() / f"{name}.log"
        self.machines[target] = Host(
            name,
            partial(run_node, self.folder.absolute() / "run.toml", target[8:], environment, log),
            log,
        )

    def revive(self) -> None:
        """Replaces dead machines. Raises EndedError when one ended by itself."""
        for target, machine in list(self.machines.items()):
            if (code := machine.poll()) is not None:
                if code != -signal.SIGKILL:
                    raise EndedError(code)
                self.doomed.append((time.monotonic(), self.words[target]))
                self.due[target] = time.monotonic() + REPLACED_S
                del self.machines[target]
        for target, at in list(self.due.items()):
            if time.monotonic() >= at:
                del self.due[target]
                self.start_machine(target)

    def end(self) -> int | None:
        """Ends all machines. Returns the first exit code that is not 0, None if there are none.
        Raises TimeoutError."""
        machines, self.machines, deadline = (
            list(self.machines.values()),
            {},
            time.monotonic() + END_S,
        )
        for machine in machines:
            if process := machine.process():
                process.terminate()
        while any(machine.poll() is None for machine in machines):
            if time.monotonic() > deadline:
                for machine in machines:
                    machine.close()
                raise TimeoutError(f"machines do not end on SIGTERM within {END_S:.0f} s")
            time.sleep(POLL_S)
        return (
            0
            if all(machine.code in (0, 75) for machine in machines)
            else max((machine.code or 0 for machine in machines), default=None)
        )

    def note_kill(self, target: str) -> None:
        index = int(target[8:])
        self.not_before |= dict.fromkeys(
            ["trainer"] if index < self.plan.trainers else [f"inference-node{index}"], time.time()
        )

    def roles(self) -> list[str]:
        return [
            "trainer",
            "orchestrator",
            *(f"inference-node{index}" for index in range(self.plan.trainers, self.plan.nodes)),
        ]

    def up(self, role: str) -> bool:
        return super().up(role) and not self.due

    def lives(self, role: str, status: RoleStatus) -> bool:
        """By its machine: a pid of there means nothing here."""
        return status.host in [machine.name for machine in self.machines.values()]

    def find(self, target: str) -> tuple[int, str] | None:
        """(pid of the process that the machine ends with, what the machine does)."""
        machine = self.machines.get(target)
        status = Nodes(self.run_dir).statuses().get(int(target[8:]))
        if (
            machine is None
            or status is None
            or status.host != machine.name
            or time.time() - status.heartbeat > FRESH_S
        ):
            return None
        return machine.pid, " and ".join(status.roles)


def run_node(config: Path, index: str, environment: dict[str, str], log: Path) -> None:
    """On a machine: runs `rl node` until its end, which is the machine's."""
    for folder in ("/dev/shm", environment["TMPDIR"]):
        LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None)
    command = [sys.executable, "-m", "rl.main", "node", "@", str(config), "--cluster.index", index]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    os._exit(process.wait() & 0xFF)
