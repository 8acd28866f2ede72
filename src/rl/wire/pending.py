"""The records of `batches/pending.log`: finished rollouts that no batch has settled yet, and the
tasks that were drawn since the newest batch."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rl.run_dir.files import (
    HEADER,
    MAGIC,
    UNREADABLE,
    CorruptFileError,
    decode_records,
    encode_record,
    reading,
)
from rl.wire.rollouts import Drawn, Group, rollout_lines

ENCODER = msgspec.msgpack.Encoder()
GROUP, DRAWN = msgspec.msgpack.Decoder(Group), msgspec.msgpack.Decoder(Drawn)
ARRAY_OF_4 = b"\x94"
"""The first byte of a Drawn in msgpack; any other record begins with that of a map."""


def decode(payload: bytes) -> Group | Drawn:
    """Decodes a record. Raises the exceptions in UNREADABLE."""
    return DRAWN.decode(payload) if payload[:1] == ARRAY_OF_4 else GROUP.decode(payload)


def encoded(records: Iterable[Group | Drawn]) -> bytes:
    return b"".join(encode_record(ENCODER.encode(record)) for record in records)


def read_records(path: Path) -> tuple[list[Group | Drawn], list[str]]:
    """Returns the records of a log, and a warning for each damaged place: a write cut short at
    the end, or damage by a failing disk."""
    records: list[Group | Drawn] = []
    warnings: list[str] = []
    data, offset = b"", 0
    try:
        with reading(path):
            data = path.read_bytes() if path.exists() else b""
    except CorruptFileError as error:
        warnings.append(f"{error}; rollouts there are sampled again")
    while offset < len(data):
        try:
            for payload in decode_records(data[offset:], f"{path} from byte {offset}"):
                records.append(decode(payload))
                offset += HEADER.size + len(payload)
        except (CorruptFileError, *UNREADABLE) as error:
            following = data.find(MAGIC, offset + 1)
            offset = following if following > 0 else len(data)
            warnings.append(f"{error}; rollouts there are sampled again")
    return records, warnings


def waiting_lines(path: Path) -> bytes:
    """Returns the rollouts of the finished groups in a log in the form of rollouts/*.jsonl."""
    records, _ = read_records(path)
    return rollout_lines(
        [record for record in records if isinstance(record, Group) and record.finished], None
    )
