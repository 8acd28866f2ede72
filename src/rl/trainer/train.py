"""The training loop: `train` goes through the steps of a run, `train_step` is the algorithm."""

import math

from torch import Tensor

from rl.run_dir.status import Phase
from rl.system.errors import RESTART, RunError
from rl.trainer.loss import LossInputs, compute_loss
from rl.trainer.losses import loss_function
from rl.trainer.measure.memory import explain_out_of_memory
from rl.trainer.measure.performance import Timer
from rl.trainer.measure.statistics import Statistics
from rl.trainer.model import Scores, score
from rl.trainer.optim import clip_gradients, gradient_norm, lr_at
from rl.trainer.packing import MicroBatch, Packed
from rl.trainer.parallel.sharding import reduce_replicas, sum_over_context
from rl.trainer.parallel.world import World
from rl.trainer.prefetch import Skipped
from rl.trainer.reference import reference_logprobs
from rl.trainer.sft.source import meaningful
from rl.trainer.start import Learner, Trainer


def train(trainer: Trainer) -> None:
    """Receive, step, publish: until the last step or until the source of batches says that the run has ended.

    Consumes: batches, fetched by a thread while the step before trains. Produces: policy versions and checkpoints, which two threads
    write while the next steps train; metric lines. Waits for: the three threads, and so for orchestrator and disk.
    """
    trainer.begin()
    for step in range(trainer.step + 1, trainer.last + 1):
        timer = Timer()
        ready = trainer.receive(step)
        timer.lap("wait_for_batch")
        if ready is None:
            break
        metrics = {"quarantined": 1.0} if isinstance(ready, Skipped) else train_batch(trainer, ready, timer)
        trainer.step = step
        checkpoint_is_due = trainer.saver.due(step, trainer.last)
        if checkpoint_is_due or trainer.every_version_is_read:
            trainer.publish()
        timer.lap("publish_weights")
        if checkpoint_is_due and step < trainer.last:
            metrics |= trainer.probe(timer)
        metrics |= trainer.validate(timer)
        if checkpoint_is_due:  # after all that takes long: a run that goes on from this checkpoint does not write this step's line again
            trainer.save_checkpoint()
        timer.lap("checkpoint")
        trainer.log(metrics, ready, timer)
    trainer.finish()


def train_batch(trainer: Trainer, packed: Packed, timer: Timer) -> dict[str, float]:
    """One optimizer step of a run, with its learning rate; explains out of memory. Returns the metrics."""
    config, step = trainer.config, packed.batch.step
    trainer.status.enter(Phase.TRAINING, step)
    lr = lr_at(step, config.trainer.optim, config.max_steps)
    with explain_out_of_memory(trainer.learner.model, packed.micro_batches, config, trainer.learner.world):
        metrics = train_step(trainer.learner, packed, lr, timer)
    return meaningful(metrics, trainer.batches.source, step)


def train_step(learner: Learner, packed: Packed, lr: float, timer: Timer) -> dict[str, float]:
    """One optimizer step on this rank's micro batches of a batch. Returns the metrics.

    Raises RunError, for numbers that are not finite or (strict) for a disagreement with inference, before anything is changed.
    """
    model, optimizer, settings, world = learner.model, learner.optimizer, learner.settings, learner.world
    statistics = Statistics(packed.batch, world.device)
    for micro_batch in packed.micro_batches:
        batch = micro_batch.to(world.device)
        reference = reference_logprobs(learner.reference, batch, world) if learner.reference else None
        scores = score(model, batch, world, entropy_gradient=settings.loss.entropy_coefficient > 0)
        inputs = loss_inputs(batch, len(packed.batch.samples), scores, world, reference)
        terms = compute_loss(inputs, settings.loss, loss_function(settings.loss))
        loss = (terms.loss * batch.weights).sum()
        reduce_replicas(model, micro_batch is packed.micro_batches[-1], world)
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
        found = f"step {packed.batch.step}: loss {metrics['loss/mean']}, gradient norm {norm}"
        raise RunError(f"{found}; nothing of the step was applied. Its file in rollouts/ shows what the batch was made of", RESTART)
    clip_gradients(parameters, norm, settings.optim.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    timer.lap("optimizer")
    return metrics | {"optim/grad_norm": norm, "optim/lr": lr}


def loss_inputs(batch: MicroBatch, num_samples: int, scores: Scores, world: World, reference: Tensor | None = None) -> LossInputs:
    """The inputs of the loss functions, for one of the micro batches of `num_samples` samples."""

    def sequence_sum(values: Tensor) -> Tensor:
        return sum_over_context(values.new_zeros(num_samples).index_add(0, batch.sequences, values), world)

    return LossInputs(
        trainer_logprobs=scores.logprobs,
        logprobs=batch.logprobs,
        advantages=batch.advantages,
        entropies=scores.entropies,
        weights=batch.weights,
        sequences=batch.sequences,
        sequence_sum=sequence_sum,
        reference_logprobs=reference,
        teacher_logprobs=batch.teacher_logprobs,
    )
