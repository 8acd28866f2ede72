"""The training loop. `train` is the life of a run, `train_step` is the algorithm."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from rl.config import RLConfig
from rl.messages import TrainBatch, WeightVersion
from rl.metrics import MetricsLog
from rl.status import Status
from rl.trainer import checkpoint, weights
from rl.trainer.config import TrainerConfig
from rl.trainer.data import BatchSource, FromOrchestrator
from rl.trainer.distributed import World
from rl.trainer.loss import LossInputs, LossTerms, compute_loss, sample_weights
from rl.trainer.model import DTYPES, Scores, load_policy, score
from rl.trainer.optim import clip_gradients, gradient_norm, lr_at, make_optimizer
from rl.trainer.packing import Layout, MicroBatch, Packed, pack
from rl.transport import OrchestratorClient


class NotFiniteError(Exception):
    """Loss or gradient is nan or infinite; nothing of the step has been applied."""


class Timer:
    """Seconds by part of the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.start = self.last = time.monotonic()

    def lap(self, part: str) -> None:
        """Counts the time since the last lap to `part`."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.last
        self.last = now

    def metrics(self) -> dict[str, float]:
        return {f"time/{part}": seconds for part, seconds in {**self.seconds, "step": self.last - self.start}.items()}


@dataclass
class Trainer:
    """The live objects of one rank. `client`, `metrics` and `status` are rank 0's."""

    config: RLConfig
    world: World
    base: Path
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    step: int
    """Optimizer steps done: the policy version of the weights in `model`."""
    checkpoint_step: int
    checkpoint_time: float
    source: BatchSource
    client: OrchestratorClient | None
    metrics: MetricsLog | None
    status: Status | None

    def doing(self, what: str) -> None:
        if self.status:
            self.status.doing(what, step=self.step)


def start(config: RLConfig, world: World, base: str, status: Status | None) -> Trainer:
    """Loads the model, and the newest intact checkpoint if there is one."""
    settings, run_dir = config.trainer, config.run_dir
    torch.manual_seed(config.seed)
    model = load_policy(base, config.model, settings, world)
    optimizer = make_optimizer(model, settings.optim)
    found = checkpoint.newest_sound(run_dir.checkpoints, world)
    step = checkpoint.load(*found, model, optimizer, world) if found else 0
    client = metrics = None
    if status:
        client = OrchestratorClient(run_dir.status("orchestrator"), settings.batch_timeout_s, status.doing)
        metrics = MetricsLog(run_dir.metrics, "trainer")
    source = FromOrchestrator(client, world)
    return Trainer(config, world, Path(base), model, optimizer, step, step, time.monotonic(), source, client, metrics, status)


def train(trainer: Trainer) -> None:
    """Receive, pack, step, publish, checkpoint, log: until max_steps or until the orchestrator says that the run has ended.

    Consumes: batches. Produces: policy versions, checkpoints, metric lines. Waits for: the orchestrator, in `receive_batch` and `announce`.
    """
    config, world, settings = trainer.config, trainer.world, trainer.config.trainer
    if trainer.step:
        publish(trainer, only_missing=True)
    first = trainer.step + 1
    for step in range(first, config.max_steps + 1):
        timer = Timer()
        batch = trainer.source.receive(step)
        timer.lap("wait_for_batch")
        if batch is None:
            break
        if step == first:
            trainer.checkpoint_time = time.monotonic()  # the interval counts training, not the wait for inference to come up
        trainer.doing(f"training step {step}")
        hidden_size = trainer.model.config.get_text_config().hidden_size
        constant_length = settings.loss.constant_length or config.orchestrator.sampling.max_tokens
        weights_ = sample_weights(batch.samples, settings.loss, constant_length)
        packed = pack(batch, weights_, Layout(world.data_rank, world.data_size, settings.micro_batch_tokens, hidden_size))
        lr = lr_at(step, settings.optim, config.max_steps)
        metrics = train_step(trainer.model, trainer.optimizer, packed.micro_batches, batch.num_loss_tokens, lr, settings, world, timer)
        trainer.step = step
        publish(trainer)
        timer.lap("publish_weights")
        if checkpoint_is_due(trainer):
            save_checkpoint(trainer)
        timer.lap("checkpoint")
        if trainer.metrics:
            trainer.metrics.write(step, metrics | timer.metrics() | performance(batch, packed, timer, world))
    if trainer.step > trainer.checkpoint_step:
        save_checkpoint(trainer)


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
    num_loss_tokens: int,
    lr: float,
    settings: TrainerConfig,
    world: World,
    timer: Timer,
) -> dict[str, float]:
    """One optimizer step on this rank's micro batches of a batch with `num_loss_tokens` loss tokens on all ranks. Returns the metrics.

    Raises NotFiniteError before anything is changed.
    """
    sums = LossSums(world.device)
    for micro_batch in micro_batches:
        batch = micro_batch.to(world.device)
        scores = score(model, batch, world)
        terms = compute_loss(loss_inputs(batch, scores), settings.loss)
        loss = (terms.loss * batch.weights).sum()
        loss.backward()
        with torch.no_grad():
            sums.add(loss, scores, terms)
    metrics = sums.metrics(num_loss_tokens, world)
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


def loss_inputs(batch: MicroBatch, scores: Scores) -> LossInputs:
    """What the losses see of a micro batch."""

    def sequence_sum(values: Tensor) -> Tensor:
        return values.new_zeros(len(batch.samples)).index_add(0, batch.sequences, values)

    return LossInputs(
        trainer_logprobs=scores.logprobs,
        logprobs=batch.logprobs,
        advantages=batch.advantages,
        entropies=scores.entropies,
        weights=batch.weights,
        sequences=batch.sequences,
        sequence_sum=sequence_sum,
        teacher_logprobs=batch.teacher_logprobs,
    )


class LossSums:
    """Sums over the tokens of this rank's micro batches, without gradient."""

    def __init__(self, device: torch.device) -> None:
        self.sum = torch.zeros(5, dtype=torch.float32, device=device)
        """Loss, entropy, mismatch KL, masked tokens, ratio."""
        self.kl_max = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, loss: Tensor, scores: Scores, terms: LossTerms) -> None:
        self.sum += torch.stack([loss, scores.entropies.sum(), terms.kl.sum(), terms.masked.sum(), terms.ratio.sum()])
        if len(terms.kl):
            self.kl_max = torch.maximum(self.kl_max, terms.kl.max())

    def metrics(self, num_loss_tokens: int, world: World) -> dict[str, float]:
        """Means over the tokens of all ranks. Every rank calls this."""
        means: Tensor = world.reduce(self.sum, dist.ReduceOp.SUM) / num_loss_tokens
        means[0] *= num_loss_tokens  # weighted already
        names = ("loss/mean", "entropy/mean", "mismatch_kl/mean", "masked_fraction", "ratio/mean")
        kl_max = float(world.reduce(self.kl_max, dist.ReduceOp.MAX))
        return dict(zip(names, means.tolist(), strict=True)) | {"mismatch_kl/max": kl_max}


def performance(batch: TrainBatch, packed: Packed, timer: Timer, world: World) -> dict[str, float]:
    """Throughput counts the samples' real tokens over the wall time of the whole step, waiting and writing included."""
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    return {
        "perf/tokens_per_s": tokens / (timer.last - timer.start),
        "perf/shared_token_fraction": packed.shared_token_fraction,
        "perf/peak_memory_gib": peak_memory_gib(world.device),
    }


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held: of the GPU as torch counts it, of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB


def publish(trainer: Trainer, only_missing: bool = False) -> None:
    """Writes the weights as version `step`, announces them, and deletes versions that nothing needs any more."""
    config, run_dir, version = trainer.config, trainer.config.run_dir, trainer.step
    path = run_dir.weights(version).absolute()
    missing = not trainer.world.broadcast_int(path.is_dir())
    if missing or not only_missing:
        trainer.doing(f"publishing version {version}")
        weights.publish(trainer.model, path, trainer.base, DTYPES[config.model.dtype], trainer.world)
    if trainer.client:
        needed = trainer.client.published(WeightVersion(version, str(path)))
        weights.delete_old_versions(run_dir.weights_dir, config.trainer.weights, needed, trainer.checkpoint_step)


def checkpoint_is_due(trainer: Trainer) -> bool:
    """Rank 0's clock decides for all ranks."""
    settings = trainer.config.trainer.checkpoint
    if settings.interval is not None:
        due = trainer.step % settings.interval == 0
    else:
        due = time.monotonic() - trainer.checkpoint_time >= settings.interval_s
    return bool(trainer.world.broadcast_int(due or trainer.step == trainer.config.max_steps))


def save_checkpoint(trainer: Trainer) -> None:
    """Saves the state after `step`; the interval in seconds counts from the end of the save."""
    run_dir, step = trainer.config.run_dir, trainer.step
    trainer.doing(f"writing checkpoint {step}")
    checkpoint.save(run_dir.checkpoint(step), step, trainer.model, trainer.optimizer, trainer.world)
    if trainer.world.is_main:
        checkpoint.delete_old(run_dir.checkpoints, trainer.config.trainer.checkpoint)
    trainer.checkpoint_step, trainer.checkpoint_time = step, time.monotonic()
