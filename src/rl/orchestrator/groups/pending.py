"""Keeps groups that no batch has used yet in `batches/pending.log`, finished or not, so that no
finished rollout is lost if the orchestrator dies."""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from rl.run_dir.files import append_file, write_file
from rl.wire.rollouts import Drawn, Group, Rollout, encoded, read_records


class PendingLog:
    """Groups in the order in which they finished, and unfinished ones with finished episodes.
    Each record is complete or absent."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.groups: list[Group] = []
        self.unfinished: dict[int, Group] = {}
        """By group id."""
        self.drawn: list[Drawn] = []
        """Tasks drawn since the newest batch."""

    def load(self, settled: set[int], newest: int) -> list[str]:
        """Reads the records that no batch has settled, except damaged ones and episodes sampled
        by versions after `newest`.

        newest: the newest batch; later versions no longer exist if the run was rolled back. Returns
        a warning for each omission.
        """
        records, warnings = read_records(self.path)
        self.groups, self.unfinished, num_begun_again = [], {}, 0
        self.drawn = [record for record in records if isinstance(record, Drawn)]
        for group in records:
            if isinstance(group, Group) and group.group_id not in settled:
                rollouts = episodes_where(
                    group.rollouts, lambda rollout: max(rollout.versions, default=0) <= newest
                )
                if len(rollouts) < len(group.rollouts):
                    num_begun_again += group.finished
                    group.finished, group.rollouts = False, rollouts
                self._take(group)
        self.groups = list({group.group_id: group for group in self.groups}.values())
        if num_begun_again:
            warnings.append(
                f"{num_begun_again} finished groups are played on: versions after {newest}, which "
                "were rolled back, sampled some of their episodes"
            )
        self.rewrite()
        return warnings

    def append(self, records: Iterable[Group | Drawn]) -> None:
        """Appends groups, or further episodes of them, and drawn tasks durably."""
        append_file(self.path, encoded(records))
        for record in records:
            if isinstance(record, Drawn):
                self.drawn.append(record)
            else:
                self._take(record)

    def _take(self, group: Group) -> None:
        """Adds a group, or episodes of one, of which the newest attempt counts."""
        before = self.unfinished.pop(group.group_id, None)
        if group.finished:
            self.groups.append(group)
            return
        if before:
            new = {rollout.episode for rollout in group.rollouts}
            kept = episodes_where(before.rollouts, lambda rollout: rollout.episode not in new)
            group = msgspec.structs.replace(group, rollouts=[*kept, *group.rollouts])
        self.unfinished[group.group_id] = group

    def rewrite(self) -> None:
        """Rewrites the log, after a batch has settled the other groups."""
        write_file(self.path, encoded([*self.groups, *self.unfinished.values(), *self.drawn]))


def episodes_where(rollouts: list[Rollout], holds: Callable[[Rollout], bool]) -> list[Rollout]:
    """Returns the rollouts of the episodes for all of whose rollouts `holds`."""
    others = {rollout.episode for rollout in rollouts if not holds(rollout)}
    return [rollout for rollout in rollouts if rollout.episode not in others]
