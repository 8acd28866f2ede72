"""The training loop. `train` is the life of a run, `train_step` is the algorithm."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.messages import TrainBatch
from rl.metrics import MetricsLog
from rl.status import Status
from rl.trainer import weights
from rl.trainer.config import TrainerConfig
from rl.trainer.determinism import conditions
from rl.trainer.distributed import World
from rl.trainer.fake import full_batch, step_line
from rl.trainer.loss import LossInputs, compute_loss, sample_weights
from rl.trainer.memory import explained
from rl.trainer.model import DTYPES, Scores, score
from rl.trainer.optim import clip_gradients, gradient_norm, lr_at
from rl.trainer.packing import Layout, MicroBatch, Packed, pack
from rl.trainer.parallel import localise, reduce_replicas, sum_over_context
from rl.trainer.parity import ParityWatch
from rl.trainer.performance import Timer, Work, performance
from rl.trainer.prefetch import Prefetch, Ready, Skipped
from rl.trainer.publisher import Publisher
from rl.trainer.reference import Reference
from rl.trainer.saver import Saver
from rl.trainer.sft import meaningful, validate
from rl.trainer.statistics import Statistics


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
    status: Status | None = None
    """Where progress is counted."""


@dataclass
class Trainer:
    """The live objects of one rank. `metrics` is rank 0's."""

    config: RLConfig
    base: Path
    learner: Learner
    step: int
    """Optimizer steps done: the policy version of the weights in `model`."""
    batches: Prefetch
    publisher: Publisher
    saver: Saver
    work: Work
    metrics: MetricsLog | None
    status: Status

    @property
    def world(self) -> World:
        return self.learner.world

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    def doing(self, what: str) -> None:
        self.status.doing(what, step=self.step)

    def look(self) -> None:
        """Raises the error of a thread that has ended with one."""
        self.publisher.look()
        self.saver.look()

    def log(self, metrics: dict[str, float]) -> None:
        """Writes the line of this step."""
        if self.metrics:
            self.metrics.write(self.step, metrics)
            if self.config.trainer.data.fake:
                print(step_line(self.step, metrics), flush=True)


def train(trainer: Trainer) -> None:
    """Receive, step, publish, checkpoint, log: until max_steps or until the source of batches says that the run has ended.

    Consumes: batches, made ready by a thread while the step before trains. Produces: policy versions and checkpoints, which two threads
    write while the next steps train; metric lines. Waits for: the three threads, and so for orchestrator and disk.
    """
    config, world, fake = trainer.config, trainer.world, trainer.config.trainer.data.fake
    # Each version is what rollouts are sampled from, or what a replay compares.
    sampled = not (config.sft or fake) or bool(config.trainer.data.replay)
    first = trainer.step + 1
    if first <= config.max_steps:
        trainer.batches.ask(first)
        try_largest(trainer)
    if trainer.step and not fake:
        publish(trainer)  # a kill may have come before; what is there already is not written again
    elif before := validation(trainer):
        trainer.log(before)
    for step in range(first, config.max_steps + 1):
        timer = Timer()
        ready = trainer.batches.take(step, trainer.look)
        timer.lap("wait_for_batch")
        if ready is None:
            break
        if step < config.max_steps:
            trainer.batches.ask(step + 1)
        if step == first:
            trainer.saver.start_clock()  # the interval counts training, not the wait for inference to come up
        metrics = {"quarantined": 1.0} if isinstance(ready, Skipped) else train_batch(trainer, step, ready, timer)
        trainer.step = step
        due = checkpoint_is_due(trainer)
        if sampled or (due and not fake):
            publish(trainer)
        timer.lap("publish_weights")
        if due and (parity := trainer.learner.parity) and step < config.max_steps:
            metrics |= parity.at_checkpoint(step, trainer.model, trainer.batches.pack, world)
            timer.lap("parity")
        if isinstance(ready, Ready):
            metrics = meaningful(metrics, trainer.batches.source, step)
        if held_out := validation(trainer):
            metrics |= held_out
            timer.lap("validation")
        if due:  # after all that takes long: a run that goes on from this checkpoint does not write this step's line again
            save_checkpoint(trainer)
        timer.lap("checkpoint")
        speed = performance(ready, timer, trainer.work, config.model.dtype, world) if isinstance(ready, Ready) else {}
        trainer.log(metrics | timer.metrics() | trainer.publisher.metrics() | speed)
    if trainer.step > trainer.saver.began and not fake:
        save_checkpoint(trainer)
    trainer.publisher.finish()
    trainer.doing(f"writing checkpoint {trainer.saver.began}")
    trainer.saver.finish()


def train_batch(trainer: Trainer, step: int, ready: Ready, timer: Timer) -> dict[str, float]:
    """One optimizer step, with what surrounds it. Returns the metrics."""
    config = trainer.config
    trainer.doing(f"training step {step}")
    lr = lr_at(step, config.trainer.optim, config.max_steps)
    with explained(trainer.model, ready.packed.micro_batches, config, trainer.world):
        return train_step(trainer.learner, ready, lr, timer)


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
        if learner.status:
            learner.status.advance()
    metrics = statistics.metrics(world)
    if learner.parity:
        metrics |= learner.parity.judge(statistics.agreement.total(world))
    timer.lap("forward_backward")
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    if not (math.isfinite(norm) and math.isfinite(metrics["loss/mean"])):
        found = f"step {ready.batch.step}: loss {metrics['loss/mean']}, gradient norm {norm}"
        raise NotFiniteError(f"{found}; nothing of the step was applied. Its file in rollouts/ shows what the batch was made of")
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


def publish(trainer: Trainer) -> None:
    """Copies the weights of version `step`; the publisher's thread writes and announces them while training goes on."""
    config, world = trainer.config, trainer.world
    trainer.doing(f"publishing version {trainer.step}")
    trainer.publisher.finish()  # before the copy: two of them would take twice the memory
    dtype = DTYPES[config.model.dtype]
    tensors = weights.gather_weights(trainer.model, dtype, world)
    made_by = conditions(config.trainer, world)
    version = weights.Version(tensors, trainer.model, trainer.base, dtype, made_by) if world.is_main else None
    trainer.publisher.start(trainer.step, version, {trainer.saver.step, trainer.saver.began})


def checkpoint_is_due(trainer: Trainer) -> bool:
    settings = trainer.config.trainer
    if settings.data.fake and settings.checkpoint.interval is None:
        return False  # a benchmark writes what is asked for
    return trainer.saver.due(trainer.step, trainer.config.max_steps)


def save_checkpoint(trainer: Trainer) -> None:
    """Copies the state after `step`; the saver's thread writes it while training goes on."""
    trainer.doing(f"copying the state of step {trainer.step} for a checkpoint")
    trainer.saver.save(trainer.step, trainer.model, trainer.learner.optimizer)
