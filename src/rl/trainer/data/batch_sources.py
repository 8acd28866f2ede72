"""Sources of batches, each of which returns the batch of a step, the same on every rank: the
orchestrator, a run's log, random samples, and examples. And the thread that fetches and packs the
next batch while this step trains.

Random samples benchmark the trainer alone, and test whether its memory suffices.

Examples are those of supervised fine-tuning, where the trainer is otherwise the same. They form one
endless sequence, pass after pass, each pass shuffled with its own seed; batch N is the N-th
`sft.batch_size` of them. A batch thus depends only on the data, the seed and N: every rank makes
the same batch by itself, and a resumed run continues exactly.
"""

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rl.config.run import RLConfig
from rl.config.trainer import FakeDataConfig
from rl.run_dir import spans
from rl.run_dir.paths import RunDir, numbers
from rl.run_dir.status import Phase
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch, fill_blocks, micro_batch_tokens
from rl.trainer.data.packing import Layout, Packed, cut, minibatch_weights, pack
from rl.trainer.model.head import score
from rl.trainer.model.modes import Mode
from rl.trainer.model.routes import Routers
from rl.trainer.parallel.sharding import localise
from rl.trainer.parallel.world import World
from rl.trainer.sft.tokens import open_examples
from rl.trainer.store.threads import SingleTaskThread
from rl.wire.batch_file import batch_of
from rl.wire.messages import ITEM_BYTES, RunEnded, TrainBatch, TrainedSpan, TrainingSample
from rl.wire.transport import OrchestratorClient, Wait
from rl.wire.turns import pack_ids

LONGEST_S = 20 * 86400.0
"""A deadline that torch can count in 32 bits of milliseconds."""


class BatchSource(Protocol):
    """Returns batches. Every rank has a source, and all return the same batches. A background
    thread calls it step by step."""

    def receive(self, step: int) -> TrainBatch | None:
        """Returns the batch of `step`, or None if the run has ended."""

    def validation(self, step: int) -> Iterable[TrainBatch]:
        """Returns the held-out batches whose loss is due after `step`; an empty list if there
        are none."""
        return []

    def meaningful(self, metrics: dict[str, float], step: int) -> dict[str, float]:
        """Returns those of a step's metrics that mean something for this source's batches, and
        the source's own."""
        return metrics


class FromOrchestrator(BatchSource):
    """Rank 0 asks the orchestrator and broadcasts the bytes; every rank checks and decodes them.
    Creating it is a collective call."""

    def __init__(self, client: OrchestratorClient | None, wait: Wait, world: World):
        self.client, self.wait, self.world = client, wait, world
        # the thread asks long before anybody waits for it, who has a deadline: see Prefetch.take
        self.group = world.new_group(LONGEST_S)

    def receive(self, step: int) -> TrainBatch | None:
        """Waits for: the orchestrator's answer, on rank 0 as long as `wait` allows; the other ranks
        wait for rank 0.

        Returns None on every rank, too, if rank 0 gives up because the trainer leaves.
        """
        if not self.client:
            self.wait.about(Phase.WAITING_FOR_BATCH, step, "rank 0 to get it")
        answer = self.client.get_batch(step, self.wait) if self.client else b""
        if self.client and self.world.size > 1:
            self.wait.about(Phase.WAITING_FOR_RANKS, step, f"they are to take batch {step}")
        if isinstance(answer, RunEnded):
            print(f"the run has ended: {answer.reason}", flush=True)
        data = self.world.broadcast_bytes(answer if isinstance(answer, bytes) else b"", self.group)
        self.wait.over()
        return batch_of(step, data, f"batch {step} from the orchestrator") if data else None


class FromLog(BatchSource):
    """The logged batches of a run, read by every rank."""

    def __init__(self, run_dir: RunDir):
        self.run_dir = run_dir

    def receive(self, step: int) -> TrainBatch:
        path = self.run_dir.batch(step)
        return batch_of(step, path.read_bytes(), str(path))


def quarantined_steps(run_dir: RunDir, world: World) -> frozenset[int]:
    """Returns the steps whose batches must not be read, as rank 0 sees them on disk. `rl` marks
    them while no trainer runs."""
    steps = numbers(run_dir.batches, run_dir.quarantined(0).suffix)
    return frozenset(json.loads(world.broadcast_bytes(json.dumps(steps).encode())))


FORMATS = {
    "perf/tokens_per_s": "{:.0f} tokens/s",
    "time/step": "{:.3f} s",
    "time/forward_backward": "forward and backward {:.3f} s",
    "time/optimizer": "optimizer {:.3f} s",
    "time/wait_for_batch": "waiting {:.3f} s",
    "perf/peak_memory_gib": "peak memory {:.2f} GiB",
    "perf/mfu": "MFU {:.1%}",
}


class FakeBatches(BatchSource):
    """A source of batches that depend only on seed and step; every rank makes the same."""

    def __init__(self, config: FakeDataConfig, vocab_size: int, seed: int):
        self.config, self.vocab_size, self.seed = config, vocab_size, seed

    def receive(self, step: int) -> TrainBatch:
        rng, config = random.Random(f"{self.seed}/{step}"), self.config
        samples, prompt = [], list[int]()
        for i in range(config.samples):
            group, rollout = divmod(i, config.group_size)
            if rollout == 0:
                prompt = rng.choices(range(self.vocab_size), k=config.prompt_tokens)
            answer = rng.choices(range(self.vocab_size), k=config.completion_tokens)
            advantage = rng.gauss(0.0, 1.0)
            samples.append(
                make_sample(prompt, answer, advantage, self.vocab_size, step, group, rollout)
            )
        return TrainBatch(step=step, samples=samples)


def make_sample(
    prompt: list[int],
    answer: list[int],
    advantage: float,
    vocab_size: int,
    step: int,
    group: int,
    rollout: int,
) -> TrainingSample:
    """Makes a sample as if the version before `step` had sampled the answer from the uniform
    distribution."""
    length = len(prompt) + len(answer)
    return TrainingSample(
        packed_ids=np.array(prompt + answer, np.int32).tobytes(),
        spans=[TrainedSpan(len(prompt), length, step - 1, advantage)],
        packed_logprobs=np.full(len(answer), -math.log(vocab_size), np.float32).tobytes(),
        env="fake",
        group_id=group,
        rollout_id=rollout,
    )


def full_batch(num_rows: int, row_tokens: int, max_model_len: int, vocab_size: int) -> TrainBatch:
    """Makes a batch that packs into `num_rows` micro batches of the largest possible size, about
    `row_tokens` tokens, each with a loss.

    A row holds sequences as long as the model allows; a sequence longer than `row_tokens` has a row
    of its own.
    """
    rng, longest = random.Random(0), max_model_len - 1
    count, rest = divmod(row_tokens, longest)
    lengths = [longest] * max(1, count) + [rest] * (count > 0 < rest)
    samples = []
    for group, length in enumerate(lengths * num_rows):
        # the last token is predicted, never an input
        first, *answer = rng.choices(range(vocab_size), k=length + 1)
        samples.append(make_sample([first], answer, 1.0, vocab_size, 1, group, 0))
    return TrainBatch(step=1, samples=samples)


def text_of(metrics: Mapping[str, float]) -> str:
    """Returns those of the metrics that the benchmark prints."""
    return ", ".join(
        text.format(metrics[name])
        for name, text in FORMATS.items()
        if metrics.get(name) is not None
    )


def summary(lines: Iterable[dict[str, float]]) -> str:
    """Returns the medians over the steps, without the first (warm-up) if there are others."""
    lines = list(lines)
    lines = lines[1:] or lines
    names = [name for name in FORMATS if lines and lines[0].get(name) is not None]
    medians = {name: median(line[name] for line in lines) for name in names}
    return f"median of {len(lines)} steps: {text_of(medians)}"


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
        if (validation := data / "validation.arrow").exists():
            self.held_out = open_examples(validation)
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
            total -= (
                score(model, micro_batch.to(world.device), world).trainer_logprobs.double().sum()
            )
    loss = float(world.reduce(total, dist.ReduceOp.SUM)) / count
    return {
        "validation/loss": loss,
        "validation/perplexity": math.exp(min(loss, 700.0)),
        "validation/tokens": count,
    }


class Skipped:
    """Placeholder for a quarantined batch."""


class Prefetch:
    """Fetches one batch ahead and packs it. `ask` returns at once, `take` waits and raises the
    errors of the thread."""

    def __init__(
        self,
        source: BatchSource,
        pack: Callable[[TrainBatch], Packed],
        wait: Wait,
        deadline_s: float,
        quarantined: Collection[int] = (),
    ):
        """`wait`: the source's; shows in the status that the trainer waits for the source.
        `deadline_s`: every rank's deadline, longer than the source's. `quarantined`: batches that
        are never requested, because a trainer that reads one dies."""
        self.source, self.pack, self.wait = source, pack, wait
        self.deadline_s, self.quarantined = deadline_s, quarantined
        self.step = 0
        """The step requested last."""
        self.thread = SingleTaskThread()

    def ask(self, step: int) -> None:
        """Starts to fetch and pack the batch of `step`."""
        self.step = step
        self.thread.start(self._make, step)

    def _make(self, step: int) -> Packed | Skipped | None:
        if step in self.quarantined:
            return Skipped()
        with spans.span("fetch_batch", "prefetch", step):
            batch = self.source.receive(step)
        with spans.span("pack", "prefetch", step):
            return None if batch is None else self.pack(batch)

    def take(self, step: int, others: Iterable[SingleTaskThread] = ()) -> Packed | Skipped | None:
        """Returns the batch of `step`, or None if the run has ended. An error of `others` ends the
        wait.

        Waits for: the thread, and through it whatever the source waits for.
        """
        if self.step != step:
            self.ask(step)
        what = f"batch {step} from rank 0; see its log"
        with self.wait:
            return self.thread.result(what, self.deadline_s, others)


def prepare(
    batch: TrainBatch,
    config: RLConfig,
    world: World,
    hidden_size: int,
    minibatches: int = 1,
    mode: Mode = "blocks",
    routers: Routers | None = None,
    vocab_size: int | None = None,
) -> Packed:
    """Packs a batch for this rank into minibatches, and gives each token its weight in the loss of
    its minibatch.

    `mode`: how the model computes rows, see rl.trainer.model.head.mode_of. `routers`: those of
    the model if routes are replayed; RunError is raised for routes that they cannot take.
    `vocab_size`: of the model; RunError is raised for kept ids beyond it.
    """
    settings, on_gpu = config.trainer, world.device.type == "cuda"
    several = mode != "unpacked"  # whether a row may hold more than one sample
    # of a row, which context_size ranks share
    max_tokens = micro_batch_tokens(settings, world.device, mode) * world.context_size * several
    layout = Layout(world.data_rank, world.data_size, max_tokens, hidden_size)
    divided = cut(batch, minibatches, config.seed)
    constant_length = settings.loss.constant_length or config.orchestrator.sampling.max_tokens
    weights = minibatch_weights(batch, divided, settings.loss, constant_length)
    packed = pack(batch, weights, layout, divided)

    def placed(row: MicroBatch) -> MicroBatch:
        if routers and row.routes is not None:
            routers.check(row.routes)
        if vocab_size and row.kept is not None and row.kept[1].max() >= vocab_size:
            raise RunError(
                f"batch {batch.step} has a kept id of {row.kept[1].max()}, but the model has "
                f"{vocab_size} ids: inference serves another model; serve model.name"
            )
        row = localise(fill_blocks(row, world.context_size) if on_gpu and several else row, world)
        return row.pinned() if on_gpu else row

    return replace(
        packed, minibatches=[[placed(row) for row in part] for part in packed.minibatches]
    )
