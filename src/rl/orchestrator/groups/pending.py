"""Stores finished groups that no batch has used yet, and finished members of groups in flight,
in `batches/pending.log`, so that no finished rollout is lost if the orchestrator dies. Also
writes the finished groups to `rollouts/pending.jsonl` for people to read."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rl.orchestrator.batches.batch_selection import rollout_lines
from rl.run_dir.files import (
    HEADER,
    MAGIC,
    UNREADABLE,
    CorruptFileError,
    append_file,
    decode_records,
    encode_record,
    reading,
    with_path,
    write_all,
    write_file,
)
from rl.wire.rollouts import Group, Members, Rollout

ENCODER = msgspec.msgpack.Encoder()
GROUPS, MEMBERS = msgspec.msgpack.Decoder(Group), msgspec.msgpack.Decoder(Members)


def decode(payload: bytes) -> Group | Members:
    """Decodes a record of the log; only Members have the field `members`. Raises the exceptions
    in UNREADABLE."""
    try:
        return MEMBERS.decode(payload)
    except msgspec.ValidationError:
        return GROUPS.decode(payload)


def encoded(records: Iterable[Group | Members]) -> bytes:
    return b"".join(encode_record(ENCODER.encode(record)) for record in records)


def read_groups(path: Path) -> tuple[list[Group | Members], list[str]]:
    """Returns the records of a log, and a warning for each damaged place: a write cut short at
    the end, or damage by a failing disk."""
    groups: list[Group | Members] = []
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
                groups.append(decode(payload))
                offset += HEADER.size + len(payload)
        except (CorruptFileError, *UNREADABLE) as error:
            following = data.find(MAGIC, offset + 1)
            offset = following if following > 0 else len(data)
            warnings.append(f"{error}; rollouts there are sampled again")
    return groups, warnings


class PendingLog:
    """Groups in the order in which they finished, and members of unfinished groups. Each record
    is complete or absent."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []
        self.members: dict[int, Members] = {}
        """By group id, for unfinished groups."""

    def load(self, settled: set[int], newest: int) -> list[str]:
        """Reads the records that no batch has settled, except damaged ones and those sampled by
        versions after `newest`.

        newest: the newest batch; later versions no longer exist if the run was rolled back. Returns
        a warning for each omission.
        """
        records, warnings = read_groups(self.path)
        self.groups, self.members = [], {}
        unsettled = [record for record in records if record.group_id not in settled]
        whole = {record.group_id: record for record in unsettled if isinstance(record, Group)}
        self.groups = [
            group for group in whole.values() if max(group.versions, default=0) <= newest
        ]
        if dropped := len(whole) - len(self.groups):
            warnings.append(
                f"{dropped} finished groups are dropped: versions after {newest}, which were "
                "rolled back, sampled them"
            )
        for record in unsettled:
            if isinstance(record, Members) and record.group_id not in whole:
                self._note(
                    without_episodes(
                        record, lambda rollout: max(rollout.versions, default=0) > newest
                    )
                )
        self.rewrite()
        return warnings

    def append(self, records: Iterable[Group | Members]) -> None:
        """Appends finished groups and members durably."""
        append_file(self.path, encoded(records))
        for record in records:
            if isinstance(record, Members):
                self._note(record)
            else:
                self.members.pop(record.group_id, None)
                self.groups.append(record)

    def _note(self, record: Members) -> None:
        """Adds members to a group; the newest attempt of an episode counts."""
        if before := self.members.get(record.group_id):
            new = {rollout.episode for rollout in record.members}
            record = msgspec.structs.replace(
                record,
                members=[
                    *(rollout for rollout in before.members if rollout.episode not in new),
                    *record.members,
                ],
            )
        if record.members:
            self.members[record.group_id] = record

    def rewrite(self) -> None:
        """Rewrites the log with `groups` and `members`, after a batch has settled the others."""
        write_file(self.path, encoded([*self.groups, *self.members.values()]))


def without_episodes(record: Members, refused: Callable[[Rollout], bool]) -> Members:
    """Returns the members without the episodes in which any rollout is refused."""
    bad = {rollout.episode for rollout in record.members if refused(rollout)}
    return msgspec.structs.replace(
        record, members=[rollout for rollout in record.members if rollout.episode not in bad]
    )


class PendingRollouts:
    """The rollouts of the groups in pending.log as readable text. The file is derived from the
    log and rewritten at every start and commit, so appends need not be synced, and a partial
    line left by a killed process disappears at the next start."""

    def __init__(self, path: Path, mask_truncated: bool):
        self.path, self.mask_truncated = path, mask_truncated
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, groups: Iterable[Group]) -> None:
        """Adds finished groups."""
        try:
            with self.path.open("ab", buffering=0) as file:
                write_all(
                    file.fileno(), rollout_lines(groups, None, self.mask_truncated), "waiting"
                )
        except OSError as error:
            raise with_path(error, self.path) from None

    def rewrite(self, groups: Iterable[Group]) -> None:
        """Keeps only `groups`."""
        write_file(self.path, rollout_lines(groups, None, self.mask_truncated))
