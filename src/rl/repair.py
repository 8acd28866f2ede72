"""Damaged files of a run: found by their checksums, moved to `discarded/<time>/`, and what depends on them taken back.

A run goes on from a checkpoint and the batches after it, and its orchestrator from the newest batch. So a damaged batch that is needed
takes all later steps with it, as `--resume` to the step before would; they are sampled and trained again.
"""

from pathlib import Path

from rl.batch_log import check_rollouts, sound_batch
from rl.digests import DIGESTS, verify_checkpoint, verify_version
from rl.files import CorruptFileError, move, write_file
from rl.run_dir import RunDir, numbered


def repair(run_dir: RunDir, *, thorough: bool = True, logged: bool = True) -> list[str]:
    """Makes a run fit to go on. Only while neither its trainer nor its orchestrator runs. Returns what was done, a line for each thing.

    Not `logged`: supervised fine-tuning, which makes its batches anew. Not `thorough`: checkpoints and older versions, gigabytes, are left
    to those who read them, and who end when they are damaged.
    """
    return Repair(run_dir, thorough, logged).mend()


class Repair:
    """One look over a run. Files are read as late as possible: older batches and checkpoints only when newer ones are damaged."""

    def __init__(self, run_dir: RunDir, thorough: bool, logged: bool):
        self.run_dir, self.thorough, self.logged = run_dir, thorough, logged
        self.away = run_dir.new_discarded()
        self.remarks: list[str] = []
        self.faults: dict[int, str] = {}
        """What is wrong with a batch, "" if nothing, by step."""

    def mend(self) -> list[str]:
        """See `repair`."""
        newest = self.run_dir.newest_batch()
        checkpoint, last = self._newest_state(newest)
        if self.logged and last < max([newest, *numbered(self.run_dir.checkpoints)]):
            self._cut(last, newest)
        self._mend_weights(checkpoint)
        self._look_at_rollouts()
        if self.remarks:
            write_file(self.away / "remarks.txt", "\n".join([*self.remarks, ""]).encode())
        return self.remarks

    def _newest_state(self, newest: int) -> tuple[int, int]:
        """(checkpoint, step) of the newest step at which the run can go on. Damaged checkpoints on the way are moved away."""
        for step, path in [*reversed(numbered(self.run_dir.checkpoints).items()), (0, None)]:
            if path is not None and self.thorough:
                try:
                    verify_checkpoint(path)
                except CorruptFileError as error:
                    self._discard(path, "checkpoints", f"{error}; the trainer starts from an older checkpoint")
                    continue
            if not self.logged:
                return step, step
            last = step
            while last < newest and not self._fault(last + 1):
                last += 1
            if last > step or step == 0 or not self._fault(step):
                return step, last
        raise AssertionError("step 0 can always be gone on from")

    def _fault(self, step: int) -> str:
        """What is wrong with a batch; empty when it is sound."""
        if step not in self.faults:
            try:
                sound_batch(self.run_dir.batch(step))
                self.faults[step] = ""
            except CorruptFileError as error:
                self.faults[step] = str(error)
        return self.faults[step]

    def _cut(self, last: int, newest: int) -> None:
        """Takes back all after a step. Groups that wait for a batch stay: the orchestrator drops those that later versions sampled."""
        lost = sum(len(finished_groups(self.run_dir.rollouts(step))) for step in range(last + 1, newest + 1))
        why = next((fault for _, fault in sorted(self.faults.items()) if fault), "its checkpoint is damaged")
        away = self.run_dir.discard_after(last, self.away, keep_pending=True)
        self.remarks.append(
            f"{why}; everything after step {last} was moved to {away}: batches {last + 1} to {newest} are sampled and trained again, "
            f"and the {lost} groups in them are dropped"
        )

    def _mend_weights(self, checkpoint: int) -> None:
        """Versions from the checkpoint on come again from the trainer; older ones do not."""
        for version, path in numbered(self.run_dir.weights_dir).items():
            if not (path / DIGESTS).exists() or (version < checkpoint and not self.thorough):
                continue
            try:
                verify_version(path)
            except CorruptFileError as error:
                comes = "the trainer makes it again" if version >= checkpoint else "it cannot be made again, and nothing needs it"
                self._discard(path, "weights", f"{error}; {comes}")

    def _look_at_rollouts(self) -> None:
        """Rollouts are for readers: damaged ones are named and moved away, nothing depends on them."""
        for path in numbered(self.run_dir.rollouts(0).parent, ".jsonl").values():
            try:
                check_rollouts(path)
            except CorruptFileError as error:
                self._discard(path, "rollouts", f"{error.args[0].split(';')[0]}; nothing but its readers needs it")

    def _discard(self, path: Path, kind: str, remark: str) -> None:
        target = self.away / kind / path.name
        move(path, target)
        self.remarks.append(f"{remark} (moved to {target})")


def finished_groups(rollouts: Path) -> set[bytes]:
    """Ids of the groups that a file of rollouts tells of, as far as it can be read."""
    found = set()
    for line in rollouts.read_bytes().splitlines() if rollouts.exists() else []:
        before, _, after = line.partition(b'"group_id":')
        if before and after:
            found.add(after.split(b",")[0])
    return found
