"""Files of `batches/`: what a step trains on, and the orchestrator's state after it. The rename of a batch file is the commit.

And of `rollouts/`: the same as readable text, each file with its SHA-256 beside it, as `sha256sum --check` reads it; old ones as gzip.
"""

import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from rl.run_dir.files import HEADER, MAGIC, CorruptFileError, decode_record, head_of_record, reading, write_file
from rl.run_dir.hashes import blake2b, sha256
from rl.run_dir.paths import RunDir, numbers
from rl.wire.messages import PART_BYTES, UNREADABLE, BatchReady, TrainBatch

ENCODER = msgspec.msgpack.Encoder()
PIECE = 1 << 22
"""Bytes that are copied in a few milliseconds."""
NO_SAMPLES = b"\xa7samples\x90"
"""The field of a batch without samples, in msgpack."""
ROLLOUT_SUFFIXES = (".jsonl", ".jsonl.gz", ".sha256")
"""Of the files with a step's rollouts: readable, or compressed; and their checksum."""
PLAIN_STEPS = 100
"""The rollouts of so many newest steps are plain text, those before are compressed."""
COMPRESSION = 3
"""Level of gzip: conversations shrink to a fifth, at 100 MiB a second of a core."""


class BatchFile(msgspec.Struct, kw_only=True):
    """Content of `batches/000012.batch`. The orchestrator's state is an opaque msgpack value here."""

    batch: TrainBatch
    state: msgspec.Raw


def encode_batch(batch: TrainBatch, state: Any) -> bytearray:
    """The bytes of a batch file: one checksummed record."""
    return encode_samples(batch.step, [ENCODER.encode(sample) for sample in batch.samples], state)


def encode_samples(step: int, samples: Sequence[bytes], state: Any) -> bytearray:
    """The same from samples that are encoded already, each by itself.

    No call within it holds the interpreter for long, so that a thread can do it beside an event loop.
    """
    empty = BatchFile(batch=TrainBatch(step=step, samples=[]), state=msgspec.Raw(ENCODER.encode(state)))
    head, key, tail = ENCODER.encode(empty).partition(NO_SAMPLES)
    length = ENCODER.encode([None] * len(samples))[: -len(samples) or None]
    record = joined([bytes(HEADER.size), head, key[:-1], length, *samples, tail])
    payload = memoryview(record)[HEADER.size :]
    HEADER.pack_into(record, 0, MAGIC, len(payload), blake2b(payload))
    return record


def joined(parts: Sequence[bytes]) -> bytearray:
    """The parts one behind the other, copied piece by piece: `b"".join` would hold the interpreter while it copies all of them."""
    data, offset = bytearray(sum(map(len, parts))), 0
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(part), PIECE):
            piece = view[start : start + PIECE]
            data[offset : offset + len(piece)] = piece
            offset += len(piece)
    return data


def decode_batch(data: bytes, name: str) -> BatchFile:
    """Decodes the bytes of a batch file. Raises CorruptFileError, naming the file, for damage and for a content of another shape."""
    try:
        return msgspec.msgpack.decode(decode_record(data, name), type=BatchFile)
    except UNREADABLE as error:
        raise CorruptFileError(f"{name}: not a batch of this version of rl: {error}") from None


def write_batch(path: Path, batch: TrainBatch, state: Any, fence: Callable[[], None] | None = None) -> None:
    """Commits a batch. Raises TakenError if there is one of that step, and what `fence` raises, see write_file."""
    write_file(path, encode_batch(batch, state), new=True, fence=fence)


def sound_batch(path: Path) -> bytes:
    """The bytes of a batch file, its checksum verified. Raises CorruptFileError when it is damaged or missing."""
    try:
        with reading(path):
            data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing") from None
    decode_record(memoryview(data), str(path))  # a view, of which parts are no copies
    return data


def batch_head(path: Path) -> BatchReady:
    """Size and checksum of a batch's file, by its head alone. Raises CorruptFileError for one that is missing or cannot be whole."""
    try:
        with reading(path), path.open("rb") as file:
            head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing") from None
    length, checksum = head_of_record(head, str(path))
    if size != HEADER.size + length:
        raise CorruptFileError(f"{path}: has {size} bytes, its head says {HEADER.size + length}")
    return BatchReady(size, checksum)


def is_batch(data: bytes, ready: BatchReady) -> bool:
    """Whether these are the bytes of the file that `ready` tells of."""
    return (
        len(data) == ready.size
        and data[: HEADER.size].endswith(ready.checksum)
        and blake2b(memoryview(data)[HEADER.size :]) == ready.checksum
    )


def batch_part(path: Path, offset: int) -> bytes:
    """At most PART_BYTES of a batch's file from `offset` on. Raises CorruptFileError."""
    try:
        with reading(path), path.open("rb") as file:
            file.seek(offset)
            return file.read(PART_BYTES)
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing") from None


def write_rollouts(path: Path, data: bytes, fence: Callable[[], None] | None = None) -> None:
    """Writes a step's rollouts and their checksum. fence: see write_file."""
    write_file(path, data, fence=fence)
    write_file(sum_path(path), f"{sha256(data)}  {path.name}\n".encode(), fence=fence)


def sum_path(path: Path) -> Path:
    """The file with the checksum of a file of rollouts, which is that of its text where the file is compressed."""
    return path.with_name(f"{path.name.split('.')[0]}.sha256")


def open_rollouts(path: Path) -> IO[bytes]:
    """The lines of a file of rollouts, compressed or not. To be checked first: what is no gzip raises errors of many kinds."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def compress_rollouts(path: Path) -> None:
    """Replaces `000012.jsonl` by `000012.jsonl.gz`. Raises CorruptFileError for one that is not what was written, and leaves it."""
    check_rollouts(path)
    write_file(path.with_name(f"{path.name}.gz"), gzip.compress(path.read_bytes(), COMPRESSION, mtime=0))
    path.unlink()


def check_rollouts(path: Path) -> None:
    """Raises CorruptFileError unless a file of rollouts is what was written. One without a checksum beside it passes."""

    def digest() -> str:
        try:
            with reading(path), open_rollouts(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CorruptFileError(damaged_gzip(path, error)) from None

    if not check_sum(path, digest) and path.suffix == ".gz":
        digest()


def check_sum(path: Path, digest: Callable[[], str]) -> bool:
    """Whether a file of rollouts has a checksum beside it. Raises CorruptFileError if `digest`, of its text, is another."""
    try:
        with reading(sum_path(path)):
            expected = sum_path(path).read_bytes()[:64]
    except FileNotFoundError:
        return False
    if expected and re.fullmatch(rb"[0-9a-f]{64}", expected) is None:
        raise CorruptFileError(f"{sum_path(path)}: damaged; delete it to believe {path.name} as it is")
    if expected and digest().encode() != expected:
        raise CorruptFileError(f"{path}: damaged, its checksum does not fit; move it away to go on without it")
    return bool(expected)


def damaged_gzip(path: Path, error: Exception) -> str:
    """What is said of a compressed file that cannot be read."""
    return f"{path}: damaged ({error}); move it away to go on without it"


def sound_rollouts(path: Path) -> bytes:
    """The text of a file of rollouts, its checksum verified where it has one. Raises CorruptFileError, or FileNotFoundError."""
    try:
        with reading(path):
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptFileError(damaged_gzip(path, error)) from None
    check_sum(path, lambda: sha256(data))
    return data


def remove_rollouts(run_dir: RunDir, *, after: int) -> None:
    """Deletes rollouts of batches that were never committed: they are in pending.log, and come again."""
    for suffix in ROLLOUT_SUFFIXES:
        for number in numbers(run_dir.rollouts_dir, suffix):
            if number > after:
                (run_dir.rollouts_dir / f"{number:06d}{suffix}").unlink(missing_ok=True)
