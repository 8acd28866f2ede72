"""`batches/`: what each step trains on and the orchestrator's state after it. The rename of a batch file is the commit.

`rollouts/`: the same in words, each file with its SHA-256 beside it, as `sha256sum --check` reads it.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from rl.files import CorruptFileError, decode_record, encode_record, reading, write_file
from rl.messages import TrainBatch
from rl.run_dir import RunDir, numbered


class BatchFile(msgspec.Struct, kw_only=True):
    """Content of `batches/000012.batch`. The state is the orchestrator's own business: an opaque msgpack value here."""

    batch: TrainBatch
    state: msgspec.Raw


ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(BatchFile)


def encode_batch(batch: TrainBatch, state: Any) -> bytes:
    """The bytes of a batch file: one checksummed record."""
    return encode_record(ENCODER.encode(BatchFile(batch=batch, state=msgspec.Raw(ENCODER.encode(state)))))


def decode_batch(data: bytes, name: str) -> BatchFile:
    """Checks and decodes. Raises CorruptFileError, naming the file, for damage and for a content of another shape."""
    try:
        return DECODER.decode(decode_record(data, name))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFileError(f"{name}: not a batch of this version of rl: {error}") from None


def write_batch(path: Path, batch: TrainBatch, state: Any) -> bytes:
    """Commits a batch; returns the bytes that stand in the file."""
    data = encode_batch(batch, state)
    write_file(path, data)
    return data


def sound_batch(path: Path) -> bytes:
    """The bytes of a batch file that holds what was written. Raises CorruptFileError when it does not, or is not there."""
    try:
        with reading(path):
            data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing") from None
    decode_record(data, str(path))
    return data


def write_rollouts(path: Path, data: bytes) -> None:
    """Writes a step's rollouts and their checksum."""
    write_file(path, data)
    write_file(sum_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())


def sum_path(path: Path) -> Path:
    """Where the checksum of a file of rollouts stands."""
    return path.with_suffix(".sha256")


def check_rollouts(path: Path) -> None:
    """Raises CorruptFileError unless a file of rollouts is what was written. One without a checksum beside it is believed."""
    try:
        with reading(sum_path(path)):
            expected = sum_path(path).read_bytes()[:64]
    except FileNotFoundError:
        return
    if re.fullmatch(rb"[0-9a-f]{64}", expected) is None:
        raise CorruptFileError(f"{sum_path(path)}: damaged; delete it to believe {path.name} as it is")
    with reading(path):
        found = hashlib.sha256(path.read_bytes()).hexdigest().encode()
    if found != expected:
        raise CorruptFileError(f"{path}: damaged, its checksum does not fit; move it away to go on without it")


def remove_rollouts(run_dir: RunDir, *, after: int) -> None:
    """Deletes rollouts of batches that were never committed: they are in pending.log, and come again."""
    for path in (run_dir.rollouts(after), sum_path(run_dir.rollouts(after))):
        for number, written in numbered(path.parent, path.suffix).items():
            if number > after:
                written.unlink()
