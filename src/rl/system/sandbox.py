"""A sandbox for one process and all that it starts, made by bubblewrap: namespaces of its own, and of the file system what is named."""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from rl.system import process_table
from rl.system.linux import LAUNCHER

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store")
"""Directories that hold programs and libraries, and no person's files."""
SETTINGS = (
    *("alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types"),
    *("nsswitch.conf", "passwd", "pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs", "protocols", "resolv.conf", "services"),
    *("ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf"),
)
"""What programs read in /etc. None of it is secret; private keys lie beside the certificates."""
MASKED = (
    *("acpi", "asound", "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "pagetypeinfo"),
    *("sched_debug", "scsi", "slabinfo", "timer_list", "timer_stats", "vmallocinfo"),
)
"""What of /proc tells of the whole machine, most of it to root alone."""
NOBODY = "65534"
TEMPORARY_BYTES, SHARED_BYTES = 1 << 30, 1 << 26
"""Sizes of the sandbox's /tmp and /dev/shm, which are memory."""
TRIAL_S = 20.0
REMEDY = (
    "the sandbox needs bubblewrap 0.8 or newer (`apt-get install bubblewrap`) and user namespaces (as root: "
    "`sysctl -w user.max_user_namespaces=10000`; on Ubuntu `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`; in a container "
    "start it with the right to make namespaces, for Docker `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`)"
)


@dataclass(frozen=True)
class Sandbox:
    """What a process sees beside programs, libraries and its own /tmp."""

    read: frozenset[Path]
    """Files, sockets and directories, absolute, that are seen and cannot be changed."""
    hidden: frozenset[Path] = frozenset()
    """Directories of which only that is seen which is named in `read`, itself or in them."""
    directory: Path = Path("/tmp")
    """Where the process starts."""
    network: bool = False
    """Whether it has this machine's network; else one of its own, in which only its own loopback is."""
    links: Mapping[Path, Path] = field(default_factory=dict)
    """Symbolic links that it has, and what each leads to. None lies in a directory of `read`."""

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` in the sandbox. It ends with it, with its exit code, and takes everything inside along."""
        arguments = [PROGRAM, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", NOBODY, "--gid", NOBODY]
        arguments += ["--cap-drop", "ALL", "--new-session", "--die-with-parent", "--unsetenv", LAUNCHER]
        if self.network:
            arguments.append("--share-net")
        for path in [*SYSTEM, *(f"/etc/{name}" for name in SETTINGS)]:
            arguments += ["--ro-bind-try", path, path]
        arguments += ["--dev", "/dev", "--size", str(SHARED_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        # Root that makes a sandbox stays root to the kernel, without capabilities: /proc/sys asks for no more than that.
        arguments += ["--proc", "/proc", *masks(), "--remount-ro", "/proc", "--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp"]
        places = {path: ["--ro-bind", str(path), str(path)] for path in self.read}
        places |= {path: ["--tmpfs", str(path)] for path in self.hidden - self.read}
        for _, placed in sorted(places.items(), key=lambda item: len(item[0].parts)):  # what lies deeper is laid over what holds it
            arguments += placed
        for link, target in self.links.items():
            arguments += ["--symlink", str(target), str(link)]
        for path in self.hidden - self.read:
            arguments += ["--remount-ro", str(path)]
        arguments += ["--dir", str(self.directory), "--remount-ro", "/", "--chdir", str(self.directory)]
        return [*arguments, "--", *command]


def masks() -> list[str]:
    """Bubblewrap's arguments that put nothing in the place of what is MASKED; a kernel has not all of it."""
    arguments = []
    for path in (Path("/proc", name) for name in MASKED):
        if path.is_dir():
            arguments += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.exists():
            arguments += ["--ro-bind", "/dev/null", str(path)]
    return arguments


@cache
def fault() -> str:
    """Why this machine has no sandbox, with the remedy; empty if it has. It tries one, which takes 40 ms."""
    try:
        trial = subprocess.run(Sandbox(frozenset()).wrap(["/bin/sh", "-c", "exit 0"]), capture_output=True, text=True, timeout=TRIAL_S)
    except FileNotFoundError:
        return f"there is no {PROGRAM} here; {REMEDY}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{PROGRAM} does not run here ({error}); {REMEDY}"
    reap_ended()
    return f"{PROGRAM} cannot make one here ({trial.stderr.strip()[-300:]}); {REMEDY}" if trial.returncode else ""


def innermost(pid: int) -> psutil.Process:
    """The process that runs in the sandbox of the bubblewrap process `pid`: below it is the first of the sandbox, and below that one ours.
    Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    for _ in range(2):
        children: Iterable[psutil.Process] = sorted(process.children(), key=lambda child: (child.create_time(), child.pid))
        process = next(iter(children), None) or process
    return process


def reap_ended() -> None:
    """Reaps the first processes of sandboxes that have ended. They lead sessions of their own, and a subreaper adopts them."""
    for pid, line in process_table.table().items():
        if line.state == "Z" and line.parent == os.getpid() and line.session == pid:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if psutil.Process(pid).name() == PROGRAM:
                    os.waitpid(pid, os.WNOHANG)
