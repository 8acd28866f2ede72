import pytest
import torch

from rl.config import ModelConfig
from rl.files import CorruptFileError
from rl.messages import Acknowledged
from rl.run_dir import numbered
from rl.trainer import checkpoint
from rl.trainer.checkpoint import CheckpointMismatchError
from rl.trainer.config import CheckpointConfig, OptimConfig, TrainerConfig, WeightsConfig
from rl.trainer.model import load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.weights import delete_old_versions, kept_versions
from tests.tiny_model import make_tiny_model


@pytest.fixture
def trained(tied_folder, world):
    return fresh(tied_folder, world)


def fresh(folder, world):
    model = load_policy(str(folder), ModelConfig(dtype="float32"), TrainerConfig(attention="eager"), world)
    return model, make_optimizer(model, OptimConfig(lr=0.1))


def step(model, optimizer):
    model(torch.tensor([[5, 6, 7]])).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model, optimizer):
    moments = [v[key] for v in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    steps = [v["step"] for v in optimizer.state.values()]
    return [t.full_tensor().clone() for t in [*model.parameters(), *moments]] + [s.clone() for s in steps]


def test_what_is_loaded_is_what_was_saved(trained, tied_folder, world, tmp_path):
    step(*trained)
    checkpoint.save(tmp_path / "000007", 7, *trained, world)
    random_after = torch.rand(3)
    step(*trained)
    other = fresh(tied_folder, world)
    path, manifest = checkpoint.newest_sound(tmp_path, world)
    assert checkpoint.load(path, manifest, *other, world) == 7
    assert torch.equal(torch.rand(3), random_after)
    step(*other)
    assert all(torch.equal(a, b) for a, b in zip(state(*trained), state(*other), strict=True))


def test_no_checkpoint(world, tmp_path):
    (tmp_path / ".000003.tmp").mkdir()
    assert checkpoint.newest_sound(tmp_path, world) is None


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(trained, world, tmp_path, capsys, file, damage):
    for number in (2, 3):
        checkpoint.save(tmp_path / f"{number:06d}", number, *trained, world)
    hurt(tmp_path / "000003" / file, damage)
    path, manifest = checkpoint.newest_sound(tmp_path, world)
    assert path.name == "000002" and manifest["step"] == 2
    assert f"000003/{file}" in capsys.readouterr().err
    hurt(tmp_path / "000002" / file, damage)
    with pytest.raises(CorruptFileError, match=f"no intact checkpoint.*000002/{file}"):
        checkpoint.newest_sound(tmp_path, world)


def hurt(path, damage):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    if damage == "remove":
        path.unlink()


def test_another_model_is_refused(trained, world, tmp_path):
    checkpoint.save(tmp_path / "c" / "000001", 1, *trained, world)
    other = fresh(make_tiny_model(tmp_path / "m", layers=1), world)
    with pytest.raises(CheckpointMismatchError, match="another model"):
        checkpoint.load(*checkpoint.newest_sound(tmp_path / "c", world), *other, world)


def test_retention_of_checkpoints(tmp_path):
    for number in range(1, 8):
        (tmp_path / f"{number:06d}").mkdir()
    checkpoint.delete_old(tmp_path, CheckpointConfig(keep_last=2, keep_every=3))
    assert list(numbered(tmp_path)) == [3, 6, 7]


def test_retention_of_versions(tmp_path):
    versions = list(range(1, 11))
    config = WeightsConfig(keep_last=3, keep_every=4)
    assert kept_versions(versions, config, Acknowledged(10, keep=[3]), checkpoint_step=2) == {2, 3, 4, 8, 9, 10}
    assert kept_versions(versions, WeightsConfig(), Acknowledged(6), checkpoint_step=0) == {6, 7, 8, 9, 10}
    for version in versions:
        (tmp_path / f"{version:06d}").mkdir()
    delete_old_versions(tmp_path, config, Acknowledged(10), 2)
    assert list(numbered(tmp_path)) == [2, 4, 8, 9, 10]
