"""Machines on one network, on one machine: each is a network, pid, mount and host name namespace
(unshare, as root) of its own.

A machine has an address on a common bridge, a name that resolves to 127.0.1.1 there (as on Debian)
and to its address elsewhere, another boot id, and its own /proc and /dev/shm. Its processes see
others' processes and memory nowhere, but the same files.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from rl.system.children import Child
from tests.waiting import until

BOOT = """
mount -t tmpfs none /dev/shm
mount --bind "$0/hosts" /etc/hosts
mount --bind "$0/boot_id" /proc/sys/kernel/random/boot_id
hostname "$1"
ip link set lo up
touch "$0/up"
while :; do sleep 1000000 & wait; done
"""
"""The first process of a machine: sets it up, and then reaps orphans."""


class Machines:
    """`count` machines, numbered from 0, as long as the `with` block lasts. Raises OSError where
    they cannot be made."""

    def __init__(self, count: int):
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="rl-machines-"))
        self.booted: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Machines":
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.connect_all()
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all machines with all their processes."""
        for name in list(self.booted):
            self._power_off(name)
        shutil.rmtree(self.folder)

    # The network ----------------------------------------------------------------------------------

    def connect_all(self) -> None:
        """Boots a switch and all machines."""
        self._boot("switch")
        self._ip("switch", "link", "add", "bridge", "type", "bridge")
        self._ip("switch", "link", "set", "bridge", "up")
        for index in range(self.count):
            self.boot(index)

    def boot(self, index: int) -> None:
        """Boots a machine, a new one if there was one with this index, and connects it."""
        self._boot(machine(index))
        peer = ["peer", "name", port(index), "netns", str(self._first("switch"))]
        self._ip(machine(index), "link", "add", "eth0", "type", "veth", *peer)
        self._ip("switch", "link", "set", port(index), "master", "bridge", "up")
        self.bring_up(index)

    def bring_up(self, index: int) -> None:
        """Gives a machine its address."""
        self._ip(machine(index), "address", "add", f"{address(index)}/24", "dev", "eth0")
        self._ip(machine(index), "link", "set", "eth0", "up")

    def cut(self, index: int) -> None:
        """Pulls a machine's cable."""
        self._ip("switch", "link", "set", port(index), "down")

    def mend(self, index: int) -> None:
        """Plugs it in again."""
        self._ip("switch", "link", "set", port(index), "up")

    # Processes ------------------------------------------------------------------------------------

    def inside(self, index: int, command: Sequence[str]) -> list[str]:
        """A command that runs `command` on a machine."""
        return [
            *self._enter(machine(index)),
            "--uts",
            "--mount",
            "--pid",
            "--",
            "env",
            "-u",
            "RL_PARENT_PID",
            *command,
        ]

    def processes(self, index: int) -> list[psutil.Process]:
        """All processes on a machine, except those with which it booted."""
        first = self.first(index)
        space, found = os.stat(f"/proc/{first}/ns/pid").st_ino, []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if (
                    os.stat(f"/proc/{process.pid}/ns/pid").st_ino == space
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return [process for process in found if process.pid != first and process.name() != "sleep"]

    def send(self, index: int, signum: int) -> None:
        """Signals all processes on a machine at once, as far as that can be."""
        for process in self.processes(index):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def lose(self, index: int) -> None:
        """Ends a machine and all its processes at once."""
        self._power_off(machine(index))

    def first(self, index: int) -> int:
        """The process id, here, of a machine's first process."""
        return self._first(machine(index))

    # ----------------------------------------------------------------------------------------------

    def _boot(self, name: str) -> None:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        known = {machine(index): address(index) for index in range(self.count)} | {
            name: "127.0.1.1"
        }
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{at} {other}\n" for other, at in known.items())
        )
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            *spaces,
            "sh",
            "-ec",
            BOOT,
            str(folder),
            name,
        ]
        with (folder / "log").open("wb") as log:
            self.booted[name] = booted = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(lambda: (folder / "up").exists() or booted.poll() is not None)
        if booted.poll() is not None:
            raise OSError((folder / "log").read_text().strip())

    def _power_off(self, name: str) -> None:
        booted = self.booted.pop(name)
        booted.kill()
        booted.wait()

    def _first(self, name: str) -> int:
        return psutil.Process(self.booted[name].pid).children()[0].pid

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", "--target", str(self._first(name)), "--net"]

    def _ip(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._enter(name), "ip", *arguments], capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"{name}: ip {' '.join(arguments)}: {done.stderr.strip()}")


def machine(index: int) -> str:
    return f"machine-{index}"


def address(index: int) -> str:
    return f"10.0.0.{index + 1}"


def port(index: int) -> str:
    """The name of the switch's end of a cable."""
    return f"port{index}"


def node_command(config: Path, index: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "rl.main",
        "node",
        "@",
        str(config),
        "--cluster.index",
        str(index),
    ]


def terminate(child: Child) -> None:
    """Has the engine of a machine take it away: SIGTERM to its `rl node`, not to the process
    that entered the machine."""
    for process in psutil.Process(child.pid).children():
        process.send_signal(signal.SIGTERM)
