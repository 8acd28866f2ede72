"""Two real ranks, one of which is lost or late in a part of the training that both take part in."""

import os
import re
import signal
import time
from functools import wraps

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from rl.run_dir.metrics import MetricsLog
from rl.run_dir.paths import Retention
from rl.trainer import train
from rl.trainer.store import versions
from rl.wire.transport import OrchestratorClient
from tests.trainer.samples import assert_alike
from tests.trainer.stub_orchestrator import StubOrchestrator
from tests.trainer.test_main import (
    STEPS,
    batches,
    make_config,
    ranks_of,
    run_trainer,
    start_trainer,
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
            start_trainer(config, "tests.trainer.test_lost_ranks:lose_rank_1", **env, **world)
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
        said = run_trainer(config, setup="tests.trainer.test_lost_ranks:be_late", ranks=2)
    assert said.count("late: ") == sum(rank == 0 for rank, _ in LATE)
    assert_alike(config.run_dir, straight[0], STEPS)
