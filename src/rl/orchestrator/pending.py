"""`batches/pending.log`: finished groups that no batch has used yet, so that an orchestrator's death costs no finished rollout."""

import os
from pathlib import Path

import msgspec

from rl.files import CorruptFileError, decode_records, encode_record, write_file
from rl.orchestrator.rollouts import Group

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Group)


class PendingLog:
    """Groups in the order in which they finished. Each is whole or not there."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []

    def load(self, settled: set[int]) -> list[str]:
        """Reads what is not settled by a batch. A damaged tail is cut off; returns a remark on each thing that was lost."""
        remarks = []
        try:
            for payload in decode_records(self.path.read_bytes() if self.path.exists() else b"", str(self.path)):
                group = DECODER.decode(payload)
                if group.group_id not in settled:
                    self.groups.append(group)
        except (CorruptFileError, msgspec.DecodeError) as error:
            remarks.append(f"{error}; what follows is sampled again")
        self.rewrite(self.groups)
        return remarks

    def append(self, groups: list[Group]) -> None:
        """Adds finished groups durably."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with open(fd, "ab", closefd=False) as file:  # a plain os.write may write a part
                file.write(b"".join(encode_record(ENCODER.encode(group)) for group in groups))
            os.fsync(fd)
        finally:
            os.close(fd)
        self.groups.extend(groups)

    def rewrite(self, groups: list[Group]) -> None:
        """Keeps only `groups`: called after a batch has settled the others."""
        write_file(self.path, b"".join(encode_record(ENCODER.encode(group)) for group in groups))
        self.groups = list(groups)
