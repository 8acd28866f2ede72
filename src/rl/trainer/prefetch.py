"""The next batch, made ready in a thread while this step trains."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool

from rl.messages import TrainBatch
from rl.trainer.data import BatchSource
from rl.trainer.packing import Packed
from rl.transport import Wait

LOOK_S = 0.1
"""Between two looks at what else could have gone wrong while a batch is waited for."""


@dataclass(frozen=True)
class Ready:
    """A batch, and this rank's part of it."""

    batch: TrainBatch
    packed: Packed


class Skipped:
    """In place of a batch that is quarantined."""


class Prefetch:
    """Asks a source for one batch ahead, and packs it. `ask` returns at once, `take` waits; errors of the thread are raised by `take`."""

    def __init__(
        self,
        source: BatchSource,
        pack: Callable[[TrainBatch], Packed],
        wait: Wait,
        deadline_s: float,
        quarantined: Collection[int] = (),
    ):
        """`wait` is the source's, entered while the trainer is held up; `deadline_s`, longer than that, holds for every rank. The source is
        not asked for batches that are quarantined: whoever reads them dies."""
        self.source, self.pack, self.wait, self.deadline_s, self.quarantined = source, pack, wait, deadline_s, quarantined
        self.pool = ThreadPool(1)  # of a daemon thread: one that waits for ever does not keep the process from ending
        self.step = 0
        self.coming: AsyncResult | None = None

    def ask(self, step: int) -> None:
        """Starts to make the batch of `step` ready."""
        self.step, self.coming = step, self.pool.apply_async(self._make, (step,))

    def _make(self, step: int) -> Ready | Skipped | None:
        if step in self.quarantined:
            return Skipped()
        batch = self.source.receive(step)
        return None if batch is None else Ready(batch, self.pack(batch))

    def take(self, step: int, look: Callable[[], None]) -> Ready | Skipped | None:
        """The batch of `step`, or None when the run has ended. Calls `look` now and then while it waits, which may raise.

        Waits for: the thread, and so for what the source waits for.
        """
        if self.step != step:
            self.ask(step)
        assert self.coming is not None
        with self.wait:
            since = time.monotonic()
            while not self.coming.ready():
                look()
                self.coming.wait(LOOK_S)
                if time.monotonic() - since > self.deadline_s:
                    raise TimeoutError(f"waited {self.deadline_s:.0f} s for batch {step}, which rank 0 was to send; see its log")
        return self.coming.get()
