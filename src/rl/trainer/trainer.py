"""The live objects of a rank (`Trainer`), with what they do before and after a step. `start.py`
makes them, `train.py` trains with them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.config.trainer import TrainerConfig
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.status import Phase, Status
from rl.trainer import determinism
from rl.trainer.data.fake import text_of
from rl.trainer.data.packing import Packed
from rl.trainer.data.prefetch import Prefetch, Skipped
from rl.trainer.departure import Departure
from rl.trainer.measure.memory import try_largest
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer, Work, performance
from rl.trainer.measure.tokens import TokenFiles
from rl.trainer.model.head import mode_of
from rl.trainer.model.policy import DTYPES
from rl.trainer.parallel.world import World
from rl.trainer.sft.source import validate
from rl.trainer.store import versions
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver

Kind = Literal["rl", "recorded", "sft", "fake", "replay"]
SAMPLED = ("rl", "recorded")
"""The kinds whose batches come from the orchestrator: it reads every version, and its
log-probabilities are compared."""
WRITING = (*SAMPLED, "sft")
"""The kinds that write versions and checkpoints: a replay compares them, and a benchmark on random
samples has none."""


def kind_of(config: RLConfig) -> Kind:
    """Returns what the trainer does in a run."""
    data = config.trainer.data
    if data.fake or data.replay:
        return "fake" if data.fake else "replay"
    return "sft" if config.sft else "recorded" if config.recorded else "rl"


@dataclass
class TrainContext:
    """The model that a step trains, with everything a step needs."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    settings: TrainerConfig
    world: World
    reference: PreTrainedModel | None = None
    """The frozen model of the KL term; the policy itself if it has adapters, which are switched
    off for this."""
    parity: ParityWatch | None = None
    """Compares trainer and inference; None if the batches do not come from the orchestrator."""
    status: Status | None = None
    """Shows progress by micro batch; None if nobody reads it."""
    token_files: TokenFiles | None = None
    """Writes the values computed at each token; None if they are not logged, or if the run has
    no batch files to read them with."""

    def advance(self) -> None:
        """Reports one more micro batch as done."""
        if self.status:
            self.status.advance()


@dataclass
class Trainer:
    """The live objects of one rank, and the work before and after a step. Every rank calls every
    method."""

    config: RLConfig
    base: Path
    context: TrainContext
    step: int
    """Number of batches trained, which is the policy version of the model's weights."""
    batches: Prefetch
    publisher: Publisher
    saver: Saver
    work: Work
    metrics: MetricsLog | None
    """None on all ranks but 0."""
    status: Status
    departure: Departure
    version: versions.PublishedVersion | None = None
    """The version published last, of which this rank holds its slices."""

    @property
    def last(self) -> int:
        """The last step to train."""
        replay = self.config.trainer.data.replay
        return min(self.config.max_steps, replay.until) if replay else self.config.max_steps

    @property
    def kind(self) -> Kind:
        return kind_of(self.config)

    @property
    def every_version_is_read(self) -> bool:
        """Whether every version is sampled from or compared by a replay; otherwise only those of
        checkpoints are published."""
        return self.kind in (*SAMPLED, "replay")

    def begin(self) -> None:
        """Requests the first batch, tries out memory on a GPU, then publishes the version
        resumed from or validates the base model."""
        if self.step < self.last:
            self.batches.ask(self.step + 1)
            if self.context.world.device.type == "cuda":
                self.status.enter(Phase.TRYING_MEMORY)
                context, whole = self.context, partial(self.batches.pack, minibatches=1)
                try_largest(context.model, context.optimizer, whole, self.config, context.world)
        if self.step:
            # the run may have been killed before it did; an intact version on disk is not written
            # again
            self.publish()
        elif before := self.validate():
            self.write(before)
        self.departure.can_save = self.kind in WRITING

    def receive(self, step: int) -> Packed | Skipped | None:
        """Returns the batch of `step`, and requests the next one. None: the run has ended, or
        this trainer leaves it. Raises the errors of all threads."""
        writers = filter(None, (self.publisher, self.saver, self.context.token_files))
        ready = self.batches.take(step, [writer.thread for writer in writers])
        if self.leaves():
            return None
        if ready is not None and step < self.last:
            self.batches.ask(step + 1)
        self.saver.start_clock()
        return ready

    def leaves(self) -> bool:
        """Whether this trainer ends after it has saved its state, although the run has not
        ended. The same on every rank."""
        return self.departure.agreed(self.context.world)

    def publish(self) -> None:
        """Copies the weights of version `step`; the publisher's thread writes and announces them
        while training continues."""
        context = self.context
        if self.kind == "fake":
            return
        self.status.enter(Phase.PUBLISHING, self.step)
        self.publisher.free()  # before the copy: two copies would take twice the memory
        context.world.barrier()  # rank 0 may have waited long for the orchestrator or the disk
        made_by = determinism.conditions(context.settings, context.world, mode_of(context.model))
        dtype = DTYPES[self.config.model.dtype]
        self.version = versions.snapshot(
            context.model, self.base, dtype, made_by, self.publisher.ranks, self.version
        )
        self.publisher.start(self.step, self.version, {self.saver.step, self.saver.newest_started})

    def probe(self, timer: Timer) -> dict[str, float]:
        """Compares trainer and inference on version `step`, unless it is the last, if no batch
        since the last checkpoint allowed it.

        Returns the metrics.
        """
        context = self.context
        if not context.parity or self.kind == "recorded":  # nobody could answer
            return {}
        metrics = context.parity.at_checkpoint(
            self.step, context.model, self.batches.pack, context.world, self.step < self.last
        )
        timer.lap("parity")
        return metrics

    def validate(self, timer: Timer | None = None) -> dict[str, float]:
        """Returns the loss on the held-out batches that are due now; empty if the source has
        none, and in a replay."""
        batches = self.batches.source.validation(self.step)
        if not batches or self.kind == "replay":
            return {}
        self.status.enter(Phase.VALIDATING, self.step)
        metrics = validate(self.context.model, batches, self.batches.pack, self.context.world)
        if timer:
            timer.lap("validation")
        return metrics

    def save_checkpoint(self) -> None:
        """Copies the state after `step`; the saver's thread writes it while training continues."""
        self.status.enter(Phase.COPYING_STATE, self.step)
        self.saver.save(self.step, self.context.model, self.context.optimizer)

    def log(self, metrics: dict[str, float], ready: Packed | Skipped, timer: Timer) -> None:
        """Writes this step's metrics line, with timings and throughput."""
        metrics = metrics | timer.metrics() | self.publisher.metrics() | self.saver.metrics()
        if isinstance(ready, Packed):
            dtype, context = self.config.model.dtype, self.context
            metrics |= performance(
                ready, timer, self.work, dtype, context.world, context.settings.epochs
            )
        self.write(metrics)

    def write(self, metrics: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.write(self.step, metrics)
            if self.kind == "fake":
                print(f"step {self.step}: {text_of(metrics)}", flush=True)

    def finish(self) -> None:
        """Saves a checkpoint of the last step if there is none, and waits for the writing
        threads."""
        if self.step > self.saver.newest_started and self.kind != "fake":
            self.save_checkpoint()
        self.publisher.finish()
        if self.context.token_files:
            self.context.token_files.finish()
        self.status.enter(Phase.CHECKPOINTING, self.saver.newest_started)
        self.saver.finish()
