"""The training loop, and what it needs. `start` builds the live objects of a rank from its
configuration and the newest checkpoint. `Trainer` holds them, and does the work before and after a
step. `train` runs all steps, and `train_step` trains one batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.config.loss import CustomConfig
from rl.config.run import RLConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import weights_digest
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.paths import RunDir, read_origin
from rl.run_dir.status import Phase, RunWarning, Status
from rl.system.errors import RunError
from rl.trainer import determinism
from rl.trainer.data.batch_sources import (
    BatchSource,
    FakeBatches,
    FromExamples,
    FromLog,
    FromOrchestrator,
    Prefetch,
    Skipped,
    prepare,
    quarantined_steps,
    text_of,
    validate,
)
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.data.packing import Packed, compares_with_old
from rl.trainer.departure import Departure
from rl.trainer.loss.common import LossInputs, compute_loss
from rl.trainer.loss.losses import custom_function, loss_function
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import (
    Timer,
    Work,
    explain_out_of_memory,
    performance,
    try_largest,
    work_of,
)
from rl.trainer.measure.statistics import Statistics, TokenColumns, TokenFiles
from rl.trainer.model import lora
from rl.trainer.model.dither import dither
from rl.trainer.model.head import Scores, keep_old, mode_of, score
from rl.trainer.model.policy import DTYPES, load_policy, load_reference, reference_logprobs
from rl.trainer.optim import make_optimizer, optimizer_step
from rl.trainer.parallel.experts import load_metrics
from rl.trainer.parallel.sharding import finish_gradients, reduce_replicas, sum_over_context
from rl.trainer.parallel.world import World
from rl.trainer.replay import Comparer, StateComparer
from rl.trainer.sft.tokens import prepare_data
from rl.trainer.store import checkpoint, versions
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.wire.parity import RUN_LIMITS
from rl.wire.transport import OrchestratorClient, Wait

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
            # the run may have been killed before it did
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

    def copy_state(self) -> Callable[[], None]:
        """Copies the state after `step`. Returns what makes the saver's thread write it, while
        training continues."""
        self.status.enter(Phase.COPYING_STATE, self.step)
        return self.saver.copy(self.step, self.context.model, self.context.optimizer)

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
            self.copy_state()()
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
        # A run resumed from a checkpoint does not log its step again, so the step's line comes
        # first. A trainer that must leave saves before anything slow; `receive` then ends the loop.
        if leaves:
            trainer.log(metrics, ready, timer)
            trainer.copy_state()()
            timer.lap("checkpoint")
        checkpoint_is_due = not leaves and trainer.saver.due(step, trainer.last_step)
        if checkpoint_is_due or leaves or trainer.every_version_is_read:
            trainer.publish()
        timer.lap("publish_weights")
        if checkpoint_is_due:
            metrics |= trainer.probe(timer)
        held_out = trainer.validate(timer)
        write_checkpoint = trainer.copy_state() if checkpoint_is_due else None
        timer.lap("checkpoint")
        if not leaves:
            trainer.log(metrics | held_out, ready, timer)
        elif held_out:  # only if the grace has been long enough
            trainer.write(held_out)
        if write_checkpoint:
            write_checkpoint()
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
        trainer_logprobs=scores.trainer_logprobs,
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


def start(
    config: RLConfig, world: World, base: str, status: Status, departure: Departure
) -> Trainer:
    """Loads the model, and the newest checkpoint if there is one."""
    batches_from = config.batches_from
    settings, run_dir, replay = config.trainer, config.run_dir, config.trainer.data.replay
    # the run whose checkpoints and batches are read
    trained = RunDir(Path(replay.run), Path(replay.weights)) if replay else run_dir
    source: BatchSource | None = None
    if config.kind == "sft" and batches_from != "fake":
        if world.is_main and not replay:
            prepare_data(config, base, status.enter)
        world.barrier()
        source = FromExamples(config, trained.data)
        config = config.model_copy(update={"max_steps": source.num_steps})
    status.enter(Phase.LOADING_MODEL, max_steps=config.max_steps)

    newest, patience_s = first_checkpoint(config, trained, world), settings.patience_s
    context = load_context(config, world, base, newest is None)
    context.status = status
    model, step, digest = context.model, 0, ""
    if newest is None and model.unused:
        text = f"{base}: its model does not use {model.unused}, which no version will have"
        status.warn(RunWarning("unused", "", text))
    if newest is None and (drafting := versions.drafting_layers(Path(base))):
        text = f"{drafting}: layers that draft tokens are not trained, and versions say 0"
        status.warn(RunWarning("unused", "", text))
    if settings.lora or (settings.loss.kl_coefficient and not settings.loss.kl_reference):
        digest = weights_digest(Path(base))
    if newest:
        group = world.new_group(patience_s)
        step = checkpoint.load(newest, model, context.optimizer, world, group, patience_s, digest)

    text_config = model.config.get_text_config()
    fetching, publishing = (Wait(settings.batch_timeout_s, status.enter) for _ in range(2))
    client = None
    if batches_from == "orchestrator":
        if world.is_main:
            client = OrchestratorClient(run_dir, departure.asked.is_set)
        strict = settings.strict_parity
        if strict is None and config.truncates(text_config.vocab_size, replayed=False):
            strict = False
        limit = RUN_LIMITS[config.model.dtype]
        context.parity = ParityWatch(limit, strict, client, bool(settings.lora))
        source = FromOrchestrator(client, fetching, world)
        if settings.token_log.max_gib:
            context.token_files = TokenFiles(run_dir, settings.token_log, status.enter)
    elif settings.data.fake:
        source = FakeBatches(settings.data.fake, text_config.vocab_size, config.seed)
    packing = partial(
        prepare,
        config=config,
        world=world,
        hidden_size=text_config.hidden_size,
        vocab_size=text_config.vocab_size,
        minibatches=settings.minibatches,
        mode=mode_of(*filter(None, (model, context.reference))),
        routers=model.get_output_embeddings().forward.routers,
    )
    quarantined = quarantined_steps(trained, world)
    source = source or FromLog(trained)
    batches = Prefetch(source, packing, fetching, patience_s, quarantined)

    if replay:
        publisher: Publisher = Comparer(run_dir, settings.weights, publishing, world, trained)
        saver: Saver = StateComparer(run_dir, settings, world, step, trained)
    else:
        publisher = Publisher(run_dir, settings.weights, client, publishing, status.warn, world)
        saver = Saver(run_dir, settings, world, step, digest, status.enter)
    metrics = None
    if world.is_main:
        fence = partial(check_fence, run_dir.lock("trainer"))
        metrics = MetricsLog(run_dir.metrics, "trainer", fence)
    work, folder = work_of(model), Path(base)
    return Trainer(
        config, folder, context, step, batches, publisher, saver, work, metrics, status, departure
    )


def load_context(config: RLConfig, world: World, base: str, is_new: bool) -> TrainContext:
    """Loads the base model. `is_new`: no checkpoint takes the place of its weights."""
    settings, dtype = config.trainer, config.model.dtype
    determinism.apply(settings, world.device)
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # fails here, before the model is loaded
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    # masters of a checkpoint have it
    if is_new and dtype == "bfloat16" and not settings.lora:
        dither(model, config.seed)
    reference = load_reference(config, base, model, world)
    if world.device.type == "cuda":
        writes, offloads = config.batches_from in WRITING, settings.optim.offload
        checkpoint.require_host_memory(model, DTYPES[dtype], writes, offloads, world)
    optimizer = make_optimizer(model, settings.optim)
    return TrainContext(model, optimizer, settings, world, reference)


def first_checkpoint(config: RLConfig, run_dir: RunDir, world: World) -> Path | None:
    """Returns the checkpoint that training starts from, None for the base model. A replay starts
    from the one that its settings name. Raises RunError if a branch has lost its first one."""
    if replay := config.trainer.data.replay:
        return run_dir.checkpoint(replay.start) if replay.start else None
    newest = checkpoint.newest(run_dir.checkpoints, world)
    if newest is None and (parent := read_origin(run_dir)):
        raise RunError(
            f"{run_dir.checkpoints} is empty, but this run starts at step {parent.step} "
            f"({parent}): branch it again"
        )
    return newest
