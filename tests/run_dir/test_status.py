"""Heartbeats, phases and the lock that fences a role."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from rl.run_dir import spans
from rl.run_dir.lease import LockOwner, declare_lost, hold_role, this_process
from rl.run_dir.status import (
    Phase,
    RoleStatus,
    Status,
    describe,
    read_json,
    read_status,
    write_status,
)
from rl.system.errors import RESTART, RunError
from tests.waiting import until


def test_a_status_says_what_its_process_does_and_since_when(tmp_path):
    path = tmp_path / "status" / "trainer.json"
    assert read_status(path) is None
    status = Status(path, "trainer")
    assert read_status(path).phase is Phase.STARTING
    status.enter(Phase.WAITING_FOR_BATCH, 4, "starting", address="tcp://1")
    first = read_status(path)
    assert (first.waiting_for, first.detail) == ("orchestrator", "starting")
    status.enter(Phase.WAITING_FOR_BATCH, 4, "filling batch 4")
    again = read_status(path)
    assert (again.since, again.address, again.detail) == (first.since, "tcp://1", "filling batch 4")
    status.enter(Phase.TRAINING, 4)
    training = read_status(path)
    assert (training.waiting_for, training.detail, training.address) == (None, "", "tcp://1")
    status.enter(Phase.TRAINING, 5)
    assert read_status(path).since > training.since > first.since
    status.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("phase", "fields", "sentence"),
    [
        (Phase.EVALUATING, {"step": 10, "detail": "gsm8k"}, "evaluating gsm8k at version 10"),
        (
            Phase.PUBLISHING,
            {"step": 3, "detail": "writing it"},
            "publishing version 3: writing it",
        ),
        (Phase.TRAINING, {}, "training step ?"),
        (None, {}, "in an unknown phase"),
    ],
)
def test_the_sentence_for_people(phase, fields, sentence):
    assert describe(RoleStatus(phase=phase, **fields)) == sentence


def test_progress_is_counted_by_all_threads_and_written_with_the_beat(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.run_dir.status.HEARTBEAT_S", 0.05)
    path = tmp_path / "x.json"
    status = Status(path, "x")
    assert read_status(path).progress == 0
    threads = [
        threading.Thread(target=lambda: [status.advance() for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status.advance(7)
    until(lambda: read_status(path).progress == 4007)
    seen = read_status(path).progressed
    assert seen > status.current.started
    time.sleep(0.15)
    assert read_status(path).progressed == seen
    status.close()


def test_closing_is_final(tmp_path, monkeypatch):
    """A concurrent heartbeat must not bring the file back."""
    monkeypatch.setattr("rl.run_dir.status.HEARTBEAT_S", 0.001)
    for i in range(30):
        path = tmp_path / f"{i}.json"
        status = Status(path, "x")
        time.sleep(0.003)
        status.close()
    time.sleep(0.05)
    assert os.listdir(tmp_path) == []


def test_a_process_of_a_machine_that_was_declared_lost_writes_nothing(tmp_path, monkeypatch):
    """Regression: the heartbeat of one that was frozen replaced the status, so the address, of
    its successor, and its end deleted it."""
    monkeypatch.setattr("rl.run_dir.status.HEARTBEAT_S", 0.05)
    machine, path = tmp_path / "status" / "nodes" / "1.000001.lease", tmp_path / "status" / "x.json"
    machine.parent.mkdir(parents=True)
    machine.write_bytes(b"held")
    monkeypatch.setenv("RL_MACHINE_LEASE", "nodes/1.000001.lease")
    spans.start(tmp_path / "spans", "x")
    status = Status(path, "x")
    status.gauges["requests"] = 123

    def own_lines():
        """Statuses that earlier tests have left add their gauges, which are other numbers."""
        lines = (tmp_path / "spans" / "x.jsonl").read_bytes().splitlines()
        return [line for line in lines if b'"gauges"' not in line or b'"requests":123' in line]

    until((tmp_path / "spans" / "x.jsonl").exists)
    declare_lost(machine)
    time.sleep(0.2)
    write_status(path, RoleStatus(process="x", address="of its successor"))
    before = own_lines()
    status.enter(Phase.TRAINING, 4)
    time.sleep(0.2)
    status.close()
    assert read_status(path).address == "of its successor" and own_lines() == before
    spans.recorder = None


def test_an_event_loop_does_not_wait_for_the_disk_of_its_status(tmp_path, monkeypatch):
    """Regression: on a hung file system it stopped at its next event, and with it everything
    that asks it."""
    status, answers = Status(tmp_path / "x.json", "x"), threading.Event()

    def hung(path, status):
        assert answers.wait(60)
        write_status(path, status)

    monkeypatch.setattr("rl.run_dir.status.write_status", hung)
    status.writes_at_once = False
    status.enter(Phase.FILLING_BATCH, 3, batch_done=7)
    assert (status.current.phase, status.current.batch_done) == (Phase.FILLING_BATCH, 7)
    assert read_status(tmp_path / "x.json").phase is Phase.STARTING
    answers.set()
    until(lambda: read_status(tmp_path / "x.json").batch_done == 7)
    status.close()


def test_a_gauge_that_fails_ends_neither_the_heartbeat_nor_the_process(tmp_path, monkeypatch):
    """Regression: the heartbeat's thread read it, and ended, so `rl` killed a healthy process."""
    monkeypatch.setattr("rl.run_dir.status.HEARTBEAT_S", 0.02)
    status, reads, faults = Status(tmp_path / "x.json", "x"), iter([3, None, 5]), []

    def read():
        if (value := next(reads, 5)) is None:
            raise RuntimeError("dictionary changed size during iteration")
        return value

    def written(name):
        return getattr(read_status(tmp_path / "x.json"), name)

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: faults.append(str(context["exception"]))
        )
        status.follow("playing", read)
        while written("playing") != 5:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))
    last = written("heartbeat")
    until(lambda: written("heartbeat") > last)
    assert faults == ["dictionary changed size during iteration"]
    status.close()


def test_what_a_file_or_a_field_cannot_be_counts_as_not_there(tmp_path):
    path = tmp_path / "x.json"
    for text in ('{"phase"', "[1]"):
        path.write_text(text)
        assert read_status(path) is None
    write_status(path, RoleStatus(phase=Phase.TRAINING, step=2))
    assert read_status(path) == RoleStatus(phase=Phase.TRAINING, step=2)
    assert os.listdir(tmp_path) == ["x.json"]
    damaged = {"phase": "dancing", "step": "3", "waiting_for": "godot", "pid": True}
    damaged |= {"since": None, "started": 1e300, "quarantined": [1]}
    path.write_text(json.dumps(damaged | {"heartbeat": 5, "host": "a"}))
    assert read_status(path) == RoleStatus(heartbeat=5.0, host="a")


def test_a_role_has_one_owner(tmp_path):
    path = tmp_path / "status" / "trainer.lock"
    code = (
        f"from rl.run_dir.lease import *; held = hold_role(Path({str(path)!r})); print('held', "
        "flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(
        RunError,
        match=f"trainer of this run is already running \\(pid {owner.pid} on .*\\); stop it first",
    ) as caught:
        hold_role(path)
    assert caught.value.exit_code == RESTART
    owner.kill()
    owner.wait()
    lease = hold_role(path)
    assert read_json(path, LockOwner) == this_process()
    with pytest.raises(RunError):
        hold_role(path)
    lease.close()
    hold_role(path).close()


def test_a_lock_that_names_nobody_is_taken(tmp_path):
    path = tmp_path / "trainer.lock"
    path.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
    assert read_json(path, LockOwner) is None
    hold_role(path).close()
    assert read_json(path, LockOwner) == this_process()
