"""Finds damaged files of a run by their checksums and moves them, with all that depends on them, to
`discarded/<time>/`.

A run continues from a checkpoint and the batches after it, its orchestrator from the newest batch.
So if a needed batch is damaged, it and all later steps are discarded, as by `--resume` at the
previous step, and sampled and trained again.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rl.run_dir.checksums import Mirror, check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError, move, write_file
from rl.run_dir.paths import RunDir, numbered, numbers, read_origin
from rl.system.errors import RunError
from rl.wire.batch_file import check_rollouts, sound_batch


def repair(run_dir: RunDir, *, thorough: bool = True, logged: bool = True) -> list[str]:
    """Moves damaged files away so that the run can continue. Neither its trainer nor its
    orchestrator may be running.

    thorough: also checks checkpoints and older versions, which are gigabytes; otherwise a process
    that reads a damaged one ends. Checks only rollouts after the checkpoint: readers of older files
    detect damage themselves, and `rl doctor RUN --verify` reads all. logged: the batches are files;
    False for supervised fine-tuning, which rebuilds them from its data. Returns one line for each
    action.
    """
    return Repair(run_dir, thorough, logged).run()


class Repair:
    """One repair of a run. Files are read as late as possible: older batches and checkpoints
    only if newer ones are damaged."""

    def __init__(self, run_dir: RunDir, thorough: bool, logged: bool):
        self.run_dir, self.thorough, self.logged = run_dir, thorough, logged
        self.away = run_dir.new_discarded()
        self.remarks: list[str] = []
        self.faults: dict[int, str] = {}
        """Step -> fault of its batch, "" if it is sound; for the batches read so far."""

    def run(self) -> list[str]:
        """See `repair`."""
        newest = self.run_dir.newest_batch()
        checkpoint, last = self._newest_state(newest)
        if self.logged and last < max([newest, *numbers(self.run_dir.checkpoints)]):
            self._cut(last, newest)
        self._repair_weights(checkpoint)
        self._repair_rollouts(checkpoint)
        if self.remarks:
            write_file(self.away / "remarks.txt", "\n".join([*self.remarks, ""]).encode())
        return self.remarks

    def _newest_state(self, newest: int) -> tuple[int, int]:
        """Returns (checkpoint, step) of the newest step at which the run can continue. Moves
        newer damaged checkpoints away."""
        origin = read_origin(self.run_dir)
        for step, path in [*reversed(numbered(self.run_dir.checkpoints).items()), (0, None)]:
            if path is None and origin:
                what = (
                    f"checkpoint or batch {origin.step} of {self.run_dir.root} is damaged or "
                    "missing, and the run begins with it"
                )
                raise RunError(
                    f"{what}: make it again by `rl branch {origin.run}@{origin.step} --name ...`"
                )
            if (
                path is not None
                and self.thorough
                and (fault := find_fault(verify_checkpoint, path))
            ):
                self._discard(
                    path, "checkpoints", f"{fault}; the trainer starts from an older checkpoint"
                )
                continue
            if not self.logged:
                return step, step
            last = step
            while last < newest and not self._fault(last + 1):
                last += 1
            if last > step or step == 0 or not self._fault(step):
                return step, last
        raise AssertionError("a run can always go on at step 0")

    def _fault(self, step: int) -> str:
        """Describes the fault of a batch; empty if it is sound."""
        if step not in self.faults:
            self.faults[step] = find_fault(sound_batch, self.run_dir.batch(step))
        return self.faults[step]

    def _cut(self, last: int, newest: int) -> None:
        """Discards everything after step `last`. Pending groups stay: the orchestrator drops
        those that later versions sampled."""
        why = next(
            (fault for _, fault in sorted(self.faults.items()) if fault),
            "its checkpoint is damaged",
        )
        away = self.run_dir.discard_after(last, self.away, keep_pending=True)
        self.remarks.append(
            f"{why}; everything after step {last} was moved to {away}: batches {last + 1} to "
            f"{newest} are sampled and trained again, "
            f"and the groups in them are dropped"
        )

    def _repair_weights(self, checkpoint: int) -> None:
        """Moves damaged versions away. The trainer rebuilds those from `checkpoint` on."""
        mirror = Mirror()
        for version, path in numbered(self.run_dir.weights_dir).items():
            if version < checkpoint and not self.thorough:
                continue
            if fault := find_fault(
                partial(check_version, record=self.run_dir.digests(version), mirror=mirror), path
            ):
                comes = (
                    "the trainer makes it again"
                    if version >= checkpoint
                    else "it cannot be made again, and nothing needs it"
                )
                self._discard(path, "weights", f"{fault}; {comes}")

    def _repair_rollouts(self, checkpoint: int) -> None:
        """Moves damaged rollout files away; only people read them."""
        for path in self.run_dir.rollout_files(after=checkpoint).values():
            if fault := find_fault(check_rollouts, path):
                self._discard(
                    path, "rollouts", f"{fault.split(';')[0]}; only readers of rollouts need it"
                )

    def _discard(self, path: Path, kind: str, remark: str) -> None:
        target = self.away / kind / path.name
        move(path, target)
        self.remarks.append(f"{remark} (moved to {target})")


def find_fault(check: Callable[[Path], object], path: Path) -> str:
    """Describes the fault of a file or directory; empty if it is sound."""
    try:
        check(path)
    except CorruptFileError as error:
        return str(error)
    return ""
