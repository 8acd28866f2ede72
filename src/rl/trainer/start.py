"""Builds the live objects of a rank from its configuration (`start`), and defines what they do around a step (`Trainer`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rl.config.loss import CustomConfig
from rl.config.run import RLConfig
from rl.config.trainer import TrainerConfig
from rl.run_dir.files import move, write_file
from rl.run_dir.lease import check_fence
from rl.run_dir.metrics import MetricsLog
from rl.run_dir.origin import read_origin
from rl.run_dir.paths import RunDir
from rl.run_dir.status import Phase, RunWarning, Status
from rl.system.errors import RunError
from rl.trainer import determinism
from rl.trainer.data.batch_sources import BatchSource, FromOrchestrator, quarantined_steps
from rl.trainer.data.fake import FakeBatches, step_line
from rl.trainer.data.packing import Packed
from rl.trainer.data.prefetch import Prefetch, Skipped, prepare
from rl.trainer.loss.losses import custom_function
from rl.trainer.measure.memory import try_largest
from rl.trainer.measure.parity import ParityWatch
from rl.trainer.measure.performance import Timer, Work, performance, work_of
from rl.trainer.model.policy import DTYPES, load_policy, mode_of
from rl.trainer.model.reference import load_reference
from rl.trainer.optim import make_optimizer
from rl.trainer.parallel.world import World
from rl.trainer.replay import Comparer, StateComparer, origin
from rl.trainer.sft.source import validate
from rl.trainer.store import checkpoint, versions
from rl.trainer.store.publisher import Publisher
from rl.trainer.store.saver import Saver
from rl.trainer.store.single_task_thread import SingleTaskThread
from rl.trainer.store.token_files import TokenFiles
from rl.wire.parity import RUN_LIMITS
from rl.wire.transport import OrchestratorClient, Wait


@dataclass
class TrainContext:
    """The model that a step trains, with everything a step needs."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    settings: TrainerConfig
    world: World
    reference: PreTrainedModel | None = None
    """The frozen model of the KL term; the policy itself if it has adapters, which are switched off for this."""
    parity: ParityWatch | None = None
    """Compares trainer and inference; None if the batches do not come from the orchestrator."""
    status: Status | None = None
    """Shows progress by micro batch; None if nobody reads it."""
    token_files: TokenFiles | None = None
    """Writes the values computed at each token; None if they are not logged, or if the run has no batch files to read them with."""

    @property
    def writers(self) -> tuple[SingleTaskThread, ...]:
        """Threads that write what steps have computed; their errors end a wait."""
        return (self.token_files.thread,) if self.token_files else ()

    def advance(self) -> None:
        """Reports one more micro batch as done."""
        if self.status:
            self.status.advance()


@dataclass
class Trainer:
    """The live objects of one rank, and the work before and after a step. Every rank calls every method."""

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
    version: versions.PublishedVersion | None = None
    """The version published last; None on all ranks but 0."""

    @property
    def last(self) -> int:
        """The last step to train."""
        replay = self.config.trainer.data.replay
        return min(self.config.max_steps, replay.until) if replay else self.config.max_steps

    @property
    def every_version_is_read(self) -> bool:
        """Whether every version is sampled from or compared by a replay; otherwise only those of checkpoints are published."""
        settings = self.config.trainer.data
        return not (self.config.sft or settings.fake) or bool(settings.replay)

    def begin(self) -> None:
        """Requests the first batch, tries out memory on a GPU, then publishes the version resumed from or validates the base model."""
        if self.step < self.last:
            self.batches.ask(self.step + 1)
            if self.context.world.device.type == "cuda":
                self.status.enter(Phase.TRYING_MEMORY)
                whole = partial(self.batches.pack, minibatches=1)
                try_largest(self.context.model, self.context.optimizer, whole, self.config, self.context.world)
        if self.step:
            self.publish()  # the run may have been killed before it did; an intact version on disk is not written again
        elif before := self.validate():
            self.write(before)

    def receive(self, step: int) -> Packed | Skipped | None:
        """Returns the batch of `step`, or None if the run has ended, and requests the next one. Raises the errors of all threads."""
        ready = self.batches.take(step, (self.publisher.thread, self.saver.thread, *self.context.writers))
        if ready is not None and step < self.last:
            self.batches.ask(step + 1)
        self.saver.start_clock()
        return ready

    def publish(self) -> None:
        """Copies the weights of version `step`; the publisher's thread writes and announces them while training continues."""
        context = self.context
        if context.settings.data.fake:
            return
        self.status.enter(Phase.PUBLISHING, self.step)
        self.publisher.finish()  # before the copy: two copies would take twice the memory
        made_by = determinism.conditions(context.settings, context.world, mode_of(context.model))
        dtype = DTYPES[self.config.model.dtype]
        self.version = versions.snapshot(context.model, self.base, dtype, made_by, context.world, self.version)
        self.publisher.start(self.step, self.version, {self.saver.step, self.saver.began})

    def probe(self, timer: Timer) -> dict[str, float]:
        """Compares trainer and inference on version `step` if no batch since the last checkpoint allowed it. Returns the metrics."""
        context = self.context
        if not context.parity:
            return {}
        metrics = context.parity.at_checkpoint(self.step, context.model, self.batches.pack, context.world)
        timer.lap("parity")
        return metrics

    def validate(self, timer: Timer | None = None) -> dict[str, float]:
        """Returns the loss on the held-out batches that are due now; empty if the source has none, and in a replay."""
        batches = self.batches.source.validation(self.step)
        if not batches or self.config.trainer.data.replay:
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
            metrics |= performance(ready, timer, self.work, dtype, context.world, context.settings.epochs)
        self.write(metrics)

    def write(self, metrics: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.write(self.step, metrics)
            if self.config.trainer.data.fake:
                print(step_line(self.step, metrics), flush=True)

    def finish(self) -> None:
        """Saves a checkpoint of the last step if there is none, and waits for the writing threads."""
        if self.step > self.saver.began and not self.config.trainer.data.fake:
            self.save_checkpoint()
        self.publisher.finish()
        if self.context.token_files:
            self.context.token_files.finish()
        self.status.enter(Phase.CHECKPOINTING, self.saver.began)
        self.saver.finish()


def start(
    config: RLConfig, world: World, base: str, status: Status, source: BatchSource | None = None, found: checkpoint.Found | None = None
) -> Trainer:
    """Loads the model, and the newest intact checkpoint if there is one. Batches come from `source`, by default the orchestrator.

    `found`: the checkpoints that rank 0 has already verified, if it has.
    """
    settings, run_dir = config.trainer, config.run_dir
    replay = settings.data.replay
    determinism.apply(settings, world.device)
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # fails here, before the model is loaded
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    reference = load_reference(config, base, model, world)
    optimizer = make_optimizer(model, settings.optim)
    log = origin(replay) if replay else run_dir
    sound = newest_checkpoint(config, log, world, found, status.warn)
    step = checkpoint.load(*sound, model, optimizer, world) if sound else 0
    if settings.data.fake:
        source = FakeBatches(settings.data.fake, model.config.get_text_config().vocab_size, config.seed)
    waits = [Wait(settings.batch_timeout_s, status.enter) for _ in range(2)]
    asks = world.is_main and not source
    client = OrchestratorClient(run_dir) if asks else None
    strict = False if settings.strict_parity is None and config.truncates else settings.strict_parity
    parity = None if source else ParityWatch(RUN_LIMITS[config.model.dtype], strict, client)
    source = source or FromOrchestrator(client, waits[0], world)
    hidden_size, minibatches = model.config.get_text_config().hidden_size, settings.minibatches
    mode = mode_of(*(each for each in (model, reference) if each))
    packing = partial(prepare, config=config, world=world, hidden_size=hidden_size, minibatches=minibatches, mode=mode)
    batches = Prefetch(source, packing, waits[0], settings.rank_timeout_s, quarantined_steps(log, world))
    publisher, saver = Publisher(run_dir, settings.weights, client, waits[1], status.warn), Saver(run_dir, settings, world, step)
    if replay:
        publisher, saver = Comparer(run_dir, settings.weights, waits[1], log), StateComparer(run_dir, settings, world, step, log)
    # The last status must not say "training" when one of these threads fails: readers would blame the batch.
    publisher.thread.on_error = lambda: status.enter(Phase.PUBLISHING, publisher.began)
    saver.thread.on_error = lambda: status.enter(Phase.CHECKPOINTING, saver.began)
    metrics = MetricsLog(run_dir.metrics, "trainer", partial(check_fence, run_dir.lock("trainer"))) if world.is_main else None
    none = replay or config.sft or settings.data.fake or not settings.token_log.max_gib
    token_files = None if none else TokenFiles(run_dir, settings.token_log)
    context = TrainContext(model, optimizer, settings, world, reference, parity, status, token_files)
    return Trainer(config, Path(base), context, step, batches, publisher, saver, work_of(model), metrics, status)


def newest_checkpoint(
    config: RLConfig, log: RunDir, world: World, found: checkpoint.Found | None, warn: Callable[[RunWarning], None]
) -> tuple[Path, dict] | None:
    """Returns the checkpoint that training starts from, None for the base model. A replay starts from the one that its settings name.

    Moves damaged checkpoints away so that retention does not count them, unless no intact one is left: then `rl` repairs the run.
    `warn`: see Status.warn. Raises RunError if a branch has lost its first checkpoint.
    """
    replay = config.trainer.data.replay
    if replay:
        at = f"{replay.start:06d}"
        return (log.checkpoints / at, checkpoint.read_manifest(log.checkpoints / at)) if replay.start else None
    sound = checkpoint.newest_sound(log.checkpoints, world, found)
    if sound is None and (origin := read_origin(log)):
        raise RunError(f"{log.checkpoints} is empty, but this run starts at step {origin.step} ({origin}): branch it again")
    if world.is_main and found and sound:
        for remark in put_away(log, found[1], int(sound[0].name)):
            warn(RunWarning("damaged", "", remark))
    return sound


def put_away(run_dir: RunDir, damaged: dict[int, str], start: int) -> list[str]:
    """Moves damaged checkpoints to `discarded/`, as a repair by `rl` does. Writes and returns a remark on each. `damaged`: the fault of
    each checkpoint by step; `start`: the checkpoint that training starts from instead."""
    away, remarks = run_dir.new_discarded(), []
    for step, fault in damaged.items():
        target = away / "checkpoints" / f"{step:06d}"
        move(run_dir.checkpoint(step), target)
        remarks.append(f"{fault}; the trainer starts from checkpoint {start} (moved to {target})")
    if remarks:
        write_file(away / "remarks.txt", "\n".join([*remarks, ""]).encode())
    return remarks
