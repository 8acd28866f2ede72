"""Where batches come from: each source gives the batch of a step, the same on every rank."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from rl.batch_log import decode_batch
from rl.messages import RunEnded, TrainBatch
from rl.trainer.distributed import World
from rl.transport import OrchestratorClient, Wait

UNBOUNDED = timedelta(days=365)
"""Of the threads' collectives: a step may take any time, and who waits for the threads has the deadline."""


class BatchSource(Protocol):
    """Gives batches. Every rank has one and gets the same batches from it. A thread beside the training calls it, step after step."""

    def receive(self, step: int) -> TrainBatch | None:
        """The batch of `step`, or None when there is none and will be none: the run has ended."""

    def validation(self, step: int) -> Iterable[TrainBatch]:
        """Held-out batches whose loss is due after `step`; mostly none: then an empty list."""


class FromOrchestrator:
    """Rank 0 asks the orchestrator and spreads the bytes; every rank checks and decodes them. Every rank makes one at the same time."""

    def __init__(self, client: OrchestratorClient | None, wait: Wait, world: World):
        self.client, self.wait, self.world = client, wait, world
        self.group = dist.new_group(backend="gloo", timeout=UNBOUNDED) if world.size > 1 else None

    def receive(self, step: int) -> TrainBatch | None:
        """Consumes: the orchestrator's answer. Waits for: that answer, on rank 0 as long as `wait` allows, elsewhere in a broadcast."""
        answer = self.client.get_batch(step, self.wait) if self.client else b""
        ended = isinstance(answer, RunEnded)
        if ended:
            print(f"the run has ended: {answer.reason}", flush=True)
        data = self.world.broadcast_bytes(b"" if ended else answer, self.group)
        if not data:
            return None
        batch = decode_batch(data, f"batch {step} from the orchestrator").batch
        if batch.step != step:
            raise ValueError(f"asked the orchestrator for batch {step} and got batch {batch.step}: do two runs share this directory?")
        if not batch.num_loss_tokens:
            raise ValueError(f"batch {step} has no token to train on")
        return batch

    def validation(self, step: int) -> list[TrainBatch]:
        return []
