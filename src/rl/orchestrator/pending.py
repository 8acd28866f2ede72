"""`batches/pending.log`: finished groups that no batch has used yet, so that an orchestrator's death costs no finished rollout."""

from pathlib import Path

import msgspec

from rl.files import HEADER, MAGIC, CorruptFileError, append_file, decode_records, encode_record, reading, write_file
from rl.orchestrator.rollouts import Group

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Group)


def read_groups(path: Path) -> tuple[list[Group], list[str]]:
    """The groups of a log, and a remark on each place that is damaged: by a death within a write, at its end, or by a failing disk."""
    groups: list[Group] = []
    remarks: list[str] = []
    data, offset = b"", 0
    try:
        with reading(path):
            data = path.read_bytes() if path.exists() else b""
    except CorruptFileError as error:
        remarks.append(f"{error}; what was there is sampled again")
    while offset < len(data):
        try:
            for payload in decode_records(data[offset:], f"{path} from byte {offset}"):
                groups.append(DECODER.decode(payload))
                offset += HEADER.size + len(payload)
        except (CorruptFileError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            following = data.find(MAGIC, offset + 1)
            offset = following if following > 0 else len(data)
            remarks.append(f"{error}; what was there is sampled again")
    return groups, remarks


class PendingLog:
    """Groups in the order in which they finished. Each is whole or not there."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []

    def load(self, settled: set[int], newest: int) -> list[str]:
        """Reads what is not settled by a batch. What is damaged, or sampled by versions after `newest`, the newest batch's, is left out.

        Returns a remark on each such thing. There are such versions no more when the run was taken back.
        """
        groups, remarks = read_groups(self.path)
        unsettled = {group.group_id: group for group in groups if group.group_id not in settled}
        kept = [group for group in unsettled.values() if group.newest_version <= newest]
        if dropped := len(unsettled) - len(kept):
            remarks.append(f"{dropped} finished groups are dropped: versions after {newest}, which were taken back, sampled them")
        self.rewrite(kept)
        return remarks

    def append(self, groups: list[Group]) -> None:
        """Adds finished groups durably."""
        append_file(self.path, b"".join(encode_record(ENCODER.encode(group)) for group in groups))
        self.groups.extend(groups)

    def rewrite(self, groups: list[Group]) -> None:
        """Keeps only `groups`: called after a batch has settled the others."""
        write_file(self.path, b"".join(encode_record(ENCODER.encode(group)) for group in groups))
        self.groups = list(groups)
