"""The training loop: `train` goes through the steps of a run, `train_step` is the algorithm."""

from itertools import chain
from statistics import fmean

from torch import Tensor

from rl.run_dir.status import Phase
from rl.trainer.loss import LossInputs, compute_loss
from rl.trainer.losses import loss_function
from rl.trainer.measure.memory import explain_out_of_memory
from rl.trainer.measure.performance import Timer
from rl.trainer.measure.statistics import Statistics
from rl.trainer.measure.tokens import TokenColumns
from rl.trainer.minibatches import compares_with_old, keep_old_logprobs
from rl.trainer.model import Scores, score
from rl.trainer.optim import lr_at, optimizer_step
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
        timer = Timer(step, trainer.learner.world.device)
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
    """One step of a run, with its learning rate; explains out of memory. Returns the metrics."""
    config, step = trainer.config, packed.batch.step
    trainer.status.enter(Phase.TRAINING, step)
    lr = lr_at(step, config.trainer.optim, config.max_steps)
    with explain_out_of_memory(trainer.learner.model, packed.micro_batches, config, trainer.learner.world):
        metrics = train_step(trainer.learner, packed, lr, timer)
    return meaningful(metrics, trainer.batches.source, step)


def train_step(learner: Learner, packed: Packed, lr: float, timer: Timer) -> dict[str, float]:
    """One step on this rank's micro batches: an optimizer step on each minibatch, as often as there are epochs. Returns the metrics.

    Raises RunError, for numbers that are not finite or (strict) for a disagreement with inference. Nothing of the step remains then: what
    is on disk lies between steps.
    """
    world, norms = learner.world, list[float]()
    tokens = TokenColumns(packed.batch.num_loss_tokens, world.device, bool(learner.reference)) if learner.token_files else None
    statistics = Statistics(packed.batch, world.device, tokens)
    step, optim = packed.batch.step, learner.settings.optim
    if compares_with_old(learner.settings):
        keep_old_logprobs(learner.model, chain(*packed.minibatches[1:]), world, learner.advance)
        timer.lap("old_logprobs")
    for minibatch in packed.minibatches * learner.settings.epochs:
        accumulate(learner, packed, minibatch, statistics, first=not norms)
        if learner.parity and not norms:
            agreement = learner.parity.judge(statistics.agreement.total(world))
        timer.lap("forward_backward")
        norms.append(optimizer_step(learner.model, learner.optimizer, optim, lr, step, statistics.total_loss(world)))
        timer.lap("optimizer")
    metrics = statistics.metrics(world) | (agreement if learner.parity else {})
    metrics["loss/mean"] /= len(norms)
    if tokens and learner.token_files:
        learner.token_files.start(step, tokens.columns(world))
    timer.lap("forward_backward")
    return metrics | {"optim/grad_norm": fmean(norms), "optim/lr": lr, "optim/steps": len(norms)}


def accumulate(learner: Learner, packed: Packed, minibatch: list[MicroBatch], statistics: Statistics, first: bool) -> None:
    """Adds the gradient of a minibatch's loss to the model's. `first`: the policy is still the one that the batch began with."""
    model, settings, world = learner.model, learner.settings, learner.world
    for micro_batch in minibatch:
        batch = micro_batch.to(world.device)
        if learner.reference and batch.reference_logprobs is None:
            micro_batch.reference_logprobs = batch.reference_logprobs = reference_logprobs(learner.reference, batch, world)
        scores = score(model, batch, world, entropy_gradient=settings.loss.entropy_coefficient > 0)
        if first and compares_with_old(settings):
            micro_batch.old_logprobs = batch.old_logprobs = scores.logprobs.detach()
        inputs = loss_inputs(batch, len(packed.batch.samples), scores, world)
        terms = compute_loss(inputs, settings.loss, loss_function(settings.loss))
        loss = (terms.loss * batch.weights).sum()
        reduce_replicas(model, micro_batch is minibatch[-1], world)
        loss.backward()
        statistics.add(batch, loss.detach(), scores, terms, first)
        learner.advance()


def loss_inputs(batch: MicroBatch, num_samples: int, scores: Scores, world: World) -> LossInputs:
    """The inputs of the loss functions, for one of the micro batches of `num_samples` samples."""

    def sequence_sum(values: Tensor) -> Tensor:
        return sum_over_context(values.new_zeros(num_samples).index_add(0, batch.sequences, values), world)

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
