"""Sources of batches: each returns the batch of a step, the same on every rank."""

import json
from collections.abc import Iterable
from typing import Protocol

from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Phase
from rl.trainer.parallel.world import World
from rl.wire.batch_file import decode_batch
from rl.wire.messages import RunEnded, TrainBatch
from rl.wire.transport import OrchestratorClient, Wait

LONGEST_S = 20 * 86400.0
"""A deadline that torch can count in 32 bits of milliseconds."""


class BatchSource(Protocol):
    """Returns batches. Every rank has a source, and all return the same batches. A background
    thread calls it step by step."""

    def receive(self, step: int) -> TrainBatch | None:
        """Returns the batch of `step`, or None if the run has ended."""

    def validation(self, step: int) -> Iterable[TrainBatch]:
        """Returns the held-out batches whose loss is due after `step`; an empty list if there
        are none."""
        return []

    def meaningful(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Returns those of a step's metrics that mean something for this source's batches, and
        the source's own."""
        return metrics


class FromOrchestrator(BatchSource):
    """Rank 0 asks the orchestrator and broadcasts the bytes; every rank checks and decodes them.
    Creating it is a collective call."""

    def __init__(self, client: OrchestratorClient | None, wait: Wait, world: World):
        self.client, self.wait, self.world = client, wait, world
        # the thread asks long before anybody waits for it, who has a deadline: see Prefetch.take
        self.group = world.new_group(LONGEST_S)

    def receive(self, step: int) -> TrainBatch | None:
        """Waits for: the orchestrator's answer, on rank 0 as long as `wait` allows; the other ranks
        wait for rank 0.

        Returns None on every rank, too, if rank 0 gives up because the trainer leaves.
        """
        if not self.client:
            self.wait.about(Phase.WAITING_FOR_BATCH, step, "rank 0 to get it")
        answer = self.client.get_batch(step, self.wait) if self.client else b""
        if self.client and self.world.size > 1:
            self.wait.about(Phase.WAITING_FOR_RANKS, step, f"they are to take batch {step}")
        if isinstance(answer, RunEnded):
            print(f"the run has ended: {answer.reason}", flush=True)
        data = self.world.broadcast_bytes(answer if isinstance(answer, bytes) else b"", self.group)
        self.wait.over()
        return batch_of(step, data, f"batch {step} from the orchestrator") if data else None


class FromLog(BatchSource):
    """The logged batches of a run, read by every rank."""

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir

    def receive(self, step: int) -> TrainBatch:
        path = self.run_dir.batch(step)
        return batch_of(step, path.read_bytes(), str(path))


def batch_of(step: int, data: bytes, name: str) -> TrainBatch:
    """Returns the checked content of a batch file. Raises CorruptFileError, or ValueError if it
    is not a valid batch of this step."""
    batch = decode_batch(data, name).batch
    if batch.step != step:
        raise ValueError(
            f"{name}: is batch {batch.step}, not {step}: do two runs share this directory?"
        )
    if not batch.num_loss_tokens:
        raise ValueError(f"{name}: has no token to train on")
    return batch


def quarantined_steps(run_dir: RunDir, world: World) -> frozenset[int]:
    """Returns the steps whose batches must not be read, as rank 0 sees them on disk. `rl` marks
    them while no trainer runs."""
    steps = numbers(run_dir.batches, run_dir.quarantined(0).suffix)
    return frozenset(json.loads(world.broadcast_bytes(json.dumps(steps).encode())))
