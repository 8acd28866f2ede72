"""Files of `batches/`: what a step trains on, and the orchestrator's state after it. The rename of a batch file is the commit.

And of `rollouts/`: the same as readable text, each file with its SHA-256 beside it, as `sha256sum --check` reads it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rl.run_dir.files import CorruptFileError, decode_record, encode_record, reading, write_file
from rl.run_dir.hashes import sha256, sha256_of_file
from rl.run_dir.paths import RunDir, numbered
from rl.wire.messages import UNREADABLE, TrainBatch

ENCODER = msgspec.msgpack.Encoder()


class BatchFile(msgspec.Struct, kw_only=True):
    """Content of `batches/000012.batch`. The orchestrator's state is an opaque msgpack value here."""

    batch: TrainBatch
    state: msgspec.Raw


def encode_batch(batch: TrainBatch, state: Any) -> bytes:
    """The bytes of a batch file: one checksummed record."""
    return encode_record(ENCODER.encode(BatchFile(batch=batch, state=msgspec.Raw(ENCODER.encode(state)))))


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
    decode_record(data, str(path))
    return data


def write_rollouts(path: Path, data: bytes, fence: Callable[[], None] | None = None) -> None:
    """Writes a step's rollouts and their checksum. fence: see write_file."""
    write_file(path, data, fence=fence)
    write_file(sum_path(path), f"{sha256(data)}  {path.name}\n".encode(), fence=fence)


def sum_path(path: Path) -> Path:
    """The file with the checksum of a file of rollouts."""
    return path.with_suffix(".sha256")


def check_rollouts(path: Path) -> None:
    """Raises CorruptFileError unless a file of rollouts is what was written. One without a checksum beside it passes."""
    try:
        with reading(sum_path(path)):
            expected = sum_path(path).read_bytes()[:64]
    except FileNotFoundError:
        return
    if re.fullmatch(rb"[0-9a-f]{64}", expected) is None:
        raise CorruptFileError(f"{sum_path(path)}: damaged; delete it to believe {path.name} as it is")
    with reading(path):
        found = sha256_of_file(path).encode()
    if found != expected:
        raise CorruptFileError(f"{path}: damaged, its checksum does not fit; move it away to go on without it")


def remove_rollouts(run_dir: RunDir, *, after: int) -> None:
    """Deletes rollouts of batches that were never committed: they are in pending.log, and come again."""
    for suffix in (".jsonl", ".sha256"):
        for number, path in numbered(run_dir.rollouts_dir, suffix).items():
            if number > after:
                path.unlink(missing_ok=True)
