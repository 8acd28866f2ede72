"""Settings of training on recorded rollouts: `rl train --from FILE`."""

from typing import Annotated

from rl.config.base import PATH, Settings


class RecordedConfig(Settings):
    """Training on recorded rollouts: orchestrator and trainer, without environments and
    inference. Batches have orchestrator.batch_size rollouts, whole tasks in the order of the
    file, and orchestrator.credit is theirs."""

    rollouts: Annotated[str, PATH]
    """A JSONL file or pattern ("data/*.jsonl"): lines of `rl collect` or `rl.record`, results
    that verifiers has saved, or the rollouts of a run. docs/recorded.md has the form of a line."""
