"""The training loop: `train` runs the steps of a run, `train_step` is the algorithm."""

from itertools import chain
from statistics import fmean

from torch import Tensor

from rl.run_dir.status import Phase
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.data.minibatches import compares_with_old, keep_old_logprobs
from rl.trainer.data.packing import Packed
from rl.trainer.data.prefetch import Skipped
from rl.trainer.loss.common import LossInputs, compute_loss
from rl.trainer.loss.losses import loss_function
from rl.trainer.measure.experts import load_metrics
from rl.trainer.measure.memory import explain_out_of_memory
from rl.trainer.measure.performance import Timer
from rl.trainer.measure.statistics import Statistics
from rl.trainer.measure.tokens import TokenColumns
from rl.trainer.model.head import Scores, keep_old, score
from rl.trainer.model.reference import reference_logprobs
from rl.trainer.optim import optimizer_step
from rl.trainer.parallel.sharding import finish_gradients, reduce_replicas, sum_over_context
from rl.trainer.parallel.world import World
from rl.trainer.trainer import TrainContext, Trainer


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
    for step in range(trainer.step + 1, trainer.last + 1):
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
            has_trained = True
        trainer.step = step
        leaves = trainer.leaves()
        # before anything slow; `receive` then ends the loop. A run resumed from this checkpoint
        # does not log this step again
        if leaves:
            trainer.log(metrics, ready, timer)
            trainer.save_checkpoint()
            timer.lap("checkpoint")
        checkpoint_is_due = not leaves and trainer.saver.due(step, trainer.last)
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
    config, step = trainer.config, packed.batch.step
    if config.trainer.router_replay == "engine" and any(
        not sample.routes for sample in packed.batch.samples if sample.spans
    ):
        remedy = (
            "it was sampled by a server without trainer.router_replay = engine, or through NeMo "
            "Gym; set it to trainer or off"
        )
        raise RunError(
            f"trainer.router_replay = engine: batch {step} has tokens without routes: {remedy}"
        )
    trainer.status.enter(Phase.TRAINING, step)
    lr = config.trainer.optim.lr_at(step, config.max_steps)
    context = trainer.context
    with explain_out_of_memory(context.model, packed.micro_batches, context.world):
        metrics = train_step(context, packed, lr, timer)
    return trainer.batches.source.meaningful(metrics, step)


def train_step(context: TrainContext, packed: Packed, lr: float, timer: Timer) -> dict[str, float]:
    """Trains one step on this rank's micro batches: one optimizer step per minibatch and epoch.
    Returns the metrics.

    Raises RunError if numbers are not finite or, with strict parity, if trainer and inference
    disagree. The step then leaves no trace: the disk only holds states between steps.
    """
    world, norms = context.world, list[float]()
    tokens = (
        TokenColumns(packed.batch.num_loss_tokens, world.device, bool(context.reference))
        if context.token_files
        else None
    )
    statistics = Statistics(packed.batch, world.device, tokens)
    step, optim = packed.batch.step, context.settings.optim
    if compares_with_old(context.settings):
        keep_old_logprobs(context.model, chain(*packed.minibatches[1:]), world, context.advance)
        timer.lap("old_logprobs")
    for minibatch in packed.minibatches * context.settings.epochs:
        accumulate(context, packed, minibatch, statistics, first=not norms)
        if context.parity and not norms:
            parity = context.parity.judge(statistics.parity.total(world), step - 1)
        timer.lap("forward_backward")
        norms.append(
            optimizer_step(
                context.model, context.optimizer, optim, lr, step, statistics.total_loss(world)
            )
        )
        timer.lap("optimizer")
    metrics = statistics.metrics(world) | (parity if context.parity else {})
    metrics |= load_metrics(context.model, world)
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
    first: bool,
) -> None:
    """Adds the gradient of a minibatch's loss to the model's. `first`: the policy has not been
    updated since the batch began.

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
        if first and compares_with_old(settings):
            keep_old(model, micro_batch, scores)
            batch.old_logprobs = micro_batch.old_logprobs
        inputs = loss_inputs(batch, len(packed.batch.samples), scores, world)
        terms = compute_loss(inputs, settings.loss, loss_function(settings.loss))
        loss = (terms.loss * batch.weights).sum()
        reduce_replicas(model, micro_batch is minibatch[-1], world)
        loss.backward()
        statistics.add(batch, loss.detach(), scores, terms, first)
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
