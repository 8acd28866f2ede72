"""Durable files: atomic writes, and records with a checksum.

A process may die between any two system calls here, and still what has a final name is whole: the old content or the new one. What a dead
process leaves half done has a name with a leading dot, which nobody reads and `clean_leftovers` removes. That name says whose it is.

What must be made once (`new=True`) gets its name only if that is free (`naming`), so of two writers, even on two hosts, one learns that it
lost.

Only this module fsyncs, and only it and `naming` link and rename, with two exceptions: `status.write_status` renames without fsync, because
a heartbeat is worthless after a power cut; `rl doctor` measures the disk.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rl.run_dir.hashes import blake2b
from rl.run_dir.naming import NO_LINK, RENAME_EXCHANGE, link_new, rename_new, rename_with
from rl.system import faults, process_table
from rl.system.errors import DAMAGED, RunError
from rl.system.linux import place

MAGIC = b"rl1\n"
HEADER = struct.Struct("<4sQ16s")
"""Magic, payload length in bytes, BLAKE2b-128 of the payload."""

LEFTOVER = re.compile(r"\.(?P<name>\d{6,}|data)\.(?P<kind>tmp|old|replaced)|\..+\.(?:(?P<place>[0-9a-f]{8}-\d+)-(?P<pid>\d+)|\d+)-\d+\.tmp")
"""Temporary names of this module and no others: a weights directory may lie among files that are not ours. Those without a place are of
versions of rl before it stood there."""
SERIAL = itertools.count(1)
Fence = Callable[[], None] | None
PIECE_BYTES = 1 << 24
"""Of a file of lines, in memory at once."""


class CorruptFileError(RunError):
    """A file of the run directory does not hold what was written; the message names the file and the remedy. Caught by whoever repairs it,
    passes it over or adds what to do without it."""

    exit_code = DAMAGED


MEDIA_ERRORS = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG)
"""Errors of a disk that cannot read what was written to it."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises CorruptFileError if a read inside fails because the disk has lost data."""
    try:
        yield
    except OSError as error:
        if error.errno not in MEDIA_ERRORS:
            raise
        raise CorruptFileError(f"{path}: cannot be read ({error.strerror})") from None


def fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents durably: a file is lost with its directory."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def write_all(fd: int, data: bytes, kind: str) -> None:
    """Writes all of `data`, in one call if the kernel accepts that, so that lines of several processes never mix."""
    faults.point(f"{kind}.write")
    rest = memoryview(data)
    if faults.plan is not None:
        rest = rest[os.write(fd, rest[: len(rest) // 2]) :]
        faults.point(f"{kind}.torn")
    while rest:
        rest = rest[os.write(fd, rest) :]


def with_path(error: OSError, path: Path) -> OSError:
    """The same error with the path, which the error of a full disk lacks."""
    return OSError(error.errno, error.strerror, str(path))


def temporary_name(path: Path) -> Path:
    """A new name beside `path` for what will become it; it says where and by which process it is written."""
    return path.with_name(f".{path.name}.{place()}-{os.getpid()}-{next(SERIAL)}.tmp")


def write_file(path: Path, data: bytes, *, new: bool = False, fence: Fence = None, mode: int = 0o666, durable: bool = True) -> None:
    """Writes `data` so that `path` either has all of it or is as before, even after a power cut. Raises OSError that names the path.

    new: the file must not be there yet; raises TakenError if it is, whoever made it in the meantime.
    fence: called at the last moment before the file gets its name; what it raises keeps the write from happening.
    mode: permissions of the file, less the umask.
    durable: False leaves the fsyncs to `make_durable`: until that has ended a power cut may leave anything under the name.
    """
    kind = faults.kind_of(path)
    temporary = temporary_name(path)
    try:
        make_directory(path.parent)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0) as file:
            write_all(file.fileno(), data, kind)
            if durable:
                faults.point(f"{kind}.fsync")
                os.fsync(file.fileno())
        if fence:
            fence()
        faults.point(f"{kind}.rename")
        if new:
            link_new(temporary, path)
        else:
            temporary.rename(path)
        if durable:
            fsync_name(path, kind)
    except (OSError, RunError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if fence:
            fence()  # who has lost its role may lose its temporary file, too: that is no fault of the disk
        raise with_path(error, path) if isinstance(error, OSError) else error from None


def end_of_last_line(file: IO[bytes]) -> int:
    """The offset behind the last line of a file that is whole."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - PIECE_BYTES)
        file.seek(start)
        if (last := file.read(end - start).rfind(b"\n")) >= 0:
            return start + last + 1
        end = start
    return 0


def files_in(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder whose names end so, sorted; none without it. Raises PermissionError, where `glob` finds nothing."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []


class LineReader:
    """Follows a file to which other processes append lines."""

    def __init__(self, path: Path):
        self.path, self.offset = path, 0

    def skip(self) -> None:
        """Passes over the lines that are there."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            self.offset = end_of_last_line(file)

    def new(self) -> list[bytes]:
        """The lines completed since the last call, PIECE_BYTES at most unless one alone is longer; none while there is no file."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            self.offset = min(self.offset, os.fstat(file.fileno()).st_size)  # a repair may have cut the file
            file.seek(self.offset)
            data = file.read(PIECE_BYTES)
            while b"\n" not in data and (more := file.read(PIECE_BYTES)):
                data += more
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.splitlines()


def append_file(path: Path, data: bytes) -> None:
    """Appends `data` durably. An error leaves the file as it was; a killed process may leave a part of `data`, for readers to detect."""
    kind = faults.kind_of(path)
    new = not path.exists()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                write_all(fd, data, kind)
                faults.point(f"{kind}.fsync")
                os.fsync(fd)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        if new:
            fsync_path(path.parent)
    except OSError as error:
        raise with_path(error, path) from None
    faults.point(f"{kind}.done")


def write_directory(path: Path, fill: Callable[[Path], None], *, new: bool = False, fence: Fence = None, durable: bool = True) -> None:
    """Calls `fill` with a temporary directory and renames that to `path`, replacing an older one. A failure leaves nothing.

    new, fence, durable: see `write_file`.
    """
    kind = faults.kind_of(path)
    make_directory(path.parent)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        faults.point(f"{kind}.fill")
        fill(temporary)
        commit_directory(temporary, path, new=new, fence=fence, durable=durable)
    except (OSError, RunError):
        if fence:
            fence()
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit_directory(temporary: Path, path: Path, *, new: bool = False, fence: Fence = None, durable: bool = True) -> None:
    """Fsyncs `temporary` with all its files and renames it to `path`. An older `path` is replaced in one step where the kernel can.

    new, fence, durable: see `write_file`.
    """
    kind = faults.kind_of(path)
    share(temporary)
    if durable:
        fsync_tree(temporary, kind)
    if fence:
        fence()
    faults.point(f"{kind}.rename")
    if new or not path.exists():
        rename_new(temporary, path)
    elif not rename_with(temporary, path, RENAME_EXCHANGE):
        replace_in_two_steps(temporary, path)
    if durable:
        fsync_name(path, kind)
    shutil.rmtree(temporary, ignore_errors=True)  # what was replaced


def fsync_tree(path: Path, kind: str) -> None:
    """Fsyncs a file, or a directory with all that is in it."""
    for file in [*path.rglob("*"), path]:
        faults.point(f"{kind}.fsync")
        fsync_path(file)


def fsync_name(path: Path, kind: str) -> None:
    """Fsyncs the directory that has `path`, the last step of every write."""
    faults.point(f"{kind}.fsync_dir")
    fsync_path(path.parent)
    faults.point(f"{kind}.done")


def make_durable(path: Path) -> None:
    """Does what `write_file` and `write_directory` leave out without `durable`. From here on a power cut does not touch `path`."""
    kind = faults.kind_of(path)
    fsync_tree(path, kind)
    fsync_name(path, kind)


def share(folder: Path) -> None:
    """Gives files the permissions that the umask gave the folder: safetensors writes for the owner alone. Leaves links as they are."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        there = file.lstat()
        if stat.S_ISREG(there.st_mode) and there.st_nlink == 1 and stat.S_IMODE(there.st_mode) != mode:
            with contextlib.suppress(PermissionError):  # a file system that has no permissions
                file.chmod(mode)


def replace_in_two_steps(temporary: Path, path: Path) -> None:
    """Replaces `path` where names cannot be swapped. After a kill in between `clean_leftovers` brings the older one back."""
    old = path.with_name(f".{path.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    faults.point(f"{faults.kind_of(path)}.replaced")
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    old.rename(temporary)


def remove_directory(path: Path) -> None:
    """Deletes a directory so that a half-deleted one never has its final name."""
    kind = faults.kind_of(path)
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    faults.point(f"{kind}.remove")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    faults.point(f"{kind}.removed")
    shutil.rmtree(doomed, ignore_errors=True)


def move(path: Path, target: Path) -> None:
    """Moves a file or a directory, by copying to another file system. What is half moved no longer has its old name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        leaving = path.with_name(f".{path.name}.old")
        shutil.rmtree(leaving, ignore_errors=True)
        path.rename(leaving)
        shutil.move(leaving, target)


def link_tree(source: Path, target: Path) -> None:
    """Makes `target` hold what a file or a directory holds, whose files never change: as hard links, or as copies where there are none."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            link_tree(path, target / path.name)
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
        shutil.copy2(source, target)


def clean_leftovers(*directories: Path, ours: str | None = None) -> list[Path]:
    """Removes what processes that are dead now left half done, and returns its paths.

    That a process is dead is known of this host and pid namespace alone. ours: what begins with this name ("": everything there) is only
    written by the holder of a role that this process holds now, so that what another host's process left is nobody's.
    """
    found = []
    for directory in directories:
        hidden = sorted(name for name in os.listdir(directory) if name[0] == ".") if directory.is_dir() else []
        for name in hidden:  # few, beside all the files of a long run
            if not (match := LEFTOVER.fullmatch(name)):
                continue
            path = directory / name
            known = match["place"] == place()
            if process_table.entry(int(match["pid"])) if known else ours is None or not name.startswith(f".{ours}"):
                continue  # a live process is writing it, or one of which we know nothing
            found.append(path)
            if match["kind"] == "replaced" and not (final := path.with_name(match["name"])).exists():
                path.rename(final)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return found


def encode_record(payload: bytes) -> bytes:
    """A payload behind a header with its length and checksum."""
    return HEADER.pack(MAGIC, len(payload), blake2b(payload)) + payload


def head_of_record(head: bytes, name: str) -> tuple[int, bytes]:
    """(length, checksum) of the payload behind the head of a record. Raises CorruptFileError."""
    if len(head) < HEADER.size:
        raise CorruptFileError(f"{name}: cut short, {len(head)} bytes are left")
    magic, length, checksum = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise CorruptFileError(f"{name}: does not begin as a record does")
    return length, checksum


def decode_records(data: bytes, name: str) -> Iterator[bytes]:
    """Payloads of the records in `data`. Raises CorruptFileError at the first one that is damaged or cut short."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < HEADER.size:
            raise CorruptFileError(f"{name}: cut short at byte {offset}")
        magic, length, checksum = HEADER.unpack_from(data, offset)
        payload = data[offset + HEADER.size : offset + HEADER.size + length]
        if magic != MAGIC or len(payload) != length or blake2b(payload) != checksum:
            raise CorruptFileError(f"{name}: damaged record at byte {offset} (magic, length or checksum does not fit)")
        yield payload
        offset += HEADER.size + length


def decode_record(data: bytes, name: str) -> bytes:
    """The payload of data that holds exactly one record. Raises CorruptFileError."""
    payloads = list(decode_records(data, name))
    if len(payloads) != 1:
        raise CorruptFileError(f"{name}: holds {len(payloads)} records instead of one")
    return payloads[0]
