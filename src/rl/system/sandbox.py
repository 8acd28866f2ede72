"""A bubblewrap sandbox for one process and all that it starts: separate namespaces, and only
named parts of the file system."""

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from rl.system import process_table
from rl.system.linux import LAUNCHER

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store")
"""Directories that hold programs and libraries, and no personal files."""
SETTINGS = (
    "alternatives ca-certificates group hosts ld.so.cache ld.so.conf ld.so.conf.d localtime "
    "mime.types nsswitch.conf passwd pki/ca-trust pki/tls/cert.pem pki/tls/certs protocols "
    "resolv.conf services ssl/cert.pem ssl/certs ssl/openssl.cnf"
)
"""Entries of /etc that programs read. None of them is secret; private keys lie next to the
certificates, so not all of ssl is listed."""
MASKED = (
    "acpi asound kcore keys kmsg kpagecgroup kpagecount kpageflags latency_stats pagetypeinfo "
    "sched_debug scsi slabinfo timer_list timer_stats vmallocinfo"
)
"""Entries of /proc with information about the whole machine, most of them readable by root
alone."""
OWN = ("/", "/tmp", "/dev", "/dev/shm", "/proc")
"""Directories of which a sandbox has its own, never replaced by those of this machine."""
NOBODY = "65534"
TEMPORARY_BYTES, SHARED_BYTES = 1 << 30, 1 << 26
"""Sizes of the sandbox's /tmp and /dev/shm, which are in memory."""
TRIAL_S = 20.0
REMEDY = (
    "the sandbox needs bubblewrap 0.8 or newer (`apt-get install bubblewrap`) and user "
    "namespaces (as root: "
    "`sysctl -w user.max_user_namespaces=10000`; on Ubuntu `sysctl -w "
    "kernel.apparmor_restrict_unprivileged_userns=0`; in a container "
    "start it with the right to make namespaces, for Docker `--security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined`)"
)


@dataclass(frozen=True)
class Sandbox:
    """What a process can see in addition to programs, libraries and its own /tmp."""

    read: frozenset[Path]
    """Absolute paths of files, sockets and directories that are visible and read-only."""
    hidden: frozenset[Path] = frozenset()
    """Directories that are empty except for paths in `read`; one that is in `read` itself stays
    visible."""
    directory: Path = Path("/tmp")
    """Working directory of the process."""
    network: bool = False
    """Whether it uses this machine's network; otherwise it only has a loopback interface of its
    own."""
    links: Mapping[Path, Path] = field(default_factory=dict)
    """Symbolic links in the sandbox -> their targets. None may lie in a directory of `read`."""

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Returns the command that runs `command` in the sandbox. It exits with the same code
        and ends all processes inside."""
        mounts = {path: ["--ro-bind", str(path), str(path)] for path in self.read}
        emptied = self.hidden - self.read
        mounts |= {path: ["--tmpfs", str(path)] for path in emptied}
        # inner paths are mounted over outer ones
        ordered = sorted(mounts, key=lambda path: len(path.parts))
        settings = [f"/etc/{name}" for name in SETTINGS.split()]
        directory = str(self.directory)
        return [
            *f"{PROGRAM} --unshare-all --unshare-user --disable-userns".split(),
            *f"--uid {NOBODY} --gid {NOBODY} --cap-drop ALL --new-session".split(),
            *f"--die-with-parent --unsetenv {LAUNCHER}".split(),
            *(["--share-net"] if self.network else []),
            *(word for path in (*SYSTEM, *settings) for word in ("--ro-bind-try", path, path)),
            *f"--dev /dev --size {SHARED_BYTES} --tmpfs /dev/shm --remount-ro /dev".split(),
            # If root makes a sandbox, the kernel still sees root, without capabilities, and that
            # suffices to write /proc/sys.
            *["--proc", "/proc", *masks(), "--remount-ro", "/proc"],
            *f"--size {TEMPORARY_BYTES} --tmpfs /tmp".split(),
            *(word for path in ordered for word in mounts[path]),
            *(word for to, of in self.links.items() for word in ("--symlink", str(of), str(to))),
            *(word for path in emptied for word in ("--remount-ro", str(path))),
            *["--dir", directory, "--remount-ro", "/", "--chdir", directory, "--", *command],
        ]


def masks() -> list[str]:
    """Returns bubblewrap's arguments that hide the MASKED entries; not every kernel has all of
    them."""
    arguments = []
    for path in (Path("/proc", name) for name in MASKED.split()):
        if path.is_dir():
            arguments += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.exists():
            arguments += ["--ro-bind", "/dev/null", str(path)]
    return arguments


@cache
def fault() -> str:
    """Describes why sandboxes do not work on this machine, with the remedy; empty if they do.
    Tries one, which takes 40 ms."""
    try:
        trial = subprocess.run(
            Sandbox(frozenset()).wrap(["/bin/sh", "-c", "exit 0"]),
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
        )
    except FileNotFoundError:
        return f"there is no {PROGRAM} here; {REMEDY}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{PROGRAM} does not run here ({error}); {REMEDY}"
    reap_ended()
    if trial.returncode:
        return f"{PROGRAM} cannot make one here ({trial.stderr.strip()[-300:]}); {REMEDY}"
    return ""


def innermost(pids: Collection[int]) -> dict[int, int]:
    """Returns bubblewrap pid -> pid of our process in its sandbox, or of the deepest one started
    so far. The child of bubblewrap is the first process of the sandbox, and the child of that is
    ours. Scans the process table once."""
    processes = process_table.table()
    eldest: dict[int, int] = {}
    for pid in sorted(processes, key=lambda pid: (int(processes[pid].start), pid), reverse=True):
        eldest[processes[pid].parent] = pid
    first = {pid: eldest.get(pid, pid) for pid in pids}
    return {pid: eldest.get(below, below) for pid, below in first.items()}


def reap_ended() -> None:
    """Reaps the ended first processes of sandboxes. Each leads its own session and is adopted by
    a subreaper."""
    for pid, line in process_table.table().items():
        if line.state == "Z" and line.parent == os.getpid() and line.session == pid:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if psutil.Process(pid).name() == PROGRAM:
                    os.waitpid(pid, os.WNOHANG)
