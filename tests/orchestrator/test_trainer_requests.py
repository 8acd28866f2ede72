"""What the orchestrator takes for the end of the trainer."""

import time
from types import SimpleNamespace

import pytest

from rl.orchestrator import trainer_requests
from rl.orchestrator.trainer_requests import TrainerRequests
from rl.run_dir.paths import RunDir
from rl.run_dir.status import RoleStatus, write_status
from tests.waiting import until


def test_a_trainer_that_is_ahead_of_a_lowered_max_steps_has_ended(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    requests = TrainerRequests(run_dir, SimpleNamespace(final=5), SimpleNamespace(), SimpleNamespace(), 0)
    run_dir.checkpoint(4).mkdir(parents=True)
    assert not requests.trainer_has_ended()  # it died before its last checkpoint, and comes again
    run_dir.checkpoint(10).mkdir()
    assert requests.trainer_has_ended()


@pytest.mark.parametrize("clock", [1e9, 9e9], ids=["behind", "ahead"])
def test_a_trainer_on_a_host_with_another_clock_lives_as_long_as_its_heart_beats(tmp_path, monkeypatch, clock):
    monkeypatch.setattr(trainer_requests, "DEAD_S", 0.2)
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    run_dir.checkpoint(5).mkdir(parents=True)
    requests = TrainerRequests(run_dir, SimpleNamespace(final=5), SimpleNamespace(), SimpleNamespace(), 0)
    for beat in range(8):
        write_status(run_dir.status("trainer"), RoleStatus(heartbeat=clock + beat))
        assert not requests.trainer_has_ended()
        time.sleep(0.05)
    until(requests.trainer_has_ended)
