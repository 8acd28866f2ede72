"""`rl doctor RUN --verify`: checks batches, checkpoints, versions, rollouts and examples against
their stored checksums."""

from collections.abc import Callable
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
    records = (
        "a resume rewrites the records of steps that it repeats; only `rl replay` needs the "
        "others, and shows which file is right"
    )
    kinds: list[tuple[dict[int, Path], Callable[[int, Path], Any], str]] = [
        (
            numbered(run_dir.batches, ".batch"),
            lambda _, path: batch_head(path) and sound_batch(path),
            f"{moves} and continues before it if needed",
        ),
        (
            numbered(run_dir.checkpoints),
            lambda _, path: verify_checkpoint(path),
            f"{moves} and starts from an older checkpoint",
        ),
        (
            numbered(run_dir.weights_dir),
            lambda version, path: check_version(path, run_dir.digests(version), mirror),
            f"{moves} and remakes versions newer than its checkpoint",
        ),
        (
            numbered(run_dir.digests_dir, ".json"),
            lambda version, path: check_record(path, run_dir.weights(version)),
            records,
        ),
        (
            run_dir.rollout_files(),
            lambda _, path: check_rollouts(path),
            "only readers of rollouts need it",
        ),
        (
            {0: run_dir.data} if run_dir.data.exists() else {},
            lambda _, path: verify_data(path),
            "a resume refuses damaged examples",
        ),
    ]
    found = []
    for files, check, remedy in kinds:
        for number, path in files.items():
            try:
                check(number, path)
            except (CorruptFileError, OSError) as error:
                found.append(f"{error}; {remedy}")
            except RunError as error:  # written by a newer rl; a resume does not move it away
                if str(error) not in found:
                    found.append(str(error))
    return found
