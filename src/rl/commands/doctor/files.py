"""`rl doctor RUN --verify`: every byte of batches, checkpoints, versions, rollouts and examples, against the checksums made with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.run_dir.checksums import check_record, check_version, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.trainer.sft.tokens import verify_data
from rl.wire.batch_file import check_rollouts, sound_batch


def damaged_files(run_dir: RunDir) -> list[str]:
    """What is damaged and what a resume does about it, a sentence each.

    A version without any checksums (of an older rl) is not judged, and of the record of a version that is gone only whether it can be read.
    """
    moves = "`--resume` moves what is damaged away"
    records = "a resume writes anew what it makes again; only `rl replay` needs the others: it tells which of the two is right"
    kinds: list[tuple[dict[int, Path], Callable[[int, Path], Any], str]] = [
        (numbered(run_dir.batches, ".batch"), lambda _, path: sound_batch(path), f"{moves}: it goes on before it, if it needs it"),
        (numbered(run_dir.checkpoints), lambda _, path: verify_checkpoint(path), f"{moves}: it starts at an older checkpoint"),
        (
            numbered(run_dir.weights_dir),
            lambda version, path: check_version(path, run_dir.digests(version)),
            f"{moves}: it makes newer versions than its checkpoint's again",
        ),
        (numbered(run_dir.digests_dir, ".json"), lambda version, path: check_record(path, run_dir.weights(version)), records),
        (run_dir.rollout_files(), lambda _, path: check_rollouts(path), "nothing but its readers needs it"),
        ({0: run_dir.data} if run_dir.data.exists() else {}, lambda _, path: verify_data(path), "no resume goes on with it as it is"),
    ]
    found = []
    for files, check, remedy in kinds:
        for number, path in files.items():
            try:
                check(number, path)
            except (CorruptFileError, OSError) as error:
                found.append(f"{error}; {remedy}")
            except RunError as error:  # of a newer rl, which no resume of this one moves away
                if str(error) not in found:
                    found.append(str(error))
    return found
