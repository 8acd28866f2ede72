"""Random samples instead of the orchestrator's, to benchmark the trainer alone and to test
whether its memory suffices."""

import math
import random
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np

from rl.config.trainer import FakeDataConfig
from rl.trainer.data.batch_sources import BatchSource
from rl.wire.messages import TrainBatch, TrainedSpan, TrainingSample

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
