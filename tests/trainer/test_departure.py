"""SIGTERM to real trainer processes: at once, or after a checkpoint, from which the next start goes
on as if nothing had been. And two real ranks, one of which is lost or late in a part of the
training that both take part in.
"""

import os
import re
import signal
import time
from functools import wraps
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

import rl.trainer.train
from rl.run_dir.metrics import MetricsLog, read_metrics
from rl.run_dir.paths import Retention, numbered
from rl.run_dir.status import Phase, read_status
from rl.system.errors import WRONG_SETTINGS
from rl.trainer import train
from rl.trainer.departure import Departure
from rl.trainer.store import versions
from rl.wire.transport import OrchestratorClient
from tests.trainer.samples import assert_alike, assert_same_files
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.trainer.test_main import (
    STEPS,
    batches,
    make_config,
    ranks_of,
    run_trainer,
    start_trainer,
)
from tests.waiting import until

LEFT = 143
RARELY = {"checkpoint": {"interval": 100}}
"""No checkpoint is due before the last step."""
SIGNAL_IN_STEP_3 = "tests.trainer.test_departure:signal_in_step_3"


def signal_in_step_3():
    """Rank 0, and no other, gets SIGTERM in the middle of step 3, which then takes
    RL_TEST_STEP_S more."""
    train_step = rl.trainer.train.train_step

    def slow(context, packed, lr, timer):
        if packed.batch.step == 3 and context.world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(float(os.environ["RL_TEST_STEP_S"]))
        return train_step(context, packed, lr, timer)

    rl.trainer.train.train_step = slow


@pytest.fixture
def told_in_step_3(monkeypatch):
    """Sets what the processes that `signal_in_step_3` changes read: their grace and the rest of
    step 3, in seconds."""

    def tell(grace_s: str, step_s: float) -> None:
        monkeypatch.setenv("RL_GRACE_S", grace_s)
        monkeypatch.setenv("RL_TEST_STEP_S", str(step_s))

    yield tell


def steps_of(run_dir) -> list[int]:
    return [step for step, _ in read_metrics(run_dir.metrics)]


def assert_left(run_dir, step: int) -> None:
    """It has left after `step`: everything is saved, and nobody takes it for a failure or waits
    for its role."""
    assert list(numbered(run_dir.checkpoints)) == [step] and steps_of(run_dir) == list(
        range(1, step + 1)
    )
    assert list(numbered(run_dir.weights_dir)) == list(range(1, step + 1))
    assert not run_dir.exit_code("trainer").exists() and not run_dir.status("trainer").exists()
    assert [lease.read_bytes() for lease in run_dir.status_dir.glob("trainer.*.lease")] == [b""], (
        "it has given its role back"
    )


def assert_goes_on(config, straight, step: int, ranks: int = 1) -> None:
    """The next start trains the steps after `step`, and all versions equal those of a run in one
    go, of two ranks but for the order of sums."""
    with StubOrchestrator(config.run_dir, batches()) as orchestrator:
        run_trainer(config, ranks=ranks)
    assert set(orchestrator.asked) == set(range(step + 1, STEPS + 1))
    assert [version for version, _ in orchestrator.published] == list(range(step, STEPS + 1))
    assert steps_of(config.run_dir) == list(range(1, STEPS + 1))
    if ranks == 1:
        assert_same_files(config.run_dir, straight[0], *range(1, STEPS + 1))
    assert_alike(config.run_dir, straight[0], STEPS)


@pytest.mark.parametrize("grace_s", [0.0, 7.0])
def test_another_rank_goes_by_the_first_but_has_its_own_deadline(monkeypatch, grace_s):
    ends, told = [], [0, 0, 1]
    monkeypatch.setattr(Departure, "_start_deadline", lambda self: ends.append(self.grace_s))
    other = SimpleNamespace(is_main=False, broadcast_int=lambda _: told.pop(0))
    departure = Departure(grace_s)
    assert not departure.agreed(other)
    departure.asked.set()
    assert not departure.agreed(other), "the first rank has heard nothing"
    departure.asked.clear()
    assert departure.agreed(other) and departure.agreed(other) and not told
    assert ends == ([grace_s] if grace_s else [])


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_the_middle_of_a_step(straight, tied_folder, tmp_path, told_in_step_3, ranks):
    """Of two ranks the first alone is told."""
    told_in_step_3("20", 0.5)
    config = make_config(tmp_path, tied_folder, **RARELY)
    with StubOrchestrator(config.run_dir, batches()) as orchestrator:
        said = run_trainer(config, LEFT, SIGNAL_IN_STEP_3, ranks)
    assert "SIGTERM: saving what has been trained and leaving, within 20 s" in said
    assert [version for version, _ in orchestrator.published] == [1, 2, 3]
    assert_left(config.run_dir, 3)
    assert_goes_on(config, straight, 3, ranks)


@pytest.mark.parametrize("saved", [True, False])
def test_while_it_waits_for_the_batch_of_an_orchestrator_that_has_gone(
    straight, tied_folder, tmp_path, saved
):
    config = make_config(tmp_path, tied_folder, **({} if saved else RARELY))
    orchestrator = StubOrchestrator(config.run_dir, batches())
    orchestrator.missing = 3

    def waits():
        status = read_status(config.run_dir.status("trainer"))
        there = status and (status.phase, status.step) == (Phase.WAITING_FOR_BATCH, 3)
        return there and config.run_dir.checkpoint(2).exists() == saved

    with orchestrator:
        process = start_trainer(config, RL_GRACE_S="20")
        until(waits, 60)
    process.terminate()
    began = time.monotonic()
    assert process.wait(30) == LEFT, process.log.read_text()
    assert time.monotonic() - began < 15  # not its grace of 20 s
    assert_left(config.run_dir, 2)
    assert_goes_on(config, straight, 2)


@pytest.mark.parametrize("grace_s", ["", "1"])
def test_it_ends_in_the_middle_of_a_step_without_grace_or_when_that_is_over(
    tied_folder, tmp_path, told_in_step_3, grace_s
):
    told_in_step_3(grace_s, 60)
    config = make_config(tmp_path, tied_folder, **RARELY)
    began = time.monotonic()
    with StubOrchestrator(config.run_dir, batches()):
        run_trainer(config, LEFT, SIGNAL_IN_STEP_3)
    assert time.monotonic() - began < 40
    assert not numbered(config.run_dir.checkpoints) and steps_of(config.run_dir) == [1, 2]
    assert read_status(config.run_dir.status("trainer")).phase == Phase.TRAINING


@pytest.mark.parametrize("grace_s", ["", "600"])
def test_it_ends_at_once_before_there_is_anything_to_save(tmp_path, tied_folder, grace_s):
    config = make_config(tmp_path, tied_folder)
    process = start_trainer(config, RL_GRACE_S=grace_s)
    until(config.run_dir.status("trainer").exists, 60)
    process.terminate()
    assert process.wait(timeout=30) == LEFT


def test_a_grace_that_is_no_time_is_refused(tmp_path, tied_folder, monkeypatch):
    config = make_config(tmp_path, tied_folder)
    for text in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("RL_GRACE_S", text)
        assert f"RL_GRACE_S = {text}: give the seconds from SIGTERM" in run_trainer(
            config, WRONG_SETTINGS
        )


TIMEOUT_S, LATE_S = 3.0, 4.0
LOST = {
    "batch": (dist, "broadcast", 6),  # four calls are of the start
    "forward and backward": (train, "score", 3),
    "norm": (train, "optimizer_step", 2),
    "publishing": (versions, "snapshot", 2),
}
"""Where rank 1 is lost: module, a function that both ranks call, and the number of the call that
it never gets through. Not in a thread, whose end rank 0 may not see while it meets the others:
torchrun's agent does, see tests/proofs/lost_ranks.py."""
LATE = {
    (0, "the answer to a version"): (OrchestratorClient, "published", 1),
    (0, "a batch"): (OrchestratorClient, "get_batch", 3),
    (0, "its metrics' disk"): (MetricsLog, "write", 3),
    (1, "its checkpoint's disk"): (FileSystemWriter, "write_data", 1),
    (0, "old checkpoints to be gone"): (Retention, "delete_old", 2),
}
"""(rank, what it waits for): class, method, and the number of the call that takes LATE_S."""


def before_call(owner: object, name: str, number: int, act) -> None:
    """Has `act` be called before the call of that number."""
    whole, count = getattr(owner, name), 0

    @wraps(whole)
    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            act()
        return whole(*args, **kwargs)

    setattr(owner, name, counted)


def lose_rank_1():
    if os.environ["RANK"] == "1":
        before_call(
            *LOST[os.environ["RL_TEST_PLACE"]],
            lambda: os.kill(os.getpid(), int(os.environ["RL_TEST_SIGNAL"])),
        )


def be_late():
    for (rank, what), place in LATE.items():
        if os.environ["RANK"] == str(rank):
            before_call(
                *place, lambda what=what: (print(f"late: {what}", flush=True), time.sleep(LATE_S))
            )


def lose(tmp_path, model, place: str, signum: int) -> tuple[int, str]:
    """Returns the exit code of rank 0, and what it says."""
    config = make_config(tmp_path / place, model, rank_timeout_s=TIMEOUT_S)
    with StubOrchestrator(config.run_dir, batches()):
        env = {"RL_TEST_PLACE": place, "RL_TEST_SIGNAL": str(int(signum))}
        processes = [
            start_trainer(config, "tests.trainer.test_departure:lose_rank_1", **env, **world)
            for world in ranks_of(2)
        ]
        code = processes[0].wait(120)
        for process in processes:
            process.kill()
    return code, processes[0].log.read_text()


@pytest.mark.parametrize("place", LOST)
def test_a_rank_that_dies_is_named_and_the_others_end(tied_folder, tmp_path, place):
    code, said = lose(tmp_path, tied_folder, place, signal.SIGKILL)
    assert code == 1 and re.search(
        r"^trainer: rank 0 on .* has lost rank 1 on .*, .*", said, re.MULTILINE
    ), said


def test_a_rank_that_stands_still_is_named_after_the_deadline_of_a_collective(
    tied_folder, tmp_path
):
    """If `rl` does not notice it before."""
    code, said = lose(tmp_path, tied_folder, "forward and backward", signal.SIGSTOP)
    assert code == 1 and re.search(
        r"^trainer: rank 0 on .* has lost rank 1 on .*, training step \d", said, re.MULTILINE
    ), said


def test_nothing_ends_while_a_rank_waits_for_the_orchestrator_or_a_disk(
    straight, tied_folder, tmp_path
):
    """For longer than a collective may take. Each wait is one that the other rank waits for."""
    config = make_config(tmp_path, tied_folder, rank_timeout_s=TIMEOUT_S)
    with StubOrchestrator(config.run_dir, batches()):
        said = run_trainer(config, setup="tests.trainer.test_departure:be_late", ranks=2)
    assert said.count("late: ") == sum(rank == 0 for rank, _ in LATE)
    assert_alike(config.run_dir, straight[0], STEPS)
