"""Durable files: atomic writes, and records with a checksum.

A process may die between any two system calls here, and everything under a final name is still
complete: the old content or the new one. Unfinished work of a dead process has a name with a
leading dot, which nobody reads and `clean_leftovers` removes. The name identifies the process.

With `new=True` a file or directory gets its name only if that is free (`give_name`), so of two
writers, even on two hosts, one learns that it lost.

Only this module fsyncs, links and renames, with two exceptions: `status.write_status` renames
without fsync, because a heartbeat is worthless after a power cut; `rl doctor` measures the disk.
"""

import contextlib
import errno
import glob
import hashlib
import itertools
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from rl.system import faults, process_table
from rl.system.errors import DAMAGED, RunError
from rl.system.linux import pid_scope

MAGIC = b"rl1\n"
HEADER = struct.Struct("<4sQ16s")
"""Magic, payload length in bytes, BLAKE2b-128 of the payload."""

LEFTOVER = re.compile(
    r"\.(?P<name>\d{6,}|data)\.(?P<kind>old|replaced)"
    r"|\..+\.(?P<place>[0-9a-f]{8}-\d+)-(?P<pid>\d+)-\d+\.tmp"
)
"""Matches only temporary names of this module: a weights directory may also contain files of
others."""
SERIAL = itertools.count(1)
Fence = Callable[[], None] | None
Data = bytes | bytearray | memoryview
D = TypeVar("D", bytes, bytearray, memoryview)
T = TypeVar("T")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding if bytes are not what is expected; RecursionError is for too deeply
nested data."""
# of a file of lines, in memory at once; and of one line
PIECE_BYTES, MAX_LINE_BYTES = 1 << 24, 1 << 26
# of a disk that has lost data
MEDIA_ERRORS = (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.EBADMSG)
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP)
"""Errors of a file system that lacks a feature: NFS, some FUSE ones."""
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, *UNSUPPORTED)
"""Errors of hard links across file systems, or on one without hard links."""


class CorruptFileError(RunError):
    """A file of the run directory does not hold what was written; the message names the file and
    the remedy. Callers catch it to repair the file, to skip it, or to add how to continue
    without it."""

    exit_code = DAMAGED


class TakenError(RunError):
    """Another process has already made what this one was to make. A caller that knows which one
    raises a more precise error."""

    def __init__(self, path: Path):
        super().__init__(
            f"{path} already exists: another process has made it; this one ends without changing it"
        )


def blake2b(data: bytes | bytearray | memoryview) -> bytes:
    """Returns BLAKE2b-128, used for records, which are read and written one by one."""
    return hashlib.blake2b(data, digest_size=16).digest()


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Returns SHA-256 in hexadecimal, used for readable text, so that `sha256sum --check` can
    verify it."""
    return hashlib.sha256(data).hexdigest()


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises CorruptFileError if the disk has lost what the block reads, or if the path is a
    pipe or device, which might never end."""
    if path.exists() and not path.is_file():
        raise CorruptFileError(f"{path}: is not a file; move it away")
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
    """Makes a directory and its parents durably: without its directory a file would be lost,
    too."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def write_all(fd: int, data: Data, path: Path) -> None:
    """Writes all of `data`, in a single call if the kernel accepts that, so that lines of
    several processes do not mix. path: that of the file, or the one that it will have."""
    faults.point("write", path)
    rest = memoryview(data)
    if faults.plan is not None:
        rest = rest[os.write(fd, rest[: len(rest) // 2]) :]
        faults.point("torn", path)
    while rest:
        rest = rest[os.write(fd, rest) :]


def with_path(error: OSError, path: Path) -> OSError:
    """Returns the same error with the path, which the error of a full disk lacks."""
    return OSError(error.errno, error.strerror, str(path))


def matching(pattern: str) -> list[Path]:
    """Returns the files that a pattern names, sorted; a folder that exists is taken by its name,
    also if that has signs of patterns."""
    path = Path(os.path.expanduser(pattern))
    known = next(filter(os.path.exists, (path, *path.parents)))
    literal = glob.escape(str(known))
    return sorted(map(Path, glob.glob(os.path.join(literal, *path.relative_to(known).parts))))


def temporary_name(path: Path) -> Path:
    """Returns a new temporary name beside `path`; it identifies the host and the process that
    write it."""
    return path.with_name(f".{path.name}.{pid_scope()}-{os.getpid()}-{next(SERIAL)}.tmp")


def write_file(
    path: Path,
    data: Data,
    *,
    new: bool = False,
    fence: Fence = None,
    mode: int = 0o666,
    durable: bool = True,
) -> None:
    """Writes `data` so that `path` either has all of it or is unchanged, even after a power cut.
    Raises OSError that names the path.

    new: the file must not exist yet; raises TakenError if it does, even if it was made in the
    meantime. fence: called at the last moment before the file gets its name; an exception it raises
    prevents the write. mode: permissions of the file, less the umask. durable: False leaves the
    fsyncs to `make_durable`; before that has returned, a power cut may leave anything under the
    name.
    """
    temporary = temporary_name(path)
    try:
        make_directory(path.parent)
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", buffering=0
        ) as file:
            write_all(file.fileno(), data, path)
            if durable:
                faults.point("fsync", path)
                os.fsync(file.fileno())
        if fence:
            fence()
        faults.point("rename", path)
        if new:
            give_name(temporary, path)
        else:
            temporary.rename(path)
        if durable:
            fsync_name(path)
    except (OSError, RunError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if fence:
            # a process that lost its role may also lose its temporary file: that is not a disk
            # fault
            fence()
        raise with_path(error, path) if isinstance(error, OSError) else error from None


def give_name(temporary: Path, path: Path) -> None:
    """Gives a file or directory its final name. Raises TakenError if the name is taken.

    A file gets a hard link. Without hard links the name is checked first: then only the role's
    lease protects against two simultaneous writers. A rename never replaces a directory with files.
    """
    try:
        (Path.rename if temporary.is_dir() else os.link)(temporary, path)
    except OSError as error:
        if error.errno in NO_LINK and not path.exists():
            temporary.rename(path)
        elif error.errno not in (errno.EEXIST, errno.ENOTEMPTY, *NO_LINK):
            raise
        # if it is: NFS lost the reply to the first attempt and repeated it
        elif not is_same_file(temporary, path):
            raise TakenError(path) from None
    faults.point("linked", path)
    temporary.unlink(missing_ok=True)


def is_same_file(path: Path, other: Path) -> bool:
    """Returns whether two names belong to the same file; False if one is gone meanwhile."""
    try:
        return path.samefile(other)
    except FileNotFoundError:
        return False


def end_of_last_line(file: IO[bytes]) -> int:
    """Returns the offset after the last complete line of a file."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - PIECE_BYTES)
        file.seek(start)
        if (last := file.read(end - start).rfind(b"\n")) >= 0:
            return start + last + 1
        end = start
    return 0


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Returns the files of a folder with this suffix, sorted; empty if there is no folder.
    Raises PermissionError, unlike `glob`."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(suffix))
    except (FileNotFoundError, NotADirectoryError):
        return []


class LineReader:
    """Follows a file to which other processes append lines."""

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset

    def skip(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            self.offset = end_of_last_line(file)

    def new(self) -> list[bytes]:
        """Returns the lines completed since the last call, at most PIECE_BYTES unless a single
        one is longer; empty if there is no file. Skips lines longer than MAX_LINE_BYTES."""
        if not self.path.exists():
            return []
        if not self.path.is_file():  # reading a pipe or device might never end
            raise OSError(errno.EISDIR, "not a file", str(self.path))
        with self.path.open("rb") as file:
            # a repair may have cut the file
            self.offset = min(self.offset, os.fstat(file.fileno()).st_size)
            file.seek(self.offset)
            data = piece = file.read(PIECE_BYTES)
            while piece and b"\n" not in data and len(data) <= MAX_LINE_BYTES:
                data += (piece := file.read(PIECE_BYTES))
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE_BYTES:
            end = len(data)
        self.offset += end
        return data[:end].splitlines()

    def all(self) -> Iterator[bytes]:
        """Yields the new lines, reading piece by piece: a long run has a gigabyte of them."""
        while lines := self.new():
            yield from lines

    def decoded(self, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
        """Yields what the new lines hold. Skips damaged ones, such as the one during which the
        writer was killed."""
        for line in self.all():
            with contextlib.suppress(*UNREADABLE):
                yield decoder.decode(line)


def append_file(path: Path, data: Data) -> None:
    """Appends `data` durably. An error leaves the file unchanged; a killed process may leave
    part of `data`, which readers must detect."""
    new = not path.exists()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                write_all(fd, data, path)
                faults.point("fsync", path)
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
    faults.point("done", path)


def write_directory(
    path: Path,
    fill: Callable[[Path], None],
    *,
    new: bool = False,
    fence: Fence = None,
    durable: bool = True,
) -> None:
    """Calls `fill` with a temporary directory and renames that to `path`, replacing an older one. A
    failure leaves nothing behind.

    new, fence, durable: see `write_file`.
    """
    make_directory(path.parent)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        faults.point("fill", path)
        fill(temporary)
        commit_directory(temporary, path, new=new, fence=fence, durable=durable)
    except (OSError, RunError):
        if fence:
            fence()
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit_directory(
    temporary: Path, path: Path, *, new: bool = False, fence: Fence = None, durable: bool = True
) -> None:
    """Fsyncs `temporary` with all its files and renames it to `path`. An older `path` is replaced
    in two steps; after a kill in between, `clean_leftovers` restores one that has a number, and
    `restore` others.

    new, fence, durable: see `write_file`.
    """
    share(temporary)
    if durable:
        fsync_tree(temporary, path)
    if fence:
        fence()
    faults.point("rename", path)
    if new or not path.exists():
        give_name(temporary, path)
    else:
        old = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        try:
            faults.point("replaced", path)
            temporary.rename(path)
        except OSError:
            old.rename(path)
            raise
        old.rename(temporary)
    if durable:
        fsync_name(path)
    shutil.rmtree(temporary, ignore_errors=True)  # the replaced directory


def fsync_tree(tree: Path, path: Path) -> None:
    """Fsyncs a file, or a directory with its contents. path: the name that it has or will have."""
    for file in [*tree.rglob("*"), tree]:
        faults.point("fsync", path)
        fsync_path(file)


def fsync_name(path: Path) -> None:
    """Fsyncs the directory that contains `path`, the last step of every write."""
    faults.point("fsync_dir", path)
    fsync_path(path.parent)
    faults.point("done", path)


def make_durable(path: Path) -> None:
    """Does the fsyncs that `write_file` and `write_directory` skip without `durable`. After it
    returns, `path` survives a power cut."""
    fsync_tree(path, path)
    fsync_name(path)


def share(folder: Path) -> None:
    """Gives files the permissions that the umask gave the folder: safetensors writes files for
    the owner alone. Does not touch links."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        status = file.lstat()
        is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if is_own and stat.S_IMODE(status.st_mode) != mode:
            with contextlib.suppress(PermissionError):  # a file system without permissions
                file.chmod(mode)


def remove_directory(path: Path) -> None:
    """Deletes a directory so that a half-deleted one is never found under its final name."""
    faults.point("remove", path)
    with contextlib.suppress(FileNotFoundError):
        doomed = set_aside(path)
        faults.point("removed", path)
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Takes the name from what is to be deleted, and returns the temporary one that it has then."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    return path.rename(doomed)


def move(path: Path, target: Path) -> None:
    """Moves a file or directory, by copying if the target is on another file system; it loses
    its old name before it is copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(set_aside(path), target)


def link_tree(source: Path, target: Path) -> None:
    """Replicates at `target` a file or directory whose files never change: with hard links, or
    copies if links are not supported."""
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


def restore(old: Path) -> None:
    """Gives a directory back the name that a death has taken from it while it was replaced; deletes
    it if its replacement has the name."""
    path = old.with_name(old.name[1:].removesuffix(".replaced"))
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(path)


def clean_leftovers(*directories: Path, ours: str | None = None) -> list[Path]:
    """Removes the unfinished files of dead processes, and returns their paths.

    Whether a process is dead is only known on this host and in this pid namespace. ours: names that
    begin with it ("": all) are only written by the holder of a role, which is now this process, so
    that leftovers of other hosts can be removed, too.
    """
    removed = []
    for directory in filter(Path.is_dir, directories):
        for name in sorted(os.listdir(directory)):
            # the first letter first: a long run has many files, few of them hidden
            if name[0] != "." or not (match := LEFTOVER.fullmatch(name)):
                continue
            if match["place"] == pid_scope():
                is_known_dead = not process_table.entry(int(match["pid"]))
            else:
                is_known_dead = ours is not None and name.startswith(f".{ours}")
            if not is_known_dead:
                continue
            path = directory / name
            with contextlib.suppress(PermissionError):  # another user's, in a folder of all
                if match["kind"] == "replaced":
                    restore(path)
                elif path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def encode_record(payload: bytes) -> bytes:
    """Returns a payload with a header that has its length and checksum."""
    return HEADER.pack(MAGIC, len(payload), blake2b(payload)) + payload


def head_of_record(head: bytes | bytearray | memoryview, name: str) -> tuple[int, bytes]:
    """Returns (length, checksum) of the payload after the header of a record. Raises
    CorruptFileError."""
    if len(head) < HEADER.size:
        raise CorruptFileError(f"{name}: cut short, {len(head)} bytes are left")
    magic, length, checksum = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise CorruptFileError(f"{name}: does not begin with a record header")
    return length, checksum


def decode_records(data: D, name: str) -> Iterator[D]:
    """Yields the payloads of the records in `data`. Raises CorruptFileError at the first one
    that is damaged or cut short."""
    offset = 0
    while offset < len(data):
        where = f"{name}: damaged record at byte {offset}"
        begin = offset + HEADER.size
        length, checksum = head_of_record(data[offset:begin], where)
        payload = data[begin : begin + length]
        if len(payload) != length or blake2b(payload) != checksum:
            raise CorruptFileError(f"{where} (magic, length or checksum does not match)")
        yield payload
        offset = begin + length


def decode_record(data: D, name: str) -> D:
    """Returns the payload of data that holds exactly one record. Raises CorruptFileError."""
    payloads = list(decode_records(data, name))
    if len(payloads) != 1:
        raise CorruptFileError(f"{name}: holds {len(payloads)} records instead of one")
    return payloads[0]
