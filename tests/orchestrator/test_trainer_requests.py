"""What the orchestrator takes for the end of the trainer."""

from types import SimpleNamespace

from rl.orchestrator.trainer_requests import TrainerRequests
from rl.run_dir.paths import RunDir


def test_a_trainer_that_is_ahead_of_a_lowered_max_steps_has_ended(tmp_path):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    requests = TrainerRequests(run_dir, SimpleNamespace(final=5), SimpleNamespace(), SimpleNamespace(), 0)
    run_dir.checkpoint(4).mkdir(parents=True)
    assert not requests.trainer_has_ended()  # it died before its last checkpoint, and comes again
    run_dir.checkpoint(10).mkdir()
    assert requests.trainer_has_ended()
