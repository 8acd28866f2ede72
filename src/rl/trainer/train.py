"""The training loop. `train` is the life of a run, `train_step` is the algorithm."""

import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.messages import TrainBatch
from rl.metrics import MetricsLog
from rl.parity import run_limit
from rl.status import Status
from rl.trainer import checkpoint, weights
from rl.trainer.config import TrainerConfig
from rl.trainer.data import BatchSource, FromOrchestrator
from rl.trainer.distributed import World
from rl.trainer.fake import FakeBatches, full_batch, step_line
from rl.trainer.loss import LossInputs, compute_loss, custom_function, sample_weights
from rl.trainer.loss_config import CustomConfig
from rl.trainer.memory import explained
from rl.trainer.model import DTYPES, Scores, load_policy, score
from rl.trainer.optim import clip_gradients, gradient_norm, lr_at, make_optimizer
from rl.trainer.packing import Layout, MicroBatch, Packed, pack
from rl.trainer.parallel import localise, reduce_replicas, sum_over_context
from rl.trainer.parity import ParityWatch
from rl.trainer.performance import Timer, Work, performance, work_of
from rl.trainer.prefetch import Prefetch, Ready
from rl.trainer.publisher import Publisher
from rl.trainer.reference import Reference, load_reference
from rl.trainer.sft import meaningful, validate
from rl.trainer.statistics import Statistics
from rl.transport import OrchestratorClient, Wait


class NotFiniteError(Exception):
    """Loss or gradient is nan or infinite; nothing of the step has been applied."""


@dataclass
class Learner:
    """What a step trains, and with what."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    settings: TrainerConfig
    world: World
    reference: Reference | None = None
    parity: ParityWatch | None = None
    """None where nothing samples."""


@dataclass
class Trainer:
    """The live objects of one rank. `metrics` and `status` are rank 0's."""

    config: RLConfig
    base: Path
    learner: Learner
    step: int
    """Optimizer steps done: the policy version of the weights in `model`."""
    checkpoint_step: int
    checkpoint_time: float
    batches: Prefetch
    publisher: Publisher
    work: Work
    metrics: MetricsLog | None
    status: Status | None

    @property
    def world(self) -> World:
        return self.learner.world

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    def doing(self, what: str) -> None:
        if self.status:
            self.status.doing(what, step=self.step)

    def log(self, metrics: dict[str, float]) -> None:
        """Writes the line of this step."""
        if self.metrics:
            self.metrics.write(self.step, metrics)
            if self.config.trainer.data.fake:
                print(step_line(self.step, metrics), flush=True)


def start(config: RLConfig, world: World, base: str, status: Status | None, source: BatchSource | None = None) -> Trainer:
    """Loads the model, and the newest intact checkpoint if there is one. Batches come from `source`, by default the orchestrator."""
    settings, run_dir = config.trainer, config.run_dir
    if isinstance(settings.loss, CustomConfig):
        custom_function(settings.loss.function)  # what is wrong with it is said before a model is loaded
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    reference = load_reference(config, base, model, world)
    optimizer = make_optimizer(model, settings.optim)
    found = checkpoint.newest_sound(run_dir.checkpoints, world)
    step = checkpoint.load(*found, model, optimizer, world) if found else 0
    if settings.data.fake:
        source = FakeBatches(settings.data.fake, model.config.get_text_config().vocab_size, config.seed)
    doing = status.doing if status else lambda what: None
    waits = [Wait(settings.batch_timeout_s, doing) for _ in range(2)]
    client = OrchestratorClient(run_dir.status("orchestrator"), settings.batch_timeout_s, doing) if status and not source else None
    parity = None if source else ParityWatch(run_limit(config.model.dtype), settings.strict_parity, client)
    source = source or FromOrchestrator(client, waits[0], world)
    packing = partial(prepare, config=config, world=world, hidden_size=model.config.get_text_config().hidden_size)
    batches = Prefetch(source, packing, waits[0], settings.rank_timeout_s)
    publisher = Publisher(run_dir, settings.weights, client, waits[1])
    metrics = MetricsLog(run_dir.metrics, "trainer") if status else None
    learner = Learner(model, optimizer, settings, world, reference, parity)
    return Trainer(config, Path(base), learner, step, step, time.monotonic(), batches, publisher, work_of(model), metrics, status)


def train(trainer: Trainer) -> None:
    """Receive, step, publish, checkpoint, log: until max_steps or until the source of batches says that the run has ended.

    Consumes: batches, made ready by a thread while the step before trains. Produces: policy versions, which a thread writes and announces
    while the next step trains; checkpoints; metric lines. Waits for: the two threads, and so for orchestrator and disk.
    """
    config, world, fake = trainer.config, trainer.world, trainer.config.trainer.data.fake
    sampled = not (config.sft or fake)  # each version is what rollouts are sampled from
    first = trainer.step + 1
    if first <= config.max_steps:
        trainer.batches.ask(first)
        try_largest(trainer)
    if trainer.step and not fake:
        publish(trainer, only_missing=True)
    elif before := validation(trainer):
        trainer.log(before)
    for step in range(first, config.max_steps + 1):
        timer = Timer()
        ready = trainer.batches.take(step, trainer.publisher.look)
        timer.lap("wait_for_batch")
        if ready is None:
            break
        if step < config.max_steps:
            trainer.batches.ask(step + 1)
        if step == first:
            trainer.checkpoint_time = time.monotonic()  # the interval counts training, not the wait for inference to come up
        trainer.doing(f"training step {step}")
        lr = lr_at(step, config.trainer.optim, config.max_steps)
        with explained(trainer.model, ready.packed.micro_batches, config, world):
            metrics = train_step(trainer.learner, ready, lr, timer)
        trainer.step = step
        due = checkpoint_is_due(trainer)
        if sampled or (due and not fake):
            publish(trainer)
        timer.lap("publish_weights")
        if due:
            save_checkpoint(trainer)
        timer.lap("checkpoint")
        if due and (parity := trainer.learner.parity) and step < config.max_steps:
            metrics |= parity.at_checkpoint(step, trainer.model, trainer.batches.pack, world)
            timer.lap("parity")
        metrics = meaningful(metrics, trainer.batches.source, step)
        if held_out := validation(trainer):
            metrics |= held_out
            timer.lap("validation")
        trainer.log(
            metrics | timer.metrics() | trainer.publisher.metrics() | performance(ready, timer, trainer.work, config.model.dtype, world)
        )
    if trainer.step > trainer.checkpoint_step and not fake:
        save_checkpoint(trainer)
    trainer.publisher.finish()


def try_largest(trainer: Trainer) -> None:
    """On a GPU: trains a full row of random tokens and drops the gradients, so that out of memory comes now and not at some later step."""
    config, world = trainer.config, trainer.world
    if world.device.type != "cuda":
        return
    trainer.doing("trying a micro batch of full size")
    row_tokens, vocab_size = config.trainer.micro_batch_tokens * world.context_size, trainer.model.config.get_text_config().vocab_size
    rows = trainer.batches.pack(full_batch(world.data_size, row_tokens, config.model.max_model_len, vocab_size)).micro_batches
    with explained(trainer.model, rows, config, world):
        score(trainer.model, rows[0].to(world.device), world).logprobs.sum().backward()
    trainer.learner.optimizer.zero_grad()


def prepare(batch: TrainBatch, config: RLConfig, world: World, hidden_size: int) -> Packed:
    """This rank's part of a batch, with what each token's loss counts. Runs in the thread that fetches batches."""
    settings = config.trainer
    constant_length = settings.loss.constant_length or config.orchestrator.sampling.max_tokens
    max_tokens = settings.micro_batch_tokens * world.context_size  # of a row, which that many ranks share
    layout = Layout(world.data_rank, world.data_size, max_tokens, hidden_size)
    packed = pack(batch, sample_weights(batch.samples, settings.loss, constant_length), layout)
    rows = [localise(row, world) for row in packed.micro_batches]
    return replace(packed, micro_batches=[row.pinned() for row in rows] if world.device.type == "cuda" else rows)


def validation(trainer: Trainer) -> dict[str, float]:
    """The loss of held-out batches that are due now, if the source has any."""
    batches = trainer.batches.source.validation(trainer.step)
    if not batches:
        return {}
    trainer.doing(f"validating version {trainer.step}")
    return validate(trainer.model, batches, trainer.batches.pack, trainer.world)


def train_step(learner: Learner, ready: Ready, lr: float, timer: Timer) -> dict[str, float]:
    """One optimizer step on this rank's micro batches of a batch. Returns the metrics.

    Raises NotFiniteError or ParityError before anything is changed.
    """
    model, optimizer, settings, world = learner.model, learner.optimizer, learner.settings, learner.world
    statistics = Statistics(ready.batch, world.device)
    micro_batches = ready.packed.micro_batches
    for micro_batch in micro_batches:
        batch = micro_batch.to(world.device)
        reference_logprobs = learner.reference.logprobs(batch, world) if learner.reference else None
        scores = score(model, batch, world, entropy_gradient=settings.loss.entropy_coefficient > 0)
        terms = compute_loss(loss_inputs(batch, scores, world, reference_logprobs), settings.loss)
        loss = (terms.loss * batch.weights).sum()
        reduce_replicas(model, micro_batch is micro_batches[-1], world)
        loss.backward()
        statistics.add(batch, loss.detach(), scores, terms)
    metrics = statistics.metrics(world)
    if learner.parity:
        metrics |= learner.parity.judge(statistics.agreement.total(world))
    timer.lap("forward_backward")
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if not (math.isfinite(norm) and math.isfinite(metrics["loss/mean"])):
        raise NotFiniteError(f"loss {metrics['loss/mean']}, gradient norm {norm}")
    clip_gradients(parameters, norm, settings.optim.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    timer.lap("optimizer")
    return metrics | {"optim/grad_norm": norm, "optim/lr": lr}


def loss_inputs(batch: MicroBatch, scores: Scores, world: World, reference_logprobs: Tensor | None = None) -> LossInputs:
    """What the losses see of a micro batch."""

    def sequence_sum(values: Tensor) -> Tensor:
        return sum_over_context(values.new_zeros(len(batch.samples)).index_add(0, batch.sequences, values), world)

    return LossInputs(
        trainer_logprobs=scores.logprobs,
        logprobs=batch.logprobs,
        advantages=batch.advantages,
        entropies=scores.entropies,
        weights=batch.weights,
        sequences=batch.sequences,
        sequence_sum=sequence_sum,
        reference_logprobs=reference_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
    )


def publish(trainer: Trainer, only_missing: bool = False) -> None:
    """Copies the weights of version `step`; the publisher's thread writes and announces them while training goes on."""
    config, version = trainer.config, trainer.step
    trainer.publisher.finish()  # before the copy: two of them would take twice the memory
    there = trainer.world.broadcast_int(config.run_dir.weights(version).is_dir())
    write = None
    if not (only_missing and there):
        trainer.doing(f"publishing version {version}")
        dtype = DTYPES[config.model.dtype]
        tensors = weights.gather_weights(trainer.model, dtype, trainer.world)
        write = partial(weights.write_version, tensors=tensors, model=trainer.model, base=trainer.base, dtype=dtype)
    if trainer.world.is_main:
        trainer.publisher.start(version, write, trainer.checkpoint_step)


def checkpoint_is_due(trainer: Trainer) -> bool:
    """Rank 0's clock decides for all ranks."""
    settings = trainer.config.trainer.checkpoint
    if trainer.config.trainer.data.fake and settings.interval is None:
        return False  # a benchmark writes what is asked for
    if settings.interval is not None:
        due = trainer.step % settings.interval == 0
    else:
        due = time.monotonic() - trainer.checkpoint_time >= settings.interval_s
    return bool(trainer.world.broadcast_int(due or trainer.step == trainer.config.max_steps))


def save_checkpoint(trainer: Trainer) -> None:
    """Saves the state after `step`, whose weights are on disk by then; the interval in seconds counts from the end of the save."""
    run_dir, step = trainer.config.run_dir, trainer.step
    trainer.publisher.finish()
    trainer.doing(f"writing checkpoint {step}")
    checkpoint.save(run_dir.checkpoint(step), step, trainer.model, trainer.learner.optimizer, trainer.world)
    if trainer.world.is_main:
        checkpoint.delete_old(run_dir.checkpoints, trainer.config.trainer.checkpoint)
    trainer.checkpoint_step, trainer.checkpoint_time = step, time.monotonic()
