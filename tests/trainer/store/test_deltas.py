"""Versions written as what differs from the one before, and the servers that follow them."""

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl.config.trainer import WeightsConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import Mirror, is_delta, verify_version
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered, numbers
from rl.system.errors import RunError
from rl.trainer.store import image, versions
from rl.trainer.store.publisher import Publisher
from rl.wire.transport import Wait
from tests.families import CONFIGS


class Training:
    """A trainer that takes steps of Adam with gradients that are drawn, and publishes each
    version."""

    def __init__(self, folder: Path, run_dir: RunDir, **settings):
        self.base = make_tiny_model(folder / "model", CONFIGS["llama"])
        self.model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.publisher = Publisher(
            run_dir, WeightsConfig(**settings), None, Wait(10, lambda *_: None)
        )
        self.number, self.version = 0, None

    def step(self, checkpoints: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        """Returns what is published: the tensors by name."""
        generator = torch.Generator().manual_seed(self.number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()
        return self.publish(checkpoints)

    def publish(self, checkpoints: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        self.number += 1
        self.version = versions.snapshot(
            self.model, self.base, torch.bfloat16, {}, self.publisher.ranks, self.version
        )
        self.publisher.start(self.number, self.version, checkpoints)
        self.publisher.finish()
        return {
            name: parameter.detach().bfloat16() for name, parameter in self.model.named_parameters()
        }


def same(file: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(file)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
        for name in found
    )


def test_a_hundred_versions_are_exact_or_refused(tmp_path, run_dir, monkeypatch):
    """One server follows all versions, another one joins late; one delta is damaged, one is
    lost. Frames are as small as a large model's are in relation to it."""
    monkeypatch.setattr(image, "FRAME_BYTES", 10_001)
    training = Training(tmp_path, run_dir, anchor_every=10, keep_last=100)
    first, late, refused = Mirror(), Mirror(), {}
    for number in range(1, 101):
        expected, folder = training.step(), run_dir.weights(number)
        assert is_delta(folder) == (number > 1 and number % 10 > 0)
        if number == 52:
            file = folder / "delta-00001-of-00001.zst"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        if number == 74:
            folder.rename(tmp_path / "lost")
            continue
        for mirror in (first, *([late] if number > 37 else [])):
            try:
                assert same(mirror.become(folder), expected)
            except CorruptFileError as error:
                refused[number] = str(error)
    assert [*refused] == [*range(52, 60), *range(75, 80)]
    assert all(
        refused[number] == f"{run_dir.weights(52)}/delta-00001-of-00001.zst: damaged"
        for number in range(52, 60)
    )
    assert all(
        f"changes since {run_dir.weights(74)}, which is missing" in refused[number]
        for number in range(75, 80)
    )
    sizes = {
        number: sum(file.stat().st_size for file in path.glob("*.[sz]*"))
        for number, path in numbered(run_dir.weights_dir).items()
    }
    assert sizes[99] < sizes[90] / 10
    assert first.num_read <= sum(sizes.values())
    held = os.dup(first.fd)  # as a fork of this process has it
    first.free()
    assert os.fstat(held).st_size == 0 and same(first.become(folder), expected)
    assert len(verify_version(run_dir.weights(99))["tensors"]) == len(expected)
    with pytest.raises(CorruptFileError, match="damaged"):
        verify_version(run_dir.weights(52))


def test_a_delta_for_which_the_disk_is_too_small_is_no_delta(tmp_path, run_dir):
    """The system wrote a part of the last frame, and said so, and nobody looked."""
    training = Training(tmp_path, run_dir, anchor_every=3)
    training.step()
    last, limits = training.publisher.last, resource.getrlimit(resource.RLIMIT_FSIZE)
    for parameter in training.model.parameters():
        parameter.data.normal_()
    version = versions.snapshot(
        training.model,
        training.base,
        torch.bfloat16,
        {},
        training.publisher.ranks,
        training.version,
    )
    (tmp_path / "delta").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match=r"delta-00001-of-00001\.zst"):
            last.write(version.image, tmp_path / "delta")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert last.number == -1


def test_deltas_that_belong_to_another_version_are_refused(tmp_path, run_dir):
    """Version 2 was replaced by another version 2, so version 3 must not be made of it; and a
    damaged anchor is named."""
    training = Training(tmp_path, run_dir, anchor_every=10)
    training.step(), training.step(), training.step()
    other = Training(tmp_path / "other", RunDir(tmp_path / "other", tmp_path / "other" / "weights"))
    other.step(), other.publish()
    run_dir.weights(2).rename(tmp_path / "kept")
    (tmp_path / "other/weights/000001").rename(run_dir.weights(2))
    with pytest.raises(
        CorruptFileError,
        match=f"the changes since {run_dir.weights(2)} do not give what was written",
    ):
        Mirror().become(run_dir.weights(3))
    run_dir.weights(2).rename(tmp_path / "replaced")
    (tmp_path / "kept").rename(run_dir.weights(2))
    Mirror().become(run_dir.weights(3))
    weights = run_dir.weights(1) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptFileError, match=f"{weights}: tensor .* is not what was written"):
        Mirror().become(run_dir.weights(3))


def test_retention_keeps_what_kept_deltas_are_made_of(tmp_path, run_dir):
    training = Training(tmp_path, run_dir, anchor_every=5, keep_last=2, keep_every=8)
    kept = {}
    for _ in range(17):
        training.publish((8, 7) if training.number < 13 else (13,))
        kept[training.number] = numbers(run_dir.weights_dir)
    assert kept[4] == [1, 2, 3, 4]
    assert kept[6] == [5, 6]
    assert kept[12] == [5, 6, 7, 8, 10, 11, 12]
    assert kept[17] == [8, 10, 11, 12, 13, 16, 17]
    assert all(verify_version(run_dir.weights(number)) for number in kept[17])
    assert [number for number in kept[17] if is_delta(run_dir.weights(number))] == [11, 12, 13, 17]


def test_a_version_that_is_trained_again_takes_along_what_follows_it_only_if_it_differs(
    tmp_path, run_dir, monkeypatch
):
    """Deltas of another version than the one that is there were called damaged; the trainer read
    whole versions to compare deltas."""
    first, same_again, other = (Training(tmp_path, run_dir, anchor_every=10) for _ in range(3))
    expected = [first.step() for _ in range(4)][-1]
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "become", lambda *_: pytest.fail("the trainer reads no delta"))
        same_again.step(), same_again.step()
    assert numbers(run_dir.weights_dir) == [1, 2, 3, 4] and same(
        Mirror().become(run_dir.weights(4)), expected
    )
    other.step()
    other.optimizer.param_groups[0]["lr"] = 1e-3
    changed = other.step()
    assert numbers(run_dir.weights_dir) == [1, 2] and same(
        Mirror().become(run_dir.weights(2)), changed
    )


def test_without_memory_for_the_version_it_is_refused(tmp_path, run_dir, monkeypatch):
    training = Training(tmp_path, run_dir, anchor_every=10)
    training.publish(), training.publish()
    monkeypatch.setattr("rl.run_dir.checksums.memory_bytes", lambda: (2**30, 1000))
    with pytest.raises(
        RunError, match=r"are free; free memory, or move the versions with a delta.json away"
    ):
        Mirror().become(run_dir.weights(2))
