"""Files of `batches/`: the data a step trains on, and the orchestrator's state after it. Renaming a
batch file into place is the commit.

Also files of `rollouts/`: the rollouts as readable text, gzipped when old, each with its SHA-256 in
a file for `sha256sum --check`.
"""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rl.run_dir.files import (
    HEADER,
    MAGIC,
    UNREADABLE,
    CorruptFileError,
    Data,
    blake2b,
    decode_record,
    head_of_record,
    reading,
    sha256,
    write_file,
)
from rl.run_dir.paths import RunDir, numbers
from rl.system.errors import RESTART, RunError
from rl.wire.messages import BatchReady, TrainBatch

ENCODER = msgspec.msgpack.Encoder()
ROLLOUT_SUFFIXES = (".jsonl", ".jsonl.gz", ".sha256")
"""Suffixes of the files with a step's rollouts: plain, compressed, and the checksum."""
PLAIN_STEPS = 100
"""The rollouts of this many newest steps are plain text; older ones are compressed."""
MAX_ROLLOUTS_BYTES = 1 << 28
"""Maximum bytes of a step's text that is read at once: 1,000 rollouts of 32,000 tokens have half
of that, and gzip may hide any size."""
COMPRESSION = 3
"""gzip level: conversations shrink to a fifth, at 100 MiB/s per core."""


class BatchFile(msgspec.Struct, kw_only=True):
    """The content of `batches/000012.batch`. The orchestrator's state is an opaque msgpack value
    here."""

    batch: TrainBatch
    state: msgspec.Raw


def encode_batch(batch: TrainBatch, state: Any) -> bytearray:
    """Returns the bytes of a batch file: one checksummed record."""
    record = bytearray(HEADER.size)
    ENCODER.encode_into({"batch": batch, "state": state}, record, HEADER.size)
    payload = memoryview(record)[HEADER.size :]
    HEADER.pack_into(record, 0, MAGIC, len(payload), blake2b(payload))
    return record


def decode_batch(data: bytes, name: str) -> BatchFile:
    """Decodes the bytes of a batch file. Raises CorruptFileError, naming the file, if it is
    damaged or has another schema."""
    try:
        return msgspec.msgpack.decode(decode_record(data, name), type=BatchFile)
    except UNREADABLE as error:
        raise CorruptFileError(f"{name}: not a batch of this version of rl: {error}") from None


def batch_of(step: int, data: bytes, name: str) -> TrainBatch:
    """Returns the batch in the bytes of a file. Raises CorruptFileError, and RunError if it is
    another step's, or has nothing to train on."""
    batch = decode_batch(data, name).batch
    if batch.step != step:
        raise RunError(
            f"{name}: is batch {batch.step}, not {step}: do two runs share this directory?", RESTART
        )
    if not batch.num_loss_tokens:
        raise RunError(f"{name}: has no token to train on", RESTART)
    return batch


def write_batch(
    path: Path, batch: TrainBatch, state: Any, fence: Callable[[], None] | None = None
) -> None:
    """Commits a batch. Raises TakenError if the step already has one, and what `fence` raises,
    see write_file."""
    write_file(path, encode_batch(batch, state), new=True, fence=fence)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a batch file. Raises CorruptFileError if it is missing."""
    try:
        with reading(path), path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing") from None


def sound_batch(path: Path) -> bytes:
    """Returns the bytes of a batch file after verifying its checksum. Raises CorruptFileError if
    it is damaged or missing."""
    with opened(path) as file:
        data = file.read()
    decode_record(memoryview(data), str(path))  # a view, because slices of it are not copies
    return data


def batch_head(path: Path) -> BatchReady:
    """Returns size and checksum of a batch file, from its header alone. Raises CorruptFileError
    if it is missing or has the wrong size."""
    with opened(path) as file:
        length, checksum = head_of_record(file.read(HEADER.size), str(path))
        size = os.fstat(file.fileno()).st_size
    if size != HEADER.size + length:
        raise CorruptFileError(f"{path}: has {size} bytes, its header says {HEADER.size + length}")
    return BatchReady(size, checksum)


def is_batch(data: bytes, ready: BatchReady) -> bool:
    """Whether these are the bytes of the file that `ready` announces."""
    return (
        len(data) == ready.size
        and data[: HEADER.size].endswith(ready.checksum)
        and blake2b(memoryview(data)[HEADER.size :]) == ready.checksum
    )


def write_rollouts(path: Path, data: Data, fence: Callable[[], None] | None = None) -> None:
    """Writes a step's rollouts and their checksum. fence: see write_file."""
    write_file(path, data, fence=fence)
    write_file(sum_path(path), f"{sha256(data)}  {path.name}\n".encode(), fence=fence)


def sum_path(path: Path) -> Path:
    """Returns the path of a rollout file's checksum, which is of the uncompressed text."""
    return path.with_name(f"{path.name.split('.')[0]}.sha256")


@contextmanager
def open_rollouts(path: Path) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Opens a file of rollouts, compressed or not. Raises CorruptFileError for invalid gzip."""
    try:
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptFileError(
            f"{path}: damaged ({error}); move it away to continue without it"
        ) from None


def compress_rollouts(path: Path) -> None:
    """Replaces `000012.jsonl` by `000012.jsonl.gz`. Raises CorruptFileError and leaves the file
    if its checksum does not match."""
    check_rollouts(path)
    data = gzip.compress(path.read_bytes(), COMPRESSION, mtime=0)
    write_file(path.with_name(f"{path.name}.gz"), data)
    path.unlink()


def check_rollouts(path: Path) -> None:
    """Raises CorruptFileError if a file of rollouts does not match its checksum, or is invalid
    gzip. A missing checksum is no error."""
    expected = expected_sum(path)
    if expected or path.suffix == ".gz":
        with open_rollouts(path) as file:
            check_sum(path, expected, hashlib.file_digest(file, "sha256").hexdigest())


def check_given(path: Path) -> None:
    """Raises RunError for a damaged file of another run's rollouts, which is data here: no
    repair of this run mends it."""
    try:
        if path.parent.name == "rollouts":
            check_rollouts(path)
    except CorruptFileError as error:
        raise RunError(str(error)) from None


def sound_rollouts(path: Path) -> bytes:
    """Returns the text of a file of rollouts, verifying its checksum if there is one. Raises
    CorruptFileError or FileNotFoundError."""
    with open_rollouts(path) as file:
        data = file.read(MAX_ROLLOUTS_BYTES + 1)
    if len(data) > MAX_ROLLOUTS_BYTES:
        raise CorruptFileError(
            f"{path}: its text is longer than {MAX_ROLLOUTS_BYTES:,} bytes; `rl show {path}` "
            "reads it line by line"
        )
    if expected := expected_sum(path):
        check_sum(path, expected, sha256(data))
    return data


def expected_sum(path: Path) -> str:
    """Returns the checksum of a file of rollouts; "" if there is none. Raises CorruptFileError."""
    try:
        with reading(sum_path(path)):
            return sum_path(path).read_bytes()[:64].decode(errors="replace")
    except FileNotFoundError:
        return ""


def check_sum(path: Path, expected: str, actual: str) -> None:
    """Raises CorruptFileError if the checksum of a file is another one than `expected`, if that
    is known."""
    if expected not in ("", actual):
        raise CorruptFileError(
            f"{path}: damaged, its checksum does not match; move it and {sum_path(path).name} away "
            "to continue without it"
        )


def remove_rollouts(run_dir: RunDir, *, after: int) -> None:
    """Deletes rollouts of batches that were never committed: they are still in pending.log, and
    go into another batch."""
    for suffix in ROLLOUT_SUFFIXES:
        for number in numbers(run_dir.rollouts_dir, suffix):
            if number > after:
                (run_dir.rollouts_dir / f"{number:06d}{suffix}").unlink(missing_ok=True)
