"""Supervised fine-tuning: batches of examples instead of rollouts, and the loss on held-out
examples. The trainer is otherwise the same.

Examples form one endless sequence, pass after pass, each pass shuffled with its own seed; batch N
is the N-th `sft.batch_size` of them. A batch thus depends only on the data, the seed and N: every
rank makes the same batch by itself, and a resumed run continues exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.system.errors import RunError
from rl.trainer.data.batch_sources import BatchSource
from rl.trainer.data.packing import Packed
from rl.trainer.model.head import score
from rl.trainer.parallel.world import World
from rl.trainer.sft.tokens import open_examples, read_manifest
from rl.wire.messages import ITEM_BYTES, TrainBatch, TrainedSpan, TrainingSample
from rl.wire.turns import pack_ids

NO_VERSION = -1
"""Policy version of an example's tokens, which no policy has sampled."""
HELD_OUT = 1 << 32
"""Number of the random stream that selects held-out examples; smaller numbers are passes over
the data."""
MEASURED = ("loss/", "entropy/", "optim/", "experts/", "reference_kl/")
"""Prefixes of the metrics that are meaningful without a sampler."""


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, stream: int) -> np.ndarray:
    """Returns 0..count-1 in random order, always the same for the same arguments."""
    return np.random.Generator(np.random.PCG64([seed % 2**64, stream])).permutation(count)


def split(examples: pa.Table, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of trained and held-out examples, without splitting any task. Raises
    RunError if none is left to train."""
    if not fraction:
        return np.arange(len(examples)), np.arange(0)
    groups = examples["group"].to_numpy()
    tasks = int(groups.max()) + 1
    count = max(1, round(fraction * tasks))
    if count >= tasks:
        raise RunError(
            f"sft.validation_fraction = {fraction:g} leaves none of {tasks} tasks for "
            "training; lower it or add data"
        )
    held_out = np.isin(groups, shuffled(tasks, seed, HELD_OUT)[:count])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def make_batch(step: int, examples: pa.Table, places: Sequence[int] | np.ndarray) -> TrainBatch:
    """Makes a batch of examples. Examples with the same prompt form a group, so that the prompt
    is computed once."""
    samples = []
    groups: dict[tuple[int, ...], int] = {}
    for number, index in enumerate(places):
        ids, trained = (examples[name][int(index)].as_py() for name in ("tokens", "trained"))
        prompt = tuple(ids[: trained.index(True)])
        bounds = np.flatnonzero(np.diff([False, *trained, False]))
        samples.append(
            TrainingSample(
                packed_ids=pack_ids(ids),
                spans=[
                    TrainedSpan(start, end, NO_VERSION, advantage=1.0)
                    for start, end in bounds.reshape(-1, 2).tolist()
                ],
                packed_logprobs=bytes(ITEM_BYTES * sum(trained)),
                env="sft",
                group_id=groups.setdefault(prompt, number),
                rollout_id=number,
            )
        )
    return TrainBatch(step=step, samples=samples)


class FromExamples(BatchSource):
    """Makes batches from `data/` of the run directory."""

    def __init__(self, config: RLConfig, data: Path) -> None:
        """`data`: the folder `data/` of a run."""
        assert config.sft
        self.sft, self.seed = config.sft, config.seed
        self.examples = open_examples(data / "train.arrow")
        self.places, self.held_out_places = split(
            self.examples, self.sft.validation_fraction, config.seed
        )
        self.held_out = self.examples
        if "validation" in read_manifest(data):
            self.held_out = open_examples(data / "validation.arrow")
            self.held_out_places = np.arange(len(self.held_out))
        passes = self.sft.epochs
        self.num_examples = (
            max(1, round(passes * len(self.places)))
            if passes
            else config.max_steps * self.sft.batch_size
        )
        """Number of examples that the run trains on, counting repetitions."""
        self.num_steps = math.ceil(self.num_examples / self.sft.batch_size)

    def receive(self, step: int) -> TrainBatch | None:
        size, count = self.sft.batch_size, len(self.places)
        positions = range((step - 1) * size, min(step * size, self.num_examples))
        places = [
            self.places[shuffled(count, self.seed, at // count)[at % count]] for at in positions
        ]
        return make_batch(step, self.examples, places) if places else None

    def validation(self, step: int) -> Iterable[TrainBatch]:
        size, places = self.sft.batch_size, self.held_out_places
        if not len(places) or (step % self.sft.validation_interval and step != self.num_steps):
            return []
        return (
            make_batch(step + 1, self.held_out, places[start : start + size])
            for start in range(0, len(places), size)
        )

    def epoch(self, step: int) -> float:
        """Returns the number of passes over the data after `step`."""
        return min(step * self.sft.batch_size, self.num_examples) / len(self.places)

    def meaningful(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Returns the metrics that mean something without a sampler, and the number of passes
        over the data."""
        return {key: value for key, value in metrics.items() if key.startswith(MEASURED)} | {
            "epoch": self.epoch(step)
        }


@torch.no_grad()
def validate(
    model: PreTrainedModel,
    batches: Iterable[TrainBatch],
    pack: Callable[[TrainBatch], Packed],
    world: World,
) -> dict[str, float]:
    """Returns the mean cross entropy, in nats, of all trained tokens of held-out batches. Every
    rank calls this with the same batches."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    count = 0
    for batch in batches:
        count += batch.num_loss_tokens
        for micro_batch in pack(batch).micro_batches:
            total -= score(model, micro_batch.to(world.device), world).logprobs.double().sum()
    loss = float(world.reduce(total, dist.ReduceOp.SUM)) / count
    return {
        "validation/loss": loss,
        "validation/perplexity": math.exp(min(loss, 700.0)),
        "validation/tokens": count,
    }
