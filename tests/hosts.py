"""Two hosts over one directory, on one machine: each is a pid namespace with its own /proc, name
and boot id (unshare, as root).

A process of the test forks, so that a host costs no imports. On it a function runs, in a process
that is not the namespace's first: that one no signal of its own stops.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from rl.system.linux import LIBC, end_with_parent

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID = 0x00020000, 0x04000000, 0x20000000  # linux/sched.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000  # linux/mount.h
BOOT_ID = b"/proc/sys/kernel/random/boot_id"


def permitted() -> bool:
    """Whether this process may make hosts."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


class Host:
    """A host on which `function` runs; what it prints and raises is in the file `log`. `close`
    ends all its processes at once."""

    def __init__(self, name: str, function: Callable[[], None], log: Path):
        self.name, self.log = name, log
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._begin(name, function)

    def _begin(self, name: str, function: Callable[[], None]) -> None:
        end_with_parent(signal.SIGKILL)
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID)
        if first := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        end_with_parent(signal.SIGKILL)
        LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        LIBC.mount(b"proc", b"/proc", b"proc", 0, None)
        boot_id = self.log.with_name(f"{name}.boot_id")
        boot_id.write_text(name)
        LIBC.mount(os.fsencode(boot_id), BOOT_ID, None, MS_BIND, None)
        LIBC.sethostname(name.encode(), len(name))
        if process := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF)
        code = 0
        try:
            function()
        except BaseException as error:
            os.write(fd, traceback.format_exc().encode())
            code = getattr(error, "exit_code", 1)
        os._exit(code)

    def process(self) -> psutil.Process | None:
        """The process that runs the function."""
        found = psutil.Process(self.pid).children(recursive=True)
        return found[1] if len(found) > 1 else None

    def is_stopped(self) -> bool:
        process = self.process()
        return process is not None and process.status() == psutil.STATUS_STOPPED

    def go_on(self) -> None:
        process = self.process()
        assert process
        process.send_signal(signal.SIGCONT)

    def poll(self, how: int = os.WNOHANG) -> int | None:
        """The exit code: that of the error's class for one that the function raised; None while
        it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, how)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Waits for the exit code."""
        code = self.poll(0)
        assert code is not None
        return code

    def close(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class LateListings:
    """Shows directories below `root` as they were `late_s` seconds ago, as a network's file
    system may, to this process."""

    def __init__(self, root: Path, late_s: float):
        self.root, self.late_s = str(root), late_s
        self.listdir, self.scandir = os.listdir, os.scandir
        self.seen: dict[str, list[tuple[float, list[str]]]] = {}
        self._look()
        threading.Thread(target=self._watch, daemon=True).start()
        os.listdir, os.scandir = self._listdir, self._scandir  # type: ignore[assignment]

    def _watch(self) -> None:
        while True:
            time.sleep(0.01)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for folder, _, _ in self._walk(self.root):
            with contextlib.suppress(FileNotFoundError):
                self.seen.setdefault(folder, []).append((now, self.listdir(folder)))

    def _walk(self, folder: str) -> Iterator[tuple[str, None, None]]:
        yield folder, None, None
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            self.scandir(folder) as entries,
        ):
            for entry in list(entries):
                if entry.is_dir():
                    yield from self._walk(entry.path)

    def _names(self, folder: str) -> list[str] | None:
        """None for a directory that is not watched."""
        if not folder.startswith(self.root):
            return None
        then = time.monotonic() - self.late_s
        return next(
            (names for when, names in reversed(self.seen.get(folder, [])) if when <= then), []
        )

    def _listdir(self, folder=".") -> list[str]:
        names = self._names(str(folder))
        return self.listdir(folder) if names is None else names

    @contextlib.contextmanager
    def _scandir(self, folder="."):
        names = self._names(str(folder))
        with self.scandir(folder) as entries:
            yield iter([entry for entry in entries if names is None or entry.name in names])
