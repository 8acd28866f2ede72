"""Which batches and rollouts stay on disk."""

from pathlib import Path

from rl.orchestrator.config import OrchestratorConfig, RetentionConfig
from rl.run_dir import RunDir, numbered


def delete_old(run_dir: RunDir, config: OrchestratorConfig) -> None:
    """Deletes what the settings do not keep; of batches nothing that a resume from any checkpoint needs."""
    if config.batches.keep_last is not None:
        start = min(numbered(run_dir.checkpoints), default=0)
        delete(numbered(run_dir.batches, ".batch"), config.batches, needed_from=start)
    if config.rollouts.keep_last is not None:
        for suffix in (".jsonl", ".sha256"):
            delete(numbered(run_dir.rollouts(0).parent, suffix), config.rollouts)


def delete(files: dict[int, Path], config: RetentionConfig, needed_from: int = 2**62) -> None:
    """Deletes files by their numbers, the oldest first."""
    kept = kept_numbers(list(files), config, needed_from)
    for number, path in files.items():
        if number not in kept:
            path.unlink(missing_ok=True)


def kept_numbers(numbers: list[int], config: RetentionConfig, needed_from: int) -> set[int]:
    """The newest `keep_last`, multiples of `keep_every`, and all from `needed_from` on."""
    newest = set(sorted(numbers)[-config.keep_last :]) if config.keep_last is not None else set(numbers)
    every = config.keep_every
    return {number for number in numbers if number in newest or number >= needed_from or (every and number % every == 0)}
