"""Linux services: ending with the parent, adopting orphans, names and identities of processes,
the limit of open files, routes."""

import ctypes
import errno
import os
import resource
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path

from rl.system import process_table
from rl.system.errors import RunError

LAUNCHER = "RL_PARENT_PID"
"""Environment variable with the pid of the ancestor that must be alive."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
"""From linux/prctl.h."""

LIBC = ctypes.CDLL(None, use_errno=True)
_prctl = LIBC.prctl  # looked up here, not in a forked child

SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PORT_WAIT_S = 10.0
"""How long a port in use is waited for: the process that had it may be ending."""
LONGEST_SOCKET = 107
"""Maximum bytes of a Unix socket's path."""


def return_freed_memory() -> None:
    """Returns to the system what this process has freed. Under the settings MALLOC of
    launch/devices.py glibc keeps it."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def spare_loopback() -> None:
    """Excludes loopback from the shell's proxies, for all clients of this process and its
    children: servers there are on this machine."""
    named = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}".split(",")
    hosts = dict.fromkeys(filter(None, [*map(str.strip, named), *LOOPBACK]))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*" if "*" in hosts else ",".join(hosts)


def bind(host: str, port: int, setting: str, wait_s: float = PORT_WAIT_S) -> socket.socket:
    """Returns a bound socket; port 0 takes a free port. One in use is waited for. Raises
    RunError that names the setting of the port."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            sock.bind((host, port))
            return sock
        except OverflowError:
            raise RunError(f"{setting} = {port}: a port is a number from 1 to 65535") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                sock.close()
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise RunError(
                        f"{setting} = {port} on {host}: {error.strerror}; choose another, or "
                        "0 for a free one"
                    ) from None
                raise RunError(
                    f"{setting.replace('port', 'host')} = {host}: {error.strerror}; give an "
                    "address of this machine, or 0.0.0.0 for all of them"
                ) from None
        time.sleep(0.2)


def listen_everywhere() -> socket.socket:
    """Returns a socket that listens at a free port of all interfaces, over IPv6 as over IPv4."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=4096, dualstack_ipv6=both)


def socket_base(room: int) -> str:
    """Returns where to make a temporary folder for sockets whose paths add up to `room` bytes:
    /tmp if TMPDIR is too long for them."""
    base = tempfile.gettempdir()
    return base if len(os.fsencode(base)) + room <= LONGEST_SOCKET else "/tmp"


def shared_memory_fault() -> str:
    """Describes why processes cannot share memory and locks, with the remedy; empty if they can."""
    if os.access(SHARED_MEMORY, os.W_OK):
        return ""
    state = "cannot be written" if SHARED_MEMORY.exists() else "does not exist"
    return (
        f"{SHARED_MEMORY} {state}, and torch and vLLM keep locks and memory there: mount a tmpfs "
        "(containers: --shm-size 8g)"
    )


def end_with_parent(signum: int = signal.SIGTERM) -> None:
    """Has the kernel signal this process when the thread that started it ends. The setting
    survives exec(2) but not fork(2)."""
    _prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process a subreaper: the parent of all descendants whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_process_name(name: str) -> None:
    """Sets the name that `ps` and `top` show for this process; at most 15 bytes."""
    _prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def raise_open_files() -> None:
    """Raises this process's limit of open files to the hard limit: each rollout has its own
    connection, and the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@cache
def pid_scope() -> str:
    """Identifies the scope of process ids, `0123abcd-4026531836`: this boot of this machine, and
    the pid namespace (one per container).

    A file that names a process also names its place, because elsewhere the same pid is another
    process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"{blake2b(boot, digest_size=4).hexdigest()}-{os.stat('/proc/self/ns/pid').st_ino}"


# after unshare(2) children have another pid namespace
os.register_at_fork(after_in_child=pid_scope.cache_clear)


def address_towards(target: str) -> str:
    """Returns this machine's address on the route to `target`; nothing is sent. Raises OSError
    if there is no route."""
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def own_start() -> str:
    """Returns the start of this process in clock ticks since boot, which identifies it uniquely
    together with its pid and place."""
    line = process_table.entry(os.getpid())
    return line.start if line else ""


def is_alive(pid: int, where: str, start: str) -> bool | None:
    """Returns whether the process with this pid, place and start is alive; None if that cannot
    be seen from here."""
    if where != pid_scope():
        return None
    line = process_table.entry(pid)
    return line is not None and line.start == start and line.state != "Z"


def ancestors() -> Iterator[int]:
    """Yields process ids from the parent upwards, as far as they are visible."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        line = process_table.entry(pid)
        pid = line.parent if line else 0


def die_with_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent dies. Call it first thing in the
    main() of a process below `rl`.

    A process started by hand, without `rl` above it, is left alone because it must outlive its
    shell. Race-free: if the parent died before the call, `rl` is no longer among the ancestors.
    Linux means the parent *thread*, so a process must start others from a thread that lives as long
    as they do.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    end_with_parent()
    if int(launcher) not in ancestors():
        raise SystemExit(128 + signal.SIGTERM)
