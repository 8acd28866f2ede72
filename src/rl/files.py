"""Durable files: atomic writes, and records with a checksum. The only place that fsyncs and renames.

Between any two system calls here a process may die, and what stands under a final name is whole and as new or as old as it can be. What it
leaves then has a name with a leading dot, which nobody reads and `clean_leftovers` clears away.
"""

import contextlib
import ctypes
import errno
import hashlib
import itertools
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from rl import faults

MAGIC = b"rl1\n"
HEADER = struct.Struct("<4sQ16s")
"""Magic, payload length in bytes, BLAKE2b-128 of the payload."""

LEFTOVER = re.compile(r"\.(?P<name>\d{6}|data)\.(?P<kind>tmp|old|replaced)|\..+\.(?P<pid>\d+)-\d+\.tmp")
"""Temporary names of this module, and no others: a weights directory may lie among strangers."""
SERIAL = itertools.count(1)
LIBC = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP)
"""What file systems answer that cannot swap two names: NFS, some FUSE ones."""


class CorruptFileError(Exception):
    """A file of the run directory does not hold what was written; the message names the file and the remedy."""


MEDIA_ERRORS = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG)
"""What a disk answers that cannot give back what was written to it."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, what the disk cannot give back counts as damaged: raises CorruptFileError."""
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
    """Makes a directory and those above it, durably: a file in a directory that is lost is lost."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def write_all(fd: int, data: bytes, kind: str) -> None:
    """Writes all of `data`. With one call where the kernel takes it, so that lines of several processes never mix."""
    faults.point(f"{kind}.write")
    rest = memoryview(data)
    if faults.plan is not None:
        rest = rest[os.write(fd, rest[: len(rest) // 2]) :]
        faults.point(f"{kind}.torn")
    while rest:
        rest = rest[os.write(fd, rest) :]


def named(error: OSError, path: Path) -> OSError:
    """The error of a full disk names no file; this one does."""
    return OSError(error.errno, error.strerror, str(path))


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` either has all of it or is as before, also after a power cut."""
    kind = faults.kind_of(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(SERIAL)}.tmp")
    try:
        make_directory(path.parent)
        with temporary.open("wb", buffering=0) as file:
            write_all(file.fileno(), data, kind)
            faults.point(f"{kind}.fsync")
            os.fsync(file.fileno())
        faults.point(f"{kind}.rename")
        temporary.rename(path)
        faults.point(f"{kind}.fsync_dir")
        fsync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise named(error, path) from None
    faults.point(f"{kind}.done")


def append_file(path: Path, data: bytes) -> None:
    """Appends `data` durably. An error leaves the file as it was; a death may leave a part, which the reader's checksum tells."""
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
        raise named(error, path) from None
    faults.point(f"{kind}.done")


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary directory and renames that to `path`; an older `path` is replaced. Nothing stays of a failure."""
    kind = faults.kind_of(path)
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        faults.point(f"{kind}.fill")
        fill(temporary)
        commit_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit_directory(temporary: Path, path: Path) -> None:
    """Fsyncs `temporary` and all below it and renames it to `path`. An older `path` is replaced without a moment in which there is none."""
    kind = faults.kind_of(path)
    for file in [*temporary.rglob("*"), temporary]:
        faults.point(f"{kind}.fsync")
        fsync_path(file)
    faults.point(f"{kind}.rename")
    if not path.exists():
        temporary.rename(path)
    elif not exchange(temporary, path):
        replace_in_two_steps(temporary, path)
    faults.point(f"{kind}.fsync_dir")
    fsync_path(path.parent)
    shutil.rmtree(temporary, ignore_errors=True)  # what was replaced
    faults.point(f"{kind}.done")


def exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step. False where kernel or file system cannot."""
    if not hasattr(LIBC, "renameat2"):
        return False
    if LIBC.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in NO_EXCHANGE:
        raise OSError(number, os.strerror(number), str(other))
    return False


def replace_in_two_steps(temporary: Path, path: Path) -> None:
    """Where names cannot be swapped: `clean_leftovers` brings the older one back after a death in between."""
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
    """Deletes a directory so that a half-deleted one never stands under its final name."""
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
    """Moves a file or a directory. To another file system that is a copy: what is half moved never stands under its final name."""
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


def clean_leftovers(*directories: Path) -> list[Path]:
    """Clears away what killed processes left half done; returns it. Only for the one whose turn it is to write there, at its start."""
    found = []
    for directory in directories:
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            if not (match := LEFTOVER.fullmatch(path.name)):
                continue
            if match["pid"] and os.path.exists(f"/proc/{match['pid']}"):
                continue  # a neighbour's, who is writing it
            found.append(path)
            if match["kind"] == "replaced" and not (final := path.with_name(match["name"])).exists():
                path.rename(final)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    return found


def digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def encode_record(payload: bytes) -> bytes:
    """A payload behind a header with its length and checksum."""
    return HEADER.pack(MAGIC, len(payload), digest(payload)) + payload


def decode_records(data: bytes, name: str) -> Iterator[bytes]:
    """Payloads of the records in `data`. Raises CorruptFileError at the first one that is damaged or cut short."""
    offset = 0
    while offset < len(data):
        if len(data) - offset < HEADER.size:
            raise CorruptFileError(f"{name}: cut short at byte {offset}")
        magic, length, checksum = HEADER.unpack_from(data, offset)
        payload = data[offset + HEADER.size : offset + HEADER.size + length]
        if magic != MAGIC or len(payload) != length or digest(payload) != checksum:
            raise CorruptFileError(f"{name}: damaged record at byte {offset} (magic, length or checksum does not fit)")
        yield payload
        offset += HEADER.size + length


def decode_record(data: bytes, name: str) -> bytes:
    """The payload of exactly one record."""
    payloads = list(decode_records(data, name))
    if len(payloads) != 1:
        raise CorruptFileError(f"{name}: holds {len(payloads)} records instead of one")
    return payloads[0]
