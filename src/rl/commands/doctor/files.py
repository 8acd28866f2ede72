"""`rl doctor RUN --verify`: every byte of a run's batches, checkpoints, versions and rollouts, against the checksums written with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.run_dir.checksums import check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.wire.batch_file import check_rollouts, sound_batch


def damaged_files(run_dir: RunDir) -> list[str]:
    """What is damaged and what a resume does about it, a sentence each. A version without checksums (of an older rl) is not judged."""
    moves = "`--resume` moves what is damaged away"
    kinds: list[tuple[dict[int, Path], Callable[[Path], Any], str]] = [
        (numbered(run_dir.batches, ".batch"), sound_batch, f"{moves}: it goes on before it, if it needs it"),
        (numbered(run_dir.checkpoints), verify_checkpoint, f"{moves}: it starts at an older checkpoint"),
        (numbered(run_dir.weights_dir), check_version, f"{moves}: it makes newer versions than its checkpoint's again"),
        (run_dir.rollout_files(), check_rollouts, "nothing but its readers needs it"),
    ]
    found = []
    for files, check, remedy in kinds:
        for path in files.values():
            try:
                check(path)
            except (CorruptFileError, OSError) as error:
                found.append(f"{error}; {remedy}")
            except RunError as error:  # of a newer rl, which no resume of this one moves away
                found.append(str(error))
    return found
