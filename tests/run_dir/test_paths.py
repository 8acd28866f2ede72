"""Names of a run, and what counts as complete."""

from rl.run_dir.files import clean_leftovers
from rl.run_dir.paths import RunDir, is_run, numbered


def make(tmp_path) -> RunDir:
    return RunDir(tmp_path / "r", tmp_path / "r" / "weights")


def test_only_complete_things_are_numbered(tmp_path):
    for name in ("000002", "000010", ".000011.tmp", ".000012.old", "latest", "13", "0000014"):
        (tmp_path / name).mkdir()
    (tmp_path / "999999").touch()  # a file, which no process of a run writes under a folder's name
    assert list(numbered(tmp_path).items()) == [(2, tmp_path / "000002"), (10, tmp_path / "000010")]
    for name in ("000003.batch", ".000004.batch.77.tmp", "pending.log"):
        (tmp_path / name).touch()
    assert list(numbered(tmp_path, ".batch")) == [3]
    assert numbered(tmp_path / "none") == {}


def test_a_project_with_a_config_and_checkpoints_of_its_own_is_no_run(tmp_path):
    for name in ("checkpoints/epoch-1", "batches", "data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.toml").touch()
    assert not is_run(tmp_path)
    (tmp_path / "checkpoints" / "000004").mkdir()
    assert is_run(tmp_path)


def test_a_million_steps(tmp_path):
    run_dir = make(tmp_path)
    assert run_dir.newest_batch() == 0 and run_dir.newest_weights() is None
    run_dir.batches.mkdir(parents=True)
    for step in (1_000_000, 999_998, 999_999, 1_000_001):
        run_dir.batch(step).touch()
    run_dir.weights(1_000_000).mkdir(parents=True)
    (run_dir.weights_dir / ".1000001.old").mkdir()
    assert list(numbered(run_dir.batches, ".batch").items()) == [
        (n, run_dir.batch(n)) for n in range(999_998, 1_000_002)
    ]
    newest = run_dir.newest_batch(), run_dir.newest_weights()
    assert newest == (1_000_001, (1_000_000, run_dir.weights(1_000_000)))
    assert clean_leftovers(run_dir.weights_dir, ours="") == [run_dir.weights_dir / ".1000001.old"]
    away = run_dir.discard_after(999_999)
    assert run_dir.newest_batch() == 999_999
    assert list(numbered(away / "batches", ".batch")) == [1_000_000, 1_000_001]


def test_weights_that_lie_elsewhere_and_token_logs_go_with_their_steps(tmp_path):
    run_dir = RunDir(tmp_path / "r", tmp_path / "memory" / "r")
    run_dir.tokens_dir.mkdir(parents=True)
    for step in (4, 5):
        run_dir.weights(step).mkdir(parents=True)
        (run_dir.weights(step) / "model.safetensors").write_text(f"w{step}")
        run_dir.tokens(step).touch()
    away = run_dir.discard_after(4)
    assert (
        away
        and (away / "weights" / "000005" / "model.safetensors").read_text() == "w5"
        and (away / "tokens" / "000005.safetensors").exists()
    )
    assert (
        list(numbered(run_dir.weights_dir))
        == list(numbered(run_dir.tokens_dir, ".safetensors"))
        == [4]
    )
