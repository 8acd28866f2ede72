"""Where batches come from: each source gives the batch of a step, the same on every rank."""

from typing import Protocol

from rl.batch_log import decode_batch
from rl.messages import RunEnded, TrainBatch
from rl.trainer.distributed import World
from rl.transport import OrchestratorClient


class BatchSource(Protocol):
    """Gives batches. Every rank has one and gets the same batches from it."""

    def receive(self, step: int) -> TrainBatch | None:
        """The batch of `step`, or None when there is none and will be none: the run has ended."""

    def validation(self, step: int) -> list[TrainBatch]:
        """Held-out batches whose loss is due after `step`; mostly none."""


class FromOrchestrator:
    """Rank 0 asks the orchestrator and spreads the bytes; every rank checks and decodes them."""

    def __init__(self, client: OrchestratorClient | None, world: World):
        self.client, self.world = client, world

    def receive(self, step: int) -> TrainBatch | None:
        return receive_batch(self.client, self.world, step)

    def validation(self, step: int) -> list[TrainBatch]:
        return []


def receive_batch(client: OrchestratorClient | None, world: World, step: int) -> TrainBatch | None:
    """The batch of `step`, or None when the run has ended. Every rank calls this; `client` is rank 0's.

    Consumes: the orchestrator's answer. Waits for: that answer, on rank 0 up to the client's deadline, elsewhere in a broadcast.
    """
    answer = client.get_batch(step) if client else b""
    ended = isinstance(answer, RunEnded)
    if ended:
        print(f"the run has ended: {answer.reason}", flush=True)
    data = world.broadcast_bytes(b"" if ended else answer)
    if not data:
        return None
    batch = decode_batch(data, f"batch {step} from the orchestrator").batch
    if batch.step != step:
        raise ValueError(f"asked the orchestrator for batch {step} and got batch {batch.step}: does another run use this run directory?")
    if not batch.num_loss_tokens:
        raise ValueError(f"batch {step} has no token to train on")
    return batch
