"""Durable files: atomic writes, and records with a checksum. The only place that fsyncs and renames."""

import contextlib
import hashlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

MAGIC = b"rl1\n"
HEADER = struct.Struct("<4sQ16s")
"""Magic, payload length in bytes, BLAKE2b-128 of the payload."""


class CorruptFileError(Exception):
    """A file of the run directory does not hold what was written; the message names the file and the remedy."""


def fsync_dir(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` so that `path` either has all of it or is as before, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None  # a full disk's error names no file
    fsync_dir(path.parent)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets `fill` write into a temporary directory and renames that to `path`; an older `path` is replaced. Nothing stays of a failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        commit_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def commit_directory(temporary: Path, path: Path) -> None:
    """Fsyncs everything below `temporary` and renames it to `path`; an older `path` is replaced."""
    for file in temporary.rglob("*"):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(path)
    fsync_dir(path.parent)


def remove_directory(path: Path) -> None:
    """Deletes a directory so that a half-deleted one never stands under its final name."""
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


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
