"""`rl doctor RUN --verify`: every byte of a run's batches, checkpoints, versions and rollouts, against the checksums written with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.run_dir.checksums import check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.wire.batch_file import check_rollouts, sound_batch


def damaged_files(run_dir: RunDir) -> list[str]:
    """What is damaged and what a resume does about it, a sentence each. A version without checksums (of an older rl) is not judged."""
    kinds: list[tuple[Path, str, Callable[[Path], Any], str]] = [
        (run_dir.batches, ".batch", sound_batch, "it goes on before it, if it needs it"),
        (run_dir.checkpoints, "", verify_checkpoint, "it starts at an older checkpoint"),
        (run_dir.weights_dir, "", check_version, "it makes newer versions than its checkpoint's again"),
        (run_dir.rollouts(0).parent, ".jsonl", check_rollouts, "nothing but their readers needs them"),
    ]
    found = []
    for directory, suffix, check, remedy in kinds:
        for path in numbered(directory, suffix).values():
            try:
                check(path)
            except (CorruptFileError, OSError) as error:
                found.append(f"{error}; `--resume` moves what is damaged away: {remedy}")
    return found
