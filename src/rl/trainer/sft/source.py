"""Supervised fine-tuning: batches of examples instead of rollouts, and the loss of held-out ones. The rest is the trainer as it is.

Examples form one endless sequence, pass after pass, each pass shuffled by its own seed; batch N has the next `sft.batch_size` of it. So
a batch depends on the data, the seed and N alone: every rank makes the same one by itself, and a resumed run goes on exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.run_dir.status import Status
from rl.system.errors import RunError
from rl.trainer.batch_sources import BatchSource
from rl.trainer.model import score
from rl.trainer.packing import Packed
from rl.trainer.parallel.world import World
from rl.trainer.sft.tokens import Examples, open_examples, prepare_data, read_manifest
from rl.wire.messages import TrainBatch, TrainingSample, VersionSpan

NO_VERSION = -1
"""No policy sampled the tokens of an example."""
HELD_OUT = 1 << 32
"""Number of the random stream that chooses what is held out; smaller numbers are passes over the data."""
MEASURED = ("loss/", "entropy/", "optim/")
"""Metrics that mean something without a sampler, by their prefixes."""


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, stream: int) -> np.ndarray:
    """0..count-1 in random order, the same for the same arguments."""
    return np.random.Generator(np.random.PCG64([seed % 2**64, stream])).permutation(count)


def split(examples: Examples, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(trained, held out): places of the examples. All examples of a task are on one side. Raises RunError if one would be empty."""
    if not fraction:
        return np.arange(len(examples)), np.arange(0)
    tasks = int(examples.groups.max()) + 1
    count = max(1, round(fraction * tasks))
    if count >= tasks:
        raise RunError(f"sft.validation_fraction = {fraction:g}: leaves none of {tasks} tasks for training; lower it or give more data")
    held_out = np.isin(examples.groups, shuffled(tasks, seed, HELD_OUT)[:count])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def make_batch(step: int, examples: Examples, places: Sequence[int] | np.ndarray) -> TrainBatch:
    """A batch of examples. Those with the same prompt are a group, so that it is computed once."""
    samples = []
    groups: dict[tuple[int, ...], int] = {}
    for number, place in enumerate(places):
        ids, trained = examples[int(place)]
        prompt = tuple(ids[: trained.index(True)])
        samples.append(
            TrainingSample(
                token_ids=ids,
                loss_mask=trained,
                logprobs=[0.0] * len(ids),
                advantages=[float(is_trained) for is_trained in trained],
                policy_versions=[VersionSpan(NO_VERSION, sum(trained))],
                env="sft",
                group_id=groups.setdefault(prompt, number),
                rollout_id=number,
            )
        )
    return TrainBatch(step=step, samples=samples)


class FromExamples(BatchSource):
    """Batches out of `data/` of the run directory."""

    def __init__(self, config: RLConfig, data: Path | None = None) -> None:
        """`data`: the folder, default the run's `data/`. Raises RunError and CorruptFileError."""
        assert config.sft
        self.sft, self.seed = config.sft, config.seed
        data = data or config.run_dir.data
        manifest = read_manifest(data)
        self.examples = open_examples(data / "train", manifest["train"])
        self.places, self.held_out_places = split(self.examples, self.sft.validation_fraction, config.seed)
        self.held_out = self.examples
        if "validation" in manifest:
            self.held_out = open_examples(data / "validation", manifest["validation"])
            self.held_out_places = np.arange(len(self.held_out))
        passes = self.sft.epochs
        self.num_examples = max(1, round(passes * len(self.places))) if passes else config.max_steps * self.sft.batch_size
        """Examples that the run trains on, counted as often as they come."""
        self.num_steps = math.ceil(self.num_examples / self.sft.batch_size)

    def receive(self, step: int) -> TrainBatch | None:
        size, count = self.sft.batch_size, len(self.places)
        positions = range((step - 1) * size, min(step * size, self.num_examples))
        places = [self.places[shuffled(count, self.seed, at // count)[at % count]] for at in positions]
        return make_batch(step, self.examples, places) if places else None

    def validation(self, step: int) -> Iterable[TrainBatch]:
        size, places = self.sft.batch_size, self.held_out_places
        if not len(places) or (step % self.sft.validation_interval and step != self.num_steps):
            return []
        return (make_batch(step + 1, self.held_out, places[start : start + size]) for start in range(0, len(places), size))

    def epoch(self, step: int) -> float:
        """Passes over the data after `step`."""
        return min(step * self.sft.batch_size, self.num_examples) / len(self.places)


def open_source(config: RLConfig, base: str, world: World, status: Status) -> FromExamples:
    """The run's batches. Rank 0 makes the data if no one has yet; the others wait for it, up to the process group's deadline."""
    if world.is_main:
        prepare_data(config, base, status.enter)
    world.barrier()
    return FromExamples(config)


@torch.no_grad()
def validate(model: PreTrainedModel, batches: Iterable[TrainBatch], pack: Callable[[TrainBatch], Packed], world: World) -> dict[str, float]:
    """Cross entropy of held-out batches: mean over all their trained tokens, nats. Every rank calls this with the same batches."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    count = 0
    for batch in batches:
        count += batch.num_loss_tokens
        for micro_batch in pack(batch).micro_batches:
            total -= score(model, micro_batch.to(world.device), world).logprobs.double().sum()
    loss = float(world.reduce(total, dist.ReduceOp.SUM)) / count
    return {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700.0)), "validation/tokens": count}


def meaningful(metrics: dict[str, float], source: BatchSource, step: int) -> dict[str, float]:
    """A step's metrics; on examples only those that mean something without a sampler, and how often all of them were seen."""
    if not isinstance(source, FromExamples):
        return metrics
    return {key: value for key, value in metrics.items() if key.startswith(MEASURED)} | {"epoch": source.epoch(step)}
