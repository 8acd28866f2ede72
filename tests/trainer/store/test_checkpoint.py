import json
import os
import pickle
import shutil
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import OptimConfig, TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir import files
from rl.run_dir.checksums import checksum, newest_sound_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.trainer.model.policy import load_policy
from rl.trainer.optim import make_optimizer
from rl.trainer.start import newest_checkpoint
from rl.trainer.store import checkpoint
from rl.trainer.store import saver as saver_module
from rl.trainer.store.saver import Saver
from tests.families import CONFIGS
from tests.trainer.samples import save_checkpoint


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
    save_checkpoint(tmp_path / "000007", 7, *trained, world)
    random_after = torch.rand(3)
    step(*trained)
    other = fresh(tied_folder, world)
    path, manifest = checkpoint.newest_sound(tmp_path, world)
    assert checkpoint.load(path, manifest, *other, world) == 7
    assert torch.equal(torch.rand(3), random_after)
    step(*other)
    assert all(torch.equal(a, b) for a, b in zip(state(*trained), state(*other), strict=True))


def test_the_thread_that_writes_touches_no_gpu(trained, world, tmp_path, monkeypatch):
    """It asked the current stream of GPU 0 to copy what was in the CPU's memory already, on every rank."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda *_: pytest.fail("a stream was asked for"))
    kept = checkpoint.snapshot(*trained, world)
    checkpoint.write(tmp_path / "000001", 1, kept, checkpoint.fingerprint(trained[0]), world)
    assert newest_sound_checkpoint(tmp_path) == (1, {})


def test_no_checkpoint(world, tmp_path):
    (tmp_path / ".000003.tmp").mkdir()
    assert checkpoint.newest_sound(tmp_path, world) is None


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(trained, world, tmp_path, capsys, file, damage):
    for number in (2, 3):
        save_checkpoint(tmp_path / f"{number:06d}", number, *trained, world)
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


class RunsACommand:
    def __init__(self, mark):
        self.content_id = mark

    def __reduce__(self):
        return os.system, (f"touch {self.content_id}",)


@pytest.mark.parametrize("kind", ["command", "bytes", "outside"])
def test_a_strangers_checkpoint_runs_nothing(trained, world, tmp_path, kind):
    """Whoever writes the pickle writes the manifest with its hash, too. What DCP keeps as bytes, torch would unpickle."""
    save_checkpoint(path := tmp_path / "000007", 7, *trained, world)
    content = pickle.loads((path / ".metadata").read_bytes())
    if kind == "command":
        content = RunsACommand(tmp_path / "mark")
    elif kind == "bytes":
        content.state_dict_metadata[next(iter(content.state_dict_metadata))] = BytesStorageMetadata()
    else:
        next(iter(content.storage_data.values())).relative_path = "../000006/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(content))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = checksum(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))
    found, manifest = checkpoint.newest_sound(tmp_path, world)
    with pytest.raises(RunError, match=r"nothing of it was run.*move .*000007 away"):
        checkpoint.load(found, manifest, *trained, world)
    with pytest.raises(RunError, match="nothing of it was run"):
        checkpoint.load_weights(found, manifest, trained[0])
    assert not (tmp_path / "mark").exists()


def test_another_model_is_refused(trained, world, tmp_path):
    save_checkpoint(tmp_path / "c" / "000001", 1, *trained, world)
    other = fresh(make_tiny_model(tmp_path / "m", CONFIGS["llama"] | {"num_hidden_layers": 1}), world)
    with pytest.raises(RunError, match="another model"):
        checkpoint.load(*checkpoint.newest_sound(tmp_path / "c", world), *other, world)


def test_a_checkpoint_is_written_while_the_model_trains_on(trained, tied_folder, world, tmp_path, monkeypatch):
    """What is saved is the state at the call; the next save waits for it, and an error comes with the next call."""
    run_dir, write, release = RunDir(tmp_path, tmp_path / "weights"), checkpoint.write, threading.Event()

    def slow(*args):
        assert release.wait(10)
        write(*args)

    monkeypatch.setattr(checkpoint, "write", slow)
    saver = Saver(run_dir, TrainerConfig(), world, 0)
    step(*trained)
    expected = state(*trained)
    saver.save(1, *trained)
    step(*trained)
    saver.thread.raise_errors()
    assert not any(torch.equal(a, b) for a, b in zip(expected, state(*trained), strict=True))
    assert saver.step == 0 and saver.began == 1 and not run_dir.checkpoint(1).exists()
    release.set()
    saver.finish()
    assert saver.step == 1
    other = fresh(tied_folder, world)
    assert checkpoint.load(*checkpoint.newest_sound(run_dir.checkpoints, world), *other, world) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, state(*other), strict=True))
    assert checkpoint.differing(run_dir.checkpoint(1), *other, world) == []
    assert len(checkpoint.differing(run_dir.checkpoint(1), *trained, world)) == len(expected)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    saver.save(2, *trained)
    with pytest.raises(OSError, match="no space left"):
        saver.finish()
    saver.finish()


def test_a_disk_that_does_not_answer_ends_the_wait(trained, world, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write", lambda *_: time.sleep(1))
    saver = Saver(RunDir(tmp_path, tmp_path), TrainerConfig(), world, 0)
    saver.deadline_s = 0.1
    saver.save(1, *trained)
    with pytest.raises(RunError, match=r"waited 0 s for checkpoint 1 to be written to .*: does that disk answer"):
        saver.finish()


def test_errors_of_torch_become_ours(tmp_path):
    """Also those that are no Exception, which a thread pool would lose: its caller would wait for ever."""
    full, strange = (CheckpointException("write", {0: (error, None)}) for error in (OSError(28, "No space"), ValueError("what")))
    assert checkpoint.cause_of(full, tmp_path, {}).errno == 28
    assert isinstance(checkpoint.cause_of(strange, tmp_path, {}), RuntimeError)


def test_a_damaged_checkpoint_does_not_count_for_retention(trained, world, tmp_path):
    """It is moved away at the start; if it is the only one, it stays for rl to repair the run."""
    config = RLConfig(name="r", output_dir=str(tmp_path))
    run_dir = config.run_dir
    for number in (2, 3):
        save_checkpoint(run_dir.checkpoint(number), number, *trained, world)
    hurt(run_dir.checkpoint(3) / "__0_0.distcp", "flip")
    said = []
    path, _ = newest_checkpoint(config, run_dir, world, newest_sound_checkpoint(run_dir.checkpoints), said.append)
    assert path == run_dir.checkpoint(2) and list(numbered(run_dir.checkpoints)) == [2]
    (moved,) = run_dir.discarded.glob("*/checkpoints/*")
    fault = run_dir.checkpoint(3) / "__0_0.distcp"
    remark = f"{fault}: damaged; the trainer starts from checkpoint 2 (moved to {moved})"
    assert moved.name == "000003" and (moved.parents[1] / "remarks.txt").read_text() == remark + "\n"
    assert [(warning.about, warning.env, warning.text) for warning in said] == [("damaged", "", remark)]
    hurt(run_dir.checkpoint(2) / "__0_0.distcp", "flip")
    with pytest.raises(CorruptFileError, match="no intact checkpoint"):
        newest_checkpoint(config, run_dir, world, newest_sound_checkpoint(run_dir.checkpoints), said.append)
    assert list(numbered(run_dir.checkpoints)) == [2]


class Simulation:
    """A run of steps of 10 s on a clock of its own, with checkpoints that cost what they do at 32B parameters: 390 GB are copied in 6 s,
    and written at 1.3 GB/s."""

    STEP_S, COPY_S, WRITE_S = 10.0, 6.0, 300.0

    def __init__(self, monkeypatch, tmp_path, world, **settings):
        self.now, self.training_s, self.undisturbed_s, self.written = 0.0, 0.0, 0.0, []
        self.until, self.work = 0.0, None
        monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(checkpoint, "snapshot", lambda *_: self.spend(self.COPY_S))
        monkeypatch.setattr(checkpoint, "fingerprint", str)
        monkeypatch.setattr(checkpoint, "write", lambda path, *_: self.written.append(int(path.name)))
        self.saver = Saver(RunDir(tmp_path, tmp_path), TrainerConfig.model_validate({"checkpoint": settings}), world, 0)
        self.saver.thread = self

    def spend(self, seconds):
        """Time passes, in which the thread writes what it has."""
        end = self.now + seconds
        if self.work and self.until <= end:
            self.now, work, self.work = self.until, self.work, None
            work()
        self.now = end

    def raise_errors(self):
        """Nothing fails."""

    def start(self, function, *args):
        assert not self.work, "two at once"
        self.until, self.work = self.now + self.WRITE_S, lambda: function(*args)

    def result(self, *_):
        if self.work:
            self.spend(self.until - self.now)

    def run(self, hours):
        step = 0
        while self.now < 3600 * hours:
            step += 1
            self.saver.start_clock()
            self.undisturbed_s += 0.0 if self.work else self.STEP_S
            self.training_s += self.STEP_S
            self.spend(self.STEP_S)
            if self.saver.due(step, 10**9):
                self.saver.save(step, None, None)
        return self.training_s / self.now, self.undisturbed_s / self.now


def test_checkpoints_leave_the_time_to_training(world, tmp_path, monkeypatch):
    """Nineteen parts of twenty, even if training stood still while one is written; and as often as that allows."""
    simulation = Simulation(monkeypatch, tmp_path, world)
    training, undisturbed = simulation.run(hours=48)
    assert training > 0.99 and undisturbed >= 0.95
    begun = [simulation.STEP_S * step for step in simulation.written]  # in training's own time
    assert begun[0] == 60 and all(20 * 306 <= b - a - 300 <= 20 * 306 + 20 for a, b in pairwise(begun))
    assert simulation.saver.metrics()["time/checkpoint_cost"] == 306
    assert simulation.saver.metrics()["time/checkpoint_fraction"] < 0.05


def test_cheap_checkpoints_keep_the_interval(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Simulation, "COPY_S", 0.5)
    monkeypatch.setattr(Simulation, "WRITE_S", 1.5)
    simulation = Simulation(monkeypatch, tmp_path, world)
    simulation.run(hours=1)
    assert {b - a for a, b in pairwise(simulation.written)} == {7}  # 60 s from the end of the last one on


def test_an_interval_in_steps_is_obeyed_whatever_it_costs(world, tmp_path, monkeypatch):
    simulation = Simulation(monkeypatch, tmp_path, world, interval=10)
    training, _ = simulation.run(hours=10)
    assert training < 0.4 and {b - a for a, b in pairwise(simulation.written)} == {10}
    assert simulation.saver.metrics() == {"time/checkpoint_cost": 306, "time/checkpoint_fraction": 1.0}
