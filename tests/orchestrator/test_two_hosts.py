"""Two hosts share a run directory: one orchestrator is stopped, taken for dead by the other, and
then continues.

Whatever it was doing, every batch is by exactly one of them, the stopped one learns what has
happened and ends, no temporary file of a live process is deleted, and no line of numbers is torn,
lost or duplicated.
"""

import errno
import fcntl
import json
import os
import signal
import time
from functools import partial

import msgspec
import pytest

from rl.orchestrator.batches.batch_files import commit
from rl.run_dir import lease, metrics
from rl.run_dir.files import TakenError, clean_leftovers, temporary_name, write_directory
from rl.run_dir.lease import check_fence, hold_role
from rl.run_dir.metrics import MetricsLog, merging
from rl.run_dir.paths import RunDir, numbered
from rl.run_dir.status import Status
from rl.system import faults
from rl.system.errors import GIVE_UP
from rl.wire.batch_file import (
    check_rollouts,
    decode_batch,
    remove_rollouts,
    write_batch,
)
from rl.wire.messages import TrainBatch
from tests.hosts import Host, LateListings, permitted
from tests.waiting import until

pytestmark = pytest.mark.skipif(not permitted(), reason="may not make pid namespaces")
STEPS, STOPPED_AT = 6, 3
ENVIRONMENT = {"no locks": 0.0, "late listings": 0.3}
POINTS = (
    "rollouts.write",
    "rollouts.rename",
    "batch.torn",
    "batch.rename",
    "batch.linked",
    "batch.fsync_dir",
    "metrics.write",
)
"""Not in the middle of a line of numbers: that is one system call, in which no process is
stopped. And not between a merge's check of the lease and its append, which would duplicate lines
in metrics.jsonl (the last one counts)."""


class Stops(faults.FaultPlan):
    """Stops the process with all its threads instead of killing it."""

    def strike(self):
        os.kill(os.getpid(), signal.SIGSTOP)


def set_up(root, environment):
    """Sets up the file system that this process sees, and short timeouts."""

    def flock(_fd, _how):
        if environment == "no locks":
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock  # each host alone sees its locks, where there are some
    os.fsync = lambda fd: None
    lease.LEASE_S, lease.RENEW_S, metrics.MERGE_S = 0.8, 0.1, 0.05
    if late_s := ENVIRONMENT[environment]:
        LateListings(root, late_s)


def orchestrate(root, environment, host, point=""):
    """Commits batches as the orchestrator does; stops at `point`."""
    set_up(root, environment)
    run_dir = RunDir(root, root / "weights")
    hold_role(run_dir.lock("orchestrator"), 20)
    if point:
        faults.plan = Stops(f"p:{point}:{STOPPED_AT}", process="p")
    clean_leftovers(run_dir.batches, run_dir.rollouts_dir, ours="")
    status = Status(run_dir.status("orchestrator"), "orchestrator")
    fence = partial(check_fence, run_dir.lock("orchestrator"))
    newest = run_dir.newest_batch()
    remove_rollouts(run_dir, after=newest)
    log = MetricsLog(run_dir.metrics, "orchestrator", fence)
    with merging(run_dir.metrics, fence):
        for step in range(newest + 1, STEPS + 1):
            lines = json.dumps({"host": host}).encode()
            commit(run_dir, TrainBatch(step=step, samples=[]), lines, {"host": host}, fence)
            log.write(step, {"x": 1.0})
        until(lambda: (root / "trained").exists(), 20)
        time.sleep(ENVIRONMENT[environment])
    status.close()


def train(root, environment):
    """A live process on the first host: it writes numbers, its status, and a version for as long
    as all this lasts."""
    set_up(root, environment)
    run_dir = RunDir(root, root / "weights")
    hold_role(run_dir.lock("trainer"), 20)
    status = Status(run_dir.status("trainer"), "trainer")
    beside = temporary_name(run_dir.status("trainer"))
    beside.write_bytes(b"half")
    log = MetricsLog(run_dir.metrics, "trainer")

    def fill(folder):
        (folder / "a").write_text("1")
        step = 0
        while not (root / "end").exists():
            step += 1
            log.write(step, {"y": float(step)})
            time.sleep(0.01)
        (folder / "b").write_text("2")

    write_directory(run_dir.weights(1), fill, new=True)
    assert beside.read_bytes() == b"half"
    beside.unlink()
    status.close()
    (root / "trained").touch()


def a_takeover(root, environment, point):
    """Checks the guarantees with the first host stopped when it reaches `point` for the third
    time. Returns whose the batches are."""
    run_dir = RunDir(root, root / "weights")
    for folder in run_dir.folders:
        folder.mkdir(parents=True, exist_ok=True)
    first = Host("a", partial(orchestrate, root, environment, "a", point), root / "a.log")
    trainer = Host("a", partial(train, root, environment), root / "t.log")
    hosts = [first, trainer]
    try:
        until(first.is_stopped, 20)
        second = Host("b", partial(orchestrate, root, environment, "b"), root / "b.log")
        hosts.append(second)
        until(lambda: run_dir.batch(STOPPED_AT + 1).exists(), 20)
        first.go_on()
        assert first.wait() == GIVE_UP, (root / "a.log").read_text()
        said = (root / "a.log").read_text().splitlines()[-1]
        assert "RunError: " in said and " on b) has taken over as orchestrator of this run" in said
        (root / "end").touch()
        assert (trainer.wait(), second.wait()) == (0, 0), (root / "t.log").read_text() + (
            root / "b.log"
        ).read_text()
    finally:
        for host in hosts:
            host.close()
    return check(run_dir)


def check(run_dir):
    owners = []
    for step in range(1, STEPS + 1):
        state = msgspec.msgpack.decode(decode_batch(run_dir.batch(step).read_bytes(), "x").state)
        check_rollouts(run_dir.rollouts(step))
        assert json.loads(run_dir.rollouts(step).read_bytes()) == state
        owners.append(state["host"])
    assert owners == sorted(owners) and set(owners) == {"a", "b"}
    assert list(numbered(run_dir.batches, ".batch")) == list(range(1, STEPS + 1)) and not list(
        run_dir.root.rglob(".*")
    )
    assert sorted(path.name for path in run_dir.weights(1).iterdir()) == ["a", "b"]
    merged = run_dir.metrics.read_bytes().splitlines()
    sources = [
        line
        for path in (run_dir.root / "metrics").iterdir()
        for line in path.read_bytes().splitlines()
    ]
    assert (
        sorted(merged) == sorted(sources)
        and len(set(merged)) == len(merged) > STEPS
        and all(map(json.loads, merged))
    )
    return owners


@pytest.mark.parametrize(
    ("environment", "point", "owners"),
    [("no locks", "batch.rename", "aabbbb"), ("late listings", "batch.linked", "aaabbb")],
)
def test_who_was_taken_for_dead_ends_and_changes_nothing(tmp_path, environment, point, owners):
    assert "".join(a_takeover(tmp_path / "r", environment, point)) == owners


@pytest.mark.proof
@pytest.mark.parametrize("environment", ENVIRONMENT)
def test_wherever_it_was_stopped(tmp_path, environment):
    for point in POINTS:
        a_takeover(tmp_path / point / "r", environment, point)


def commit_all(root, host):
    """Commits batches without a role, at the same time as another host; reports which were its
    own."""
    until(lambda: len([*root.glob("*.ready")]) == 2)
    os.fsync = lambda fd: None
    mine = []
    for step in range(1, 101):
        try:
            write_batch(
                root / f"{step:06d}.batch", TrainBatch(step=step, samples=[]), {"host": host}
            )
            mine.append(step)
        except TakenError:
            pass
    (root / host).write_text(json.dumps(mine))


def test_of_two_that_commit_at_once_one_wins(tmp_path):
    hosts = [
        Host(name, partial(commit_all, tmp_path, name), tmp_path / f"{name}.log") for name in "ab"
    ]
    for name in "ab":
        (tmp_path / f"{name}.ready").touch()
    assert [host.wait() for host in hosts] == [0, 0]
    owners = sorted(
        (step, name) for name in "ab" for step in json.loads((tmp_path / name).read_text())
    )
    states = [
        msgspec.msgpack.decode(
            decode_batch((tmp_path / f"{step:06d}.batch").read_bytes(), "x").state
        )
        for step in range(1, 101)
    ]
    assert owners == [(step, state["host"]) for step, state in enumerate(states, 1)] and not list(
        tmp_path.glob(".*")
    )
