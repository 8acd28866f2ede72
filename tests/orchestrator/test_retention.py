"""Batches and rollouts that are kept."""

from rl.config.orchestrator import OrchestratorConfig, RetentionConfig
from rl.orchestrator.batches import delete_old_batches
from rl.run_dir.paths import RunDir, numbered


def kept(tmp_path, checkpoints=(), **settings):
    run_dir = RunDir(tmp_path, tmp_path / "weights")
    run_dir.batches.mkdir()
    run_dir.rollouts(0).parent.mkdir()
    for step in range(1, 13):
        run_dir.batch(step).touch()
        run_dir.rollouts(step).touch()
        run_dir.rollouts(step).with_suffix(".sha256").touch()
    for step in checkpoints:
        run_dir.checkpoint(step).mkdir(parents=True)
    delete_old_batches(run_dir, OrchestratorConfig(**settings))
    assert list(numbered(run_dir.rollouts(0).parent, ".sha256")) == list(numbered(run_dir.rollouts(0).parent, ".jsonl"))
    return list(numbered(run_dir.batches, ".batch")), list(numbered(run_dir.rollouts(0).parent, ".jsonl"))


ALL = list(range(1, 13))


def test_all_is_kept_by_default(tmp_path):
    assert kept(tmp_path, checkpoints=[12]) == (ALL, ALL)


def test_what_a_resume_needs_is_kept_in_any_case(tmp_path):
    settings = RetentionConfig(keep_last=2, keep_every=5)
    assert kept(tmp_path, checkpoints=[8, 10], batches=settings, rollouts=settings) == ([5, 8, 9, 10, 11, 12], [5, 10, 11, 12])


def test_without_a_checkpoint_every_batch_is_needed(tmp_path):
    settings = RetentionConfig(keep_last=1)
    assert kept(tmp_path, batches=settings, rollouts=settings) == (ALL, [12])
