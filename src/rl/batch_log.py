"""`batches/`: what each step trains on and the orchestrator's state after it. The rename of a batch file is the commit."""

from pathlib import Path
from typing import Any

import msgspec

from rl.files import CorruptFileError, decode_record, encode_record, write_file
from rl.messages import TrainBatch


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
    except msgspec.DecodeError as error:
        raise CorruptFileError(f"{name}: not a batch of this version of rl: {error}") from None


def write_batch(path: Path, batch: TrainBatch, state: Any) -> bytes:
    """Commits a batch; returns the bytes that stand in the file."""
    data = encode_batch(batch, state)
    write_file(path, data)
    return data
