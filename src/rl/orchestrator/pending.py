"""Finished groups that no batch has used yet: `batches/pending.log`, so that an orchestrator's death costs no finished rollout, and
`rollouts/pending.jsonl`, the same for people."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rl.orchestrator.batches import rollout_lines
from rl.orchestrator.judge import Rules
from rl.run_dir.files import (
    HEADER,
    MAGIC,
    CorruptFileError,
    append_file,
    decode_records,
    encode_record,
    reading,
    with_path,
    write_all,
    write_file,
)
from rl.wire.messages import UNREADABLE
from rl.wire.rollouts import Group

ENCODER = msgspec.msgpack.Encoder()
DECODER = msgspec.msgpack.Decoder(Group)


def read_groups(path: Path) -> tuple[list[Group], list[str]]:
    """The groups of a log, and a warning for each place that is damaged: by a death within a write, at its end, or by a failing disk."""
    groups: list[Group] = []
    warnings: list[str] = []
    data, offset = b"", 0
    try:
        with reading(path):
            data = path.read_bytes() if path.exists() else b""
    except CorruptFileError as error:
        warnings.append(f"{error}; what was there is sampled again")
    while offset < len(data):
        try:
            for payload in decode_records(data[offset:], f"{path} from byte {offset}"):
                groups.append(DECODER.decode(payload))
                offset += HEADER.size + len(payload)
        except (CorruptFileError, *UNREADABLE) as error:
            following = data.find(MAGIC, offset + 1)
            offset = following if following > 0 else len(data)
            warnings.append(f"{error}; what was there is sampled again")
    return groups, warnings


class PendingLog:
    """Groups in the order in which they finished. Each is whole or not there."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []

    def load(self, settled: set[int], newest: int) -> list[str]:
        """Reads the groups that no batch has settled, without damaged ones and those that versions after `newest` sampled.

        newest: the newest batch; later versions are gone when the run was taken back. Returns a warning for each thing that is left out.
        """
        groups, warnings = read_groups(self.path)
        unsettled = {group.group_id: group for group in groups if group.group_id not in settled}
        kept = [group for group in unsettled.values() if max(group.versions, default=0) <= newest]
        if dropped := len(unsettled) - len(kept):
            warnings.append(f"{dropped} finished groups are dropped: versions after {newest}, which were taken back, sampled them")
        self.rewrite(kept)
        return warnings

    def append(self, groups: list[Group]) -> None:
        """Adds finished groups durably."""
        append_file(self.path, b"".join(encode_record(ENCODER.encode(group)) for group in groups))
        self.groups.extend(groups)

    def rewrite(self, groups: list[Group]) -> None:
        """Keeps only `groups`: called after a batch has settled the others."""
        write_file(self.path, b"".join(encode_record(ENCODER.encode(group)) for group in groups))
        self.groups = list(groups)


class PendingRollouts:
    """The rollouts of the groups in pending.log as readable text. It follows from that log, and is made anew at every start and commit: so
    an append need not reach the disk before anything else happens, and half a line of a killed process lasts until the next start."""

    def __init__(self, path: Path, rules: Mapping[str, Rules]):
        self.path, self.rules = path, rules
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, groups: Iterable[Group]) -> None:
        """Adds finished groups."""
        try:
            with self.path.open("ab", buffering=0) as file:
                write_all(file.fileno(), rollout_lines(groups, None, self.rules), "waiting")
        except OSError as error:
            raise with_path(error, self.path) from None

    def rewrite(self, groups: Iterable[Group]) -> None:
        """Keeps only `groups`."""
        write_file(self.path, rollout_lines(groups, None, self.rules))
