"""Heartbeats and the lock that fences a role."""

import os
import subprocess
import sys
import threading
import time

import pytest

from rl.status import AlreadyRunningError, Status, hold_role, read_status, write_status


def test_a_status_says_what_its_process_does_and_since_when(tmp_path):
    path = tmp_path / "status" / "trainer.json"
    assert read_status(path) is None
    status = Status(path, "trainer")
    seen = read_status(path)
    assert (seen["process"], seen["pid"], seen["doing"]) == ("trainer", os.getpid(), "starting")
    status.doing("waiting", address="tcp://1")
    first = read_status(path)
    status.doing("waiting", step=4)
    again = read_status(path)
    assert (again["since"], again["address"], again["step"]) == (first["since"], "tcp://1", 4)
    status.doing("training")
    assert read_status(path)["since"] > first["since"]
    status.close()
    assert not path.exists()


def test_the_heart_beats_while_the_process_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.status.HEARTBEAT_S", 0.05)
    path = tmp_path / "x.json"
    status = Status(path, "x")
    first = read_status(path)["heartbeat"]
    deadline = time.monotonic() + 5
    while read_status(path)["heartbeat"] == first:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    status.close()


def test_progress_is_counted_by_all_threads_and_written_with_the_beat(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.status.HEARTBEAT_S", 0.05)
    path = tmp_path / "x.json"
    status = Status(path, "x")
    assert read_status(path)["progress"] == 0
    threads = [threading.Thread(target=lambda: [status.advance() for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status.advance(7)
    deadline = time.monotonic() + 5
    while read_status(path)["progress"] != 4007:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    seen = read_status(path)["progressed"]
    assert seen > status.fields["started"]
    time.sleep(0.15)
    assert read_status(path)["progressed"] == seen
    status.close()


def test_closing_is_final(tmp_path, monkeypatch):
    """A beat that was under way must not bring the file back."""
    monkeypatch.setattr("rl.status.HEARTBEAT_S", 0.001)
    for i in range(30):
        path = tmp_path / f"{i}.json"
        status = Status(path, "x")
        time.sleep(0.003)
        status.close()
    time.sleep(0.05)
    assert os.listdir(tmp_path) == []


def test_half_a_file_is_no_status(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"doing"')
    assert read_status(path) is None
    write_status(path, {"doing": "x"})
    assert read_status(path) == {"doing": "x"} and os.listdir(tmp_path) == ["x.json"]


def test_a_role_has_one_owner(tmp_path):
    path = tmp_path / "status" / "trainer.lock"
    code = f"from rl.status import *; fd = hold_role(Path({str(path)!r}), 'trainer'); print('held', flush=True); input()"
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(AlreadyRunningError, match=f"trainer of this run is already running \\(pid {owner.pid} on .*\\); stop it first"):
        hold_role(path, "trainer")
    owner.kill()
    owner.wait()
    fd = hold_role(path, "trainer")
    assert path.read_text().startswith(f"pid {os.getpid()} on ")
    with pytest.raises(AlreadyRunningError):
        hold_role(path, "trainer")
    os.close(fd)
    os.close(hold_role(path, "trainer"))
