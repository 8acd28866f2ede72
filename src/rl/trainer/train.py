"""The training loop. `Trainer` holds one rank's objects and does the work before and after a step;
`start.py` makes it. `train` runs all steps, and `train_step` trains one batch."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.config.trainer import TrainerConfig
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.status import Phase, Status
from rl.system.errors import RunError
from rl.trainer import determinism
from rl.trainer.data.fake import text_of
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.data.minibatches import compares_with_old
from rl.trainer.data.packing import Packed
from rl.trainer.data.prefetch import Prefetch, Skipped
from rl.trainer.departure import Departure
from rl.trainer.loss.common import LossInputs, compute_loss
from rl.trainer.loss.losses import loss_function
from rl.trainer.measure.experts import load_metrics
from rl.trainer.measure.memory import explain_out_of_memory, try_largest
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer, Work, performance
from rl.trainer.measure.statistics import Statistics
from rl.trainer.measure.tokens import TokenColumns, TokenFiles
from rl.trainer.model import lora
from rl.trainer.model.head import Scores, keep_old, mode_of, score
from rl.trainer.model.policy import DTYPES
from rl.trainer.model.reference import reference_logprobs
from rl.trainer.optim import optimizer_step
from rl.trainer.parallel.sharding import finish_gradients, reduce_replicas, sum_over_context
from rl.trainer.parallel.world import World
from rl.trainer.sft.source import validate
from rl.trainer.store import versions
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver

WRITING = ("orchestrator", "examples")
"""Sources of batches with which versions and checkpoints are written: a replay compares them, and
a benchmark on random samples has none."""


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
    def last_step(self) -> int:
        """The last step to train."""
        replay = self.config.trainer.data.replay
        return min(self.config.max_steps, replay.until) if replay else self.config.max_steps

    @property
    def every_version_is_read(self) -> bool:
        """Whether every version is sampled from or compared by a replay; otherwise only those of
        checkpoints are published."""
        return self.config.batches_from in ("orchestrator", "replay")

    def begin(self) -> None:
        """Requests the first batch, tries out memory on a GPU, then publishes the version
        resumed from or validates the base model."""
        if self.step < self.last_step:
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
        self.departure.can_save = self.config.batches_from in WRITING

    def receive(self, step: int) -> Packed | Skipped | None:
        """Returns the batch of `step`, and requests the next one. None: the run has ended, or
        this trainer leaves it. Raises the errors of all threads."""
        writers = filter(None, (self.publisher, self.saver, self.context.token_files))
        ready = self.batches.take(step, [writer.thread for writer in writers])
        if self.leaves():
            return None
        if ready is not None and step < self.last_step:
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
        if self.config.batches_from == "fake":
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
        if not context.parity or self.config.kind == "recorded":  # nobody could answer
            return {}
        metrics = context.parity.at_checkpoint(
            self.step, context.model, self.batches.pack, context.world, self.step < self.last_step
        )
        timer.lap("parity")
        return metrics

    def validate(self, timer: Timer | None = None) -> dict[str, float]:
        """Returns the loss on the held-out batches that are due now; empty if the source has
        none, and in a replay."""
        batches = self.batches.source.validation(self.step)
        if not batches or self.config.batches_from == "replay":
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
            if self.config.batches_from == "fake":
                print(f"step {self.step}: {text_of(metrics)}", flush=True)

    def finish(self) -> None:
        """Saves a checkpoint of the last step if there is none, and waits for the writing
        threads."""
        if self.step > self.saver.newest_started and self.config.batches_from != "fake":
            self.save_checkpoint()
        self.publisher.finish()
        if self.context.token_files:
            self.context.token_files.finish()
        self.status.enter(Phase.CHECKPOINTING, self.saver.newest_started)
        self.saver.finish()


def train(trainer: Trainer) -> bool:
    """Receives, trains and publishes until the last step, or until the batch source reports that
    the run has ended, or until SIGTERM.

    Returns whether SIGTERM has ended it, see departure.py: then the run goes on with the next
    start.

    Consumes: batches, which a thread fetches during the previous step. Produces: metric lines, and
    policy versions and checkpoints, which two threads write during the next steps. Waits for: these
    three threads, and through them the orchestrator and the disk.
    """
    trainer.begin()
    world, has_trained = trainer.context.world, False
    for step in range(trainer.step + 1, trainer.last_step + 1):
        timer = Timer(step, world.device)
        ready = trainer.receive(step)
        timer.lap("wait_for_batch")
        if ready is None:
            break
        if isinstance(ready, Skipped):
            metrics = {"quarantined": 1.0}
        else:
            metrics = train_batch(trainer, ready, timer)
            if not has_trained:  # the first compiles, on one rank for longer than on another
                world.set_timeout(trainer.config.trainer.rank_timeout_s)
                lora.warn_of_untrained(trainer.context.model, trainer.context.optimizer)
            has_trained = True
        trainer.step = step
        leaves = trainer.leaves()
        # A trainer that must leave saves before anything slow; `receive` then ends the loop. A run
        # resumed from this checkpoint does not log this step again.
        if leaves:
            trainer.log(metrics, ready, timer)
            trainer.save_checkpoint()
            timer.lap("checkpoint")
        checkpoint_is_due = not leaves and trainer.saver.due(step, trainer.last_step)
        if checkpoint_is_due or leaves or trainer.every_version_is_read:
            trainer.publish()
        timer.lap("publish_weights")
        if checkpoint_is_due:
            metrics |= trainer.probe(timer)
        held_out = trainer.validate(timer)
        # after everything slow: a run resumed from this checkpoint does not log this step again
        if checkpoint_is_due:
            trainer.save_checkpoint()
        timer.lap("checkpoint")
        if not leaves:
            trainer.log(metrics | held_out, ready, timer)
        elif held_out:  # only if the grace has been long enough
            trainer.write(held_out)
    trainer.finish()
    return trainer.leaves()


def train_batch(trainer: Trainer, packed: Packed, timer: Timer) -> dict[str, float]:
    """Trains one step at its scheduled learning rate and returns the metrics. Raises RunError,
    explained, if memory runs out."""
    config, context, step = trainer.config, trainer.context, packed.batch.step
    if config.trainer.router_replay == "engine" and not all(
        sample.routes for sample in packed.batch.samples if sample.spans
    ):
        raise RunError(
            f"trainer.router_replay = engine: batch {step} has tokens without routes: it was "
            "sampled by a server without trainer.router_replay = engine, or through NeMo Gym; set "
            "it to trainer or off"
        )
    trainer.status.enter(Phase.TRAINING, step)
    lr = config.trainer.optim.lr_at(step, config.max_steps)
    with explain_out_of_memory(context.model, packed.micro_batches, context.world):
        metrics = train_step(context, packed, lr, timer)
    return trainer.batches.source.meaningful(metrics, step)


def train_step(context: TrainContext, packed: Packed, lr: float, timer: Timer) -> dict[str, float]:
    """Trains one step on this rank's micro batches: one optimizer step per minibatch and epoch.
    Returns the metrics.

    Raises RunError if numbers are not finite or, with strict parity, if trainer and inference
    disagree. The step then leaves no trace: the disk only holds states between steps.
    """
    world, norms, tokens = context.world, list[float](), None
    if context.token_files:
        count, has_reference = packed.batch.num_loss_tokens, bool(context.reference)
        tokens = TokenColumns(count, world.device, has_reference)
    statistics = Statistics(packed.batch, world.device, tokens)
    model, step, optim = context.model, packed.batch.step, context.settings.optim
    if compares_with_old(context.settings):
        # Minibatches after the first are scored now, before the weights change. The first is scored
        # in its own step.
        for micro_batch in chain(*packed.minibatches[1:]):
            with torch.no_grad():
                keep_old(model, micro_batch, score(model, micro_batch.to(world.device), world))
            context.advance()
        timer.lap("old_logprobs")
    parity: dict[str, float] = {}
    for minibatch in packed.minibatches * context.settings.epochs:
        accumulate(context, packed, minibatch, statistics, is_first_update=not norms)
        if context.parity and not norms:
            parity = context.parity.judge(statistics.parity.total(world), step - 1)
        timer.lap("forward_backward")
        total = statistics.total_loss(world)
        norms.append(optimizer_step(model, context.optimizer, optim, lr, step, total))
        timer.lap("optimizer")
    metrics = statistics.metrics(world) | parity | load_metrics(model, world)
    metrics["loss/mean"] /= len(norms)
    if tokens and context.token_files:
        context.token_files.start(step, tokens.columns(world))
    timer.lap("forward_backward")
    return metrics | {"optim/grad_norm": fmean(norms), "optim/lr": lr, "optim/steps": len(norms)}


def accumulate(
    context: TrainContext,
    packed: Packed,
    minibatch: list[MicroBatch],
    statistics: Statistics,
    is_first_update: bool,
) -> None:
    """Adds the gradient of a minibatch's loss to the model's.

    `is_first_update`: no optimizer step of this batch has run yet.

    Writes reference_logprobs and old_logprobs into the micro batches: later epochs read them
    instead of computing them again.
    """
    model, settings, world = context.model, context.settings, context.world
    for micro_batch in minibatch:
        batch = micro_batch.to(world.device)
        if context.reference and batch.reference_logprobs is None:
            micro_batch.reference_logprobs = batch.reference_logprobs = reference_logprobs(
                context.reference, batch, world
            )
        scores = score(model, batch, world, entropy_gradient=settings.loss.entropy_coefficient > 0)
        if is_first_update and compares_with_old(settings):
            keep_old(model, micro_batch, scores)
            batch.old_logprobs = micro_batch.old_logprobs
        inputs = loss_inputs(batch, len(packed.batch.samples), scores, world)
        terms = compute_loss(inputs, settings.loss, loss_function(settings.loss))
        loss = (terms.loss * batch.weights).sum()
        reduce_replicas(model, micro_batch is minibatch[-1], world)
        loss.backward()
        statistics.add(batch, loss.detach(), scores, terms, is_first_update)
        context.advance()
    finish_gradients(model, world)


def loss_inputs(batch: MicroBatch, num_samples: int, scores: Scores, world: World) -> LossInputs:
    """Returns the inputs of the loss functions for one micro batch; `num_samples` is the batch's
    number of samples."""

    def sequence_sum(values: Tensor) -> Tensor:
        return sum_over_context(
            values.new_zeros(num_samples).index_add(0, batch.sequences, values), world
        )

    return LossInputs(
        trainer_logprobs=scores.logprobs,
        logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        entropies=scores.entropies,
        weights=batch.weights,
        sequences=batch.sequences,
        sequence_sum=sequence_sum,
        reference_logprobs=batch.reference_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
    )
