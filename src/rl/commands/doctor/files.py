"""`rl doctor RUN --verify`: checks batches, checkpoints, versions, rollouts and examples against
their stored checksums."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rl.run_dir.checksums import Mirror, check_record, check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.trainer.sft.tokens import verify_data
from rl.wire.batch_file import batch_head, check_rollouts, sound_batch


def damaged_files(run_dir: RunDir) -> list[str]:
    """Returns one sentence per damaged file, with what a resume does about it.

    A version without checksums is not checked. The record of a deleted version is only checked for
    being readable.
    """
    moves, mirror = "`--resume` moves damaged files away", Mirror()
    weights, digests = numbered(run_dir.weights_dir), numbered(run_dir.digests_dir, ".json")
    records = (
        "a resume rewrites the records of steps that it repeats; only `rl replay` needs the "
        "others, and shows which file is right"
    )
    kinds: dict[str, tuple[Iterable[Path], Callable[[Path], Any]]] = {
        f"{moves} and continues before it if needed": (
            numbered(run_dir.batches, ".batch").values(),
            lambda path: batch_head(path) and sound_batch(path),
        ),
        f"{moves} and starts from an older checkpoint": (
            numbered(run_dir.checkpoints).values(),
            verify_checkpoint,
        ),
        f"{moves} and remakes versions newer than its checkpoint": (
            weights.values(),
            lambda path: check_version(path, run_dir.digests(int(path.name)), mirror),
        ),
        records: (
            digests.values(),
            lambda path: check_record(path, run_dir.weights(int(path.stem))),
        ),
        "only readers of rollouts need it": (run_dir.rollout_files().values(), check_rollouts),
        "a resume refuses damaged examples": (
            [run_dir.data] if run_dir.data.exists() else [],
            verify_data,
        ),
    }
    faults = []
    for remedy, (paths, check) in kinds.items():
        for path in paths:
            try:
                check(path)
            except (CorruptFileError, OSError) as error:
                faults.append(f"{error}; {remedy}")
            except RunError as error:  # written by a newer rl; a resume does not move it away
                faults.append(str(error))
    return list(dict.fromkeys(faults))
