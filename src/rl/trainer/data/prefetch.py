"""The next batch, fetched and packed by a thread while this step trains."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from rl.config.run import RLConfig
from rl.run_dir import spans
from rl.trainer.data.batch_sources import BatchSource
from rl.trainer.data.micro_batch import MicroBatch, fill_blocks, micro_batch_tokens
from rl.trainer.data.packing import Layout, Packed, cut, minibatch_weights, pack
from rl.trainer.model.modes import Mode
from rl.trainer.model.routes import Routers
from rl.trainer.parallel.sharding import localise
from rl.trainer.parallel.world import World
from rl.trainer.store.threads import SingleTaskThread
from rl.wire.messages import TrainBatch
from rl.wire.transport import Wait


class Skipped:
    """Placeholder for a quarantined batch."""


class Prefetch:
    """Fetches one batch ahead and packs it. `ask` returns at once, `take` waits and raises the
    errors of the thread."""

    def __init__(
        self,
        source: BatchSource,
        pack: Callable[[TrainBatch], Packed],
        wait: Wait,
        deadline_s: float,
        quarantined: Collection[int] = (),
    ):
        """`wait`: the source's; shows in the status that the trainer waits for the source.
        `deadline_s`: every rank's deadline, longer than the source's. `quarantined`: batches that
        are never requested, because a trainer that reads one dies."""
        self.source, self.pack, self.wait = source, pack, wait
        self.deadline_s, self.quarantined = deadline_s, quarantined
        self.step = 0
        """The step requested last."""
        self.thread = SingleTaskThread()

    def ask(self, step: int) -> None:
        """Starts to fetch and pack the batch of `step`."""
        self.step = step
        self.thread.start(self._make, step)

    def _make(self, step: int) -> Packed | Skipped | None:
        if step in self.quarantined:
            return Skipped()
        with spans.span("fetch_batch", "prefetch", step):
            batch = self.source.receive(step)
        with spans.span("pack", "prefetch", step):
            return None if batch is None else self.pack(batch)

    def take(self, step: int, others: Iterable[SingleTaskThread] = ()) -> Packed | Skipped | None:
        """Returns the batch of `step`, or None if the run has ended. An error of `others` ends the
        wait.

        Waits for: the thread, and through it whatever the source waits for.
        """
        if self.step != step:
            self.ask(step)
        what = f"batch {step} from rank 0; see its log"
        with self.wait:
            return self.thread.result(what, self.deadline_s, others)


def prepare(
    batch: TrainBatch,
    config: RLConfig,
    world: World,
    hidden_size: int,
    minibatches: int = 1,
    mode: Mode = "blocks",
    routers: Routers | None = None,
) -> Packed:
    """Packs a batch for this rank into minibatches, and gives each token its weight in the loss of
    its minibatch.

    `mode`: how the model computes rows, see rl.trainer.model.head.mode_of. `routers`: those of
    the model if routes are replayed; RunError is raised for routes that they cannot take.
    """
    settings, on_gpu = config.trainer, world.device.type == "cuda"
    several = mode != "unpacked"  # whether a row may hold more than one sample
    # of a row, which context_size ranks share
    max_tokens = micro_batch_tokens(settings, world.device, mode) * world.context_size * several
    layout = Layout(world.data_rank, world.data_size, max_tokens, hidden_size)
    divided = cut(batch, minibatches, config.seed)
    constant_length = settings.loss.constant_length or config.orchestrator.sampling.max_tokens
    weights = minibatch_weights(batch, divided, settings.loss, constant_length)
    packed = pack(batch, weights, layout, divided)

    def placed(row: MicroBatch) -> MicroBatch:
        if routers and row.routes is not None:
            routers.check(row.routes)
        row = localise(fill_blocks(row, world.context_size) if on_gpu and several else row, world)
        return row.pinned() if on_gpu else row

    return replace(
        packed, minibatches=[[placed(row) for row in part] for part in packed.minibatches]
    )
