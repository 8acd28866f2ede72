"""Samples and checkpoints for the trainer's tests, and the comparison of two runs."""

import math
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.config.command_line import to_toml
from rl.config.loss import LossSettings
from rl.config.run import RLConfig
from rl.run_dir.files import write_file
from rl.run_dir.metrics import read_metrics
from rl.run_dir.paths import RunDir
from rl.trainer.data.packing import Layout, Packed, pack
from rl.trainer.store import checkpoint
from rl.wire.messages import TrainBatch, TrainingSample, VersionSpan
from rl.wire.turns import pack_kept
from tests.wire.samples import aligned, aligned_sample, changed

FLOAT32 = re.compile(r"router\.(weight|bias)|sinks|A_log|dt_bias")


def in_bfloat16(model: Path, folder: Path) -> Path:
    """Makes `folder` a copy of the model with bfloat16 numbers in its file, as most published
    models have; returns it."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    save_file(
        {name: tensor.bfloat16() for name, tensor in load_file(file).items()},
        file,
        {"format": "pt"},
    )
    return folder


def with_float32(folder: Path) -> Path:
    """Makes a model's files bfloat16 but for its routers and rates, which are float32 and no
    bfloat16 numbers, as many are published."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    for name in filter(FLOAT32.search, tensors):
        tensors[name] = tensors[name].float() + 1e-3 * torch.linspace(
            0, 1, tensors[name].numel()
        ).view(tensors[name].shape)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def write_config(config: RLConfig) -> None:
    """As `rl` writes it, for the processes of the run."""
    write_file(config.run_dir.config, to_toml(config).encode())


def run_config(root, model, steps: int, dtype: str, **trainer) -> RLConfig:
    """The settings of a run on the batches of these tests, which are written to its folder."""
    # the stub has no model
    usual = {"micro_batch_tokens": 128, "checkpoint": {"interval": 2}, "strict_parity": False}
    values = {
        "name": "run",
        "output_dir": str(root),
        "max_steps": steps,
        "model": {"name": str(model), "dtype": dtype},
    }
    config = RLConfig.model_validate(
        values | {"orchestrator": {"environment": [{"id": "test"}]}, "trainer": usual | trainer}
    )
    write_config(config)
    return config


def make_sample(
    prompt: list[int],
    answer: list[int],
    *,
    group: int = 0,
    rollout: int = 0,
    advantage: float = 1.0,
    **more,
) -> TrainingSample:
    """A prompt and one sampled answer; every sampled token has logprob -2 unless `logprobs` is
    given."""
    n, m = len(prompt), len(answer)
    fields = {"logprobs": [0.0] * n + [-2.0] * m, "advantages": [0.0] * n + [advantage] * m} | more
    return aligned_sample(
        token_ids=prompt + answer,
        loss_mask=[False] * n + [True] * m,
        policy_versions=[VersionSpan(0, m)],
        env="test",
        group_id=group,
        rollout_id=rollout,
        **fields,
    )


def make_batch(
    step: int, *, groups: int = 3, group_size: int = 4, prompt: int = 12, answer: int = 8
) -> TrainBatch:
    """Random prompts and answers of differing lengths, the same for the same step; logprobs near
    those of a uniform distribution."""
    rng = random.Random(step)
    samples = []
    for group in range(groups):
        head = [rng.randrange(3, 259) for _ in range(rng.randint(prompt // 2, prompt))]
        for rollout in range(group_size):
            tail = [rng.randrange(3, 259) for _ in range(rng.randint(1, answer))]
            logprobs = [0.0] * len(head) + [-5.5 + rng.uniform(-0.5, 0.5) for _ in tail]
            samples.append(
                make_sample(
                    head,
                    tail,
                    group=group,
                    rollout=rollout,
                    advantage=rng.uniform(-1, 1),
                    logprobs=logprobs,
                )
            )
    return TrainBatch(step=step, samples=samples)


def branching_batch() -> TrainBatch:
    """What packing and attention must get right: groups, branches within answers, other
    temperatures, two turns, long histories.

    A sample that repeats another, one that is another's beginning, and one with gaps in its loss.
    """
    samples = make_batch(5, groups=3).samples
    samples += [
        make_sample([5, 6, 7, 8], [9, 10, 11], group=9, rollout=i, advantage=0.25 + i)
        for i in range(2)
    ]
    samples += [
        make_sample([5, 6, 7, 8], [9, 20, 21], group=9, rollout=3, advantage=-0.5, temperature=0.7)
    ]
    samples += [make_sample([5, 6, 7, 8], [9, 10], group=9, rollout=4, advantage=0.75)]
    two_turns = make_sample(list(range(30, 50)), [3, 4], group=10, advantage=0.125)
    lists = aligned(two_turns)
    lists.loss_mask[10:12] = [True, True]
    lists.advantages[10:12] = [0.0625, 0.0625]
    two_turns = changed(two_turns, **vars(lists) | {"policy_versions": [VersionSpan(0, 4)]})
    history = [3 + 7 * i % 250 for i in range(40)]
    samples += [
        two_turns,
        *(
            make_sample(
                [*history, 50 + i // 2], [60 + i] * 8, group=11, rollout=i, advantage=0.1 * i - 0.2
            )
            for i in range(5)
        ),
    ]
    return TrainBatch(step=5, samples=samples)


def pack_alone(
    batch: TrainBatch, weights: list[float] | None = None, max_tokens: int = 4096
) -> Packed:
    """A batch packed for a single rank; `weights`: of each sample's tokens, by default 1."""
    return pack(batch, weights or [1.0] * len(batch.samples), Layout(0, 1, max_tokens, 64))


def sample_weights(
    samples: Sequence[TrainingSample], loss: LossSettings, constant_length: int
) -> list[float]:
    """The weight of each sample's tokens in the loss of all of them."""
    return loss.sample_weights([sample.num_trained for sample in samples], constant_length)


def plain_scores(model, sample: TrainingSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of a sample's loss tokens, alone in its row, by plain
    transformers and torch."""
    ids, mask = torch.tensor(sample.token_ids).long(), torch.tensor(aligned(sample).loss_mask[1:])
    logits = model(ids[None], use_cache=False).logits[0, :-1][mask] / sample.temperature
    if sample.kept is not None:
        left_out = torch.zeros(logits.shape, dtype=torch.bool)
        ends = sample.kept.counts.cumsum()[:-1]
        for row, kept in zip(left_out, np.split(sample.kept.ids, ends), strict=True):
            row |= len(kept) > 0
            row[kept.tolist()] = False
        logits = logits.masked_fill(left_out, -math.inf)
    log_softmax = torch.log_softmax(logits, -1)
    return log_softmax.gather(-1, ids[1:, None][mask])[:, 0], -(
        log_softmax.exp() * log_softmax.clamp(min=-1e9)
    ).sum(-1)


def with_kept(sample: TrainingSample, sets: Sequence[Sequence[int]]) -> TrainingSample:
    """A copy whose trained tokens were drawn from these ids; an empty set: from all."""
    return msgspec.structs.replace(sample, kept=pack_kept(sets))


def truncated(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The batch with a set of 1 to 40 ids at most tokens of most samples."""
    rng = random.Random(seed)
    samples = []
    for sample in batch.samples:
        sets = []
        for target in sample.token_ids[sample.trained].tolist():
            others = rng.sample([x for x in range(259) if x != target], rng.randrange(40))
            sets.append(rng.sample(kept := [target, *others], len(kept)) * (rng.random() < 0.8))
        samples.append(with_kept(sample, sets) if rng.random() < 0.8 else sample)
    return TrainBatch(step=batch.step, samples=samples)


def toy_step(model, optimizer) -> None:
    """An optimizer step that changes every weight."""
    model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 200]])).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def save_checkpoint(path, step, model, optimizer, world, base=""):
    checkpoint.write(
        path,
        step,
        checkpoint.tensors_of(model, optimizer, world),
        checkpoint.fingerprint(model),
        world,
        base=base,
    )


def assert_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """The same tensors by name, bit for bit."""
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in ours.items() if not tensor.equal(theirs[name])]


def assert_same_files(ours: RunDir, theirs: RunDir, *versions: int) -> None:
    """The weights of these versions are the same, bit for bit."""
    for version in versions:
        mine, yours = (run_dir.weights(version) / "model.safetensors" for run_dir in (ours, theirs))
        assert mine.read_bytes() == yours.read_bytes(), version


def assert_alike(ours: RunDir, theirs: RunDir, version: int) -> None:
    """Metrics and weights of two runs are the same but for the order of sums."""
    names = {
        *(f"{name}/mean" for name in ("loss", "entropy", "mismatch_kl", "lag_kl")),
        "optim/grad_norm",
        "masked_fraction",
    }
    lines = read_metrics(ours.metrics)
    for key, line in read_metrics(theirs.metrics).items():
        for name in line.keys() & {*names, "validation/loss"}:
            assert lines[key][name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), (key, name)
    mine, yours = (
        load_file(run_dir.weights(version) / "model.safetensors") for run_dir in (ours, theirs)
    )
    for name, weight in yours.items():
        assert (mine[name] - weight).norm() <= 1e-5 * weight.norm(), name
