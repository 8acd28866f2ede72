"""The next batch, fetched and packed by a thread while this step trains."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from rl.config.run import RLConfig
from rl.run_dir import spans
from rl.trainer.balance import Layout
from rl.trainer.batch_sources import BatchSource
from rl.trainer.minibatches import cut, minibatch_weights
from rl.trainer.modes import Mode
from rl.trainer.packing import Packed, fill_blocks, micro_batch_tokens, pack
from rl.trainer.parallel.sharding import localise
from rl.trainer.parallel.world import World
from rl.trainer.store.background import Background
from rl.wire.messages import TrainBatch
from rl.wire.transport import Wait


class Skipped:
    """Stands for a batch that is quarantined."""


class Prefetch:
    """Fetches one batch ahead and packs it. `ask` returns at once, `take` waits and raises the errors of the thread."""

    def __init__(
        self,
        source: BatchSource,
        pack: Callable[[TrainBatch], Packed],
        wait: Wait,
        deadline_s: float,
        quarantined: Collection[int] = (),
    ):
        """`wait` is the source's, entered while the trainer is held up; `deadline_s`, longer than that, holds for every rank. The source is
        not asked for batches that are quarantined: a trainer that reads one dies."""
        self.source, self.pack, self.wait, self.deadline_s, self.quarantined = source, pack, wait, deadline_s, quarantined
        self.step = 0
        """The step that was asked for last."""
        self.background = Background()

    def ask(self, step: int) -> None:
        """Begins to make the batch of `step` ready."""
        self.step = step
        self.background.start(self._make, step)

    def _make(self, step: int) -> Packed | Skipped | None:
        if step in self.quarantined:
            return Skipped()
        with spans.span("fetch_batch", "prefetch", step):
            batch = self.source.receive(step)
        with spans.span("pack", "prefetch", step):
            return None if batch is None else self.pack(batch)

    def take(self, step: int, others: Iterable[Background] = ()) -> Packed | Skipped | None:
        """The batch of `step`, or None when the run has ended. An error of `others` ends the wait.

        Waits for: the thread, and so for what the source waits for.
        """
        if self.step != step:
            self.ask(step)
        with self.wait:
            return self.background.result(f"batch {step}, which rank 0 was to send; see its log", self.deadline_s, others)


def prepare(batch: TrainBatch, config: RLConfig, world: World, hidden_size: int, minibatches: int = 1, mode: Mode = "blocks") -> Packed:
    """Packs a batch for this rank in so many minibatches, each token with its weight in the loss of its own.

    `mode`: how the model computes them, see model.mode_of.
    """
    settings, several = config.trainer, mode != "unpacked"  # whether a row may hold more than one sample
    constant_length = settings.loss.constant_length or config.orchestrator.sampling.max_tokens
    max_tokens = micro_batch_tokens(settings, world.device, mode) * world.context_size * several  # of a row, which that many ranks share
    layout = Layout(world.data_rank, world.data_size, max_tokens, hidden_size)
    parts = cut(batch, minibatches, config.seed)
    packed = pack(batch, minibatch_weights(batch, parts, settings.loss, constant_length), layout, parts)
    on_gpu, rows = world.device.type == "cuda", packed.minibatches
    if on_gpu and several:
        rows = [[fill_blocks(row, world.context_size) for row in part] for part in rows]
    rows = [[localise(row, world) for row in part] for part in rows]
    return replace(packed, minibatches=[[row.pinned() for row in part] for part in rows] if on_gpu else rows)
