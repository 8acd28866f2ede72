import errno
import json
import os
import pickle
import resource
import shutil
import signal
import threading
import time
import types
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from rl.config.trainer import TrainerConfig
from rl.models.tiny import make_tiny_model
from rl.run_dir import checksums, files
from rl.run_dir.checksums import checksum, newest_sound_checkpoint, read_manifest, verify_checkpoint
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbered
from rl.trainer.optim import local
from rl.trainer.store import checkpoint
from rl.trainer.store import saver as saver_module
from rl.trainer.store.checkpoint import SLACK_BYTES, require_space, write_tensors
from rl.trainer.store.saver import Saver
from tests.families import CONFIGS
from tests.raised import run_error
from tests.trainer.policies import learner
from tests.trainer.samples import assert_equal, save_checkpoint, toy_step


@pytest.fixture
def trained(tied_folder, world):
    return fresh(tied_folder, world)


def fresh(folder, world):
    return learner(folder, world, attention="eager", optim={"lr": 0.1})[:2]


def state(model, optimizer):
    """Weights, moments and numbers of steps."""
    moments = [v[key] for v in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    whole = [tensor.detach() for tensor in (*model.parameters(), *moments)]
    steps = [values["step"] for values in optimizer.state.values()]
    return dict(enumerate(tensor.clone() for tensor in (*whole, *steps)))


def test_what_is_loaded_is_what_was_saved(trained, tied_folder, world, tmp_path):
    toy_step(*trained)
    save_checkpoint(tmp_path / "000007", 7, *trained, world)
    random_after = torch.rand(3)
    toy_step(*trained)
    other = fresh(tied_folder, world)
    assert checkpoint.load(checkpoint.newest(tmp_path, world), *other, world) == 7
    assert torch.equal(torch.rand(3), random_after)
    toy_step(*other)
    assert_equal(state(*trained), state(*other))


def test_each_rank_syncs_what_it_has_written(trained, world, tmp_path, monkeypatch):
    """Rank 0's fsync does not reach another machine's page cache."""
    synced = []
    monkeypatch.setattr(
        checkpoint,
        "fsync_path",
        lambda path: synced.append((path.name, (tmp_path / "000001").exists())),
    )
    save_checkpoint(tmp_path / "000001", 1, *trained, world)
    assert synced == [("__0_0.distcp", False)]


def test_rng_streams_that_a_checkpoint_lacks_are_left_as_they_are(
    trained, tied_folder, world, tmp_path, monkeypatch
):
    """A checkpoint of a machine without GPUs could not be resumed on one with GPUs, nor compared
    by more ranks."""
    save_checkpoint(tmp_path / "000001", 1, *trained, world)
    path = checkpoint.newest(tmp_path, world)
    assert checkpoint.differing(path, *trained, replace(world, rank=1)) == []
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda _: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(
        "torch.cuda.set_rng_state", lambda *_: pytest.fail("the checkpoint has none")
    )
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    other = fresh(tied_folder, world)
    on_gpu = replace(world, device=torch.device("cuda", 0))
    assert checkpoint.load(path, *other, on_gpu) == 1
    assert_equal(state(*trained), state(*other))


def test_the_thread_that_writes_touches_no_gpu(trained, world, tmp_path, monkeypatch):
    """It asked the current stream of GPU 0 to copy what was in the CPU's memory already, on
    every rank."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda *_: pytest.fail("a stream was asked for")
    )
    kept = checkpoint.snapshot(*trained, world)
    checkpoint.write(tmp_path / "000001", 1, kept, checkpoint.fingerprint(trained[0]), world)
    assert newest_sound_checkpoint(tmp_path) == (1, {})


def test_the_state_is_copied_into_the_same_memory_again(trained, world, tmp_path, monkeypatch):
    """Each checkpoint had a new copy of everything: 384 GB at 32B parameters."""
    seen = []

    def note(path, step, state, *_):
        tensors = {name: local(value) for name, value in state.items()}
        live = checkpoint.tensors_of(*trained, world)
        assert all(value.equal(local(live[name])) for name, value in tensors.items())
        # kept, or their memory could be used again by chance
        seen.append({name: value for name, value in tensors.items() if name[:4] != "rng."})

    monkeypatch.setattr(checkpoint, "write", note)
    saver = Saver(RunDir(tmp_path, tmp_path), TrainerConfig(), world, 0)
    for step in (1, 2):
        toy_step(*trained)
        saver.copy(step, *trained)()
        saver.finish()
    first, second = seen
    assert first and all(first[name].data_ptr() == second[name].data_ptr() for name in first)


def test_files_are_hashed_while_they_are_written_and_shared_among_the_ranks_that_read_them(
    trained, world, tmp_path, monkeypatch
):
    """They were read again after they were written, and at a resume all by rank 0."""
    read, right = [], checksums.digest_of_file
    monkeypatch.setattr(
        checksums, "digest_of_file", lambda path: read.append(path.name) or right(path)
    )
    save_checkpoint(path := tmp_path / "000001", 1, *trained, world)
    assert read == [".metadata"]
    read.clear()
    verify_checkpoint(path, 0, 2)
    verify_checkpoint(path, 1, 2)
    assert sorted(read) == [".metadata", "__0_0.distcp"]


def test_no_checkpoint(world, tmp_path):
    (tmp_path / ".000003.tmp").mkdir()
    assert checkpoint.newest(tmp_path, world) is None


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_and_stays_for_rl_to_repair_the_run(
    trained, world, tmp_path, file, damage
):
    for number in (2, 3):
        save_checkpoint(tmp_path / f"{number:06d}", number, *trained, world)
    path = checkpoint.newest(tmp_path, world)
    hurt(path / file, damage)
    with pytest.raises(CorruptFileError, match=rf"000003/{file}: .*`rl` moves .*000003 away"):
        checkpoint.load(checkpoint.newest(tmp_path, world), *trained, world)
    assert list(numbered(tmp_path)) == [2, 3]


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
    """Whoever writes the pickle writes the manifest with its hash, too. What DCP keeps as bytes,
    torch would unpickle."""
    save_checkpoint(path := tmp_path / "000007", 7, *trained, world)
    content = pickle.loads((path / ".metadata").read_bytes())
    if kind == "command":
        content = RunsACommand(tmp_path / "mark")
    elif kind == "bytes":
        content.state_dict_metadata[next(iter(content.state_dict_metadata))] = (
            BytesStorageMetadata()
        )
    else:
        next(iter(content.storage_data.values())).relative_path = "../000006/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(content))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = checksum(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))
    with run_error(r"nothing of it was run.*move .*000007 away"):
        checkpoint.load(path, *trained, world)
    with run_error("nothing of it was run"):
        checkpoint.load_weights(path, read_manifest(path), trained[0])
    assert not (tmp_path / "mark").exists()


def test_another_model_is_refused(trained, world, tmp_path):
    save_checkpoint(tmp_path / "c" / "000001", 1, *trained, world)
    other = fresh(
        make_tiny_model(tmp_path / "m", CONFIGS["llama"] | {"num_hidden_layers": 1}), world
    )
    with run_error("another model"):
        checkpoint.load(checkpoint.newest(tmp_path / "c", world), *other, world)


def test_a_checkpoint_is_written_while_the_model_trains_on(
    trained, tied_folder, world, run_dir, monkeypatch
):
    """What is saved is the state at the call; the next save waits for it, and an error comes
    with the next call."""
    release = threading.Event()
    write = checkpoint.write

    def slow(*args):
        assert release.wait(10)
        write(*args)

    monkeypatch.setattr(checkpoint, "write", slow)
    saver = Saver(run_dir, TrainerConfig(), world, 0)
    toy_step(*trained)
    expected = state(*trained)
    saver.copy(1, *trained)()
    toy_step(*trained)
    saver.thread.raise_errors()
    assert not any(expected[i].equal(tensor) for i, tensor in state(*trained).items())
    assert saver.step == 0 and saver.newest_started == 1 and not run_dir.checkpoint(1).exists()
    release.set()
    saver.finish()
    assert saver.step == 1
    other = fresh(tied_folder, world)
    assert checkpoint.load(checkpoint.newest(run_dir.checkpoints, world), *other, world) == 1
    assert_equal(expected, state(*other))
    assert checkpoint.differing(run_dir.checkpoint(1), *other, world) == []
    assert len(checkpoint.differing(run_dir.checkpoint(1), *trained, world)) == len(expected)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    saver.copy(2, *trained)()
    with pytest.raises(OSError, match="no space left"):
        saver.finish()
    saver.finish()


def test_a_disk_that_does_not_answer_ends_the_wait(trained, world, tmp_path, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(checkpoint, "write", lambda *_: answers.wait(60))
    saver = Saver(RunDir(tmp_path, tmp_path), TrainerConfig(), world, 0)
    saver.deadline_s, said = 0.1, []
    # so that the status says so, and nobody blames the batch
    saver.thread.on_error = lambda: said.append(saver.newest_started)
    saver.copy(1, *trained)()
    with run_error(r"waited 0 s for checkpoint 1 to be written to .*: does that disk answer"):
        saver.finish()
    saver.deadline_s = 3000.0
    assert not saver.due(2, last=99)
    saver.last_began = time.monotonic() - 3001
    with run_error(r"waited 3001 s for checkpoint 1 to be written to .*: does that disk answer"):
        # with an interval in seconds, nobody would wait for it before the run's last step
        saver.due(3, last=99)
    assert said == [1, 1]
    answers.set()


def test_errors_of_torch_become_ours(tmp_path):
    """Also those that are no Exception, which a thread pool would lose: its caller would wait
    for ever."""
    full, strange = (
        CheckpointException("write", {0: (error, None)})
        for error in (OSError(28, "No space"), ValueError("what"))
    )
    assert checkpoint.cause_of(full, tmp_path, {}).errno == 28
    assert isinstance(checkpoint.cause_of(strange, tmp_path, {}), RuntimeError)


def test_copies_that_do_not_fit_into_the_hosts_memory_are_refused(world, monkeypatch):
    """Only moments were counted; a rank was killed without a message at the first checkpoint of
    each start."""
    # as on a GPU: a copy takes 12 GiB, a version 2 GiB
    model = torch.nn.Linear(1 << 10, 1 << 20, bias=False, device="meta")
    monkeypatch.setattr(checkpoint, "memory_bytes", lambda: (15 << 30, 15 << 30))
    checkpoint.require_host_memory(model, torch.bfloat16, True, False, world)
    checkpoint.require_host_memory(model, torch.bfloat16, False, True, world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    copies = (
        r"2 rank\(s\) for checkpoints take 24\.0 GiB of memory, for policy versions 4\.0 GiB, .* "
    )
    with run_error(copies + r"this machine has 15\.0 GiB: shard"):
        checkpoint.require_host_memory(model, torch.bfloat16, True, False, world)
    with run_error(r"trainer.optim.offload 16\.0 GiB, but this machine"):
        checkpoint.require_host_memory(model, torch.bfloat16, False, True, world)


class Clock:
    """A clock that stands still but for what a checkpoint costs: at 32B parameters 390 GB are
    copied in 6 s, and written at 1.3 GB/s."""

    def __init__(self, monkeypatch, copy_s=6.0, write_s=300.0):
        self.now = 0.0
        monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(checkpoint, "snapshot", lambda *_: self.spend(copy_s))
        monkeypatch.setattr(checkpoint, "fingerprint", str)
        monkeypatch.setattr(checkpoint, "write", lambda *_: self.spend(write_s))

    def spend(self, seconds):
        self.now += seconds

    def save(self, saver, step, at):
        """Saves the state after `step`, which is due at this time and not before."""
        for self.now in (at - 1, at):
            assert saver.due(step, 10**9) == (self.now == at)
        saver.copy(step, None, None)()
        saver.finish()


def saver_of(tmp_path, world, **settings) -> Saver:
    saver = Saver(
        RunDir(tmp_path, tmp_path), TrainerConfig.model_validate({"checkpoint": settings}), world, 0
    )
    assert not saver.due(1, 9) and saver.due(9, 9)  # the last step always
    saver.start_clock()
    return saver


def test_checkpoints_leave_the_time_to_training(world, tmp_path, monkeypatch):
    """Twenty parts of twenty-one, even if training stood still while one is written; and as
    often as that allows."""
    clock, saver = Clock(monkeypatch), saver_of(tmp_path, world)
    for step, at in ((1, 60), (2, 366 + 20 * 306), (3, 366 + 41 * 306)):
        clock.save(saver, step, at)
    assert saver.metrics() == {"time/checkpoint_cost": 306, "time/checkpoint_fraction": 1 / 21}
    saver.newest_started, clock.now = 4, saver.last_began + saver.deadline_s
    assert not saver.due(5, 9), "one is in progress"


def test_an_interval_in_steps_is_obeyed_whatever_it_costs(world, tmp_path, monkeypatch):
    Clock(monkeypatch)
    saver = saver_of(tmp_path, world, interval=10)
    for step in (10, 20):
        saver.copy(step, None, None)()
        saver.finish()
        assert [saver.due(step + more, 10**9) for more in (1, 9, 10)] == [False, False, True]
    assert saver.metrics() == {"time/checkpoint_cost": 306, "time/checkpoint_fraction": 1.0}


def test_missing_space_is_told_to_the_byte(tmp_path, monkeypatch):
    needed = torch.zeros(2**20, dtype=torch.uint8)
    missing = needed.nbytes + SLACK_BYTES - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=missing))
    text = "no space left: 1,114,112 bytes are needed, 1,114,111 are free"
    with pytest.raises(OSError, match=text):
        require_space(tmp_path, [needed])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: types.SimpleNamespace(free=needed.nbytes + SLACK_BYTES)
    )
    require_space(tmp_path, [needed])


def test_a_full_disk_is_told_as_one(tmp_path):
    """Regression: safetensors says it in its own words, which count as a fault of the program."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "a.safetensors")
