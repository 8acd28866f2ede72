"""Names of a run, what counts as complete, and which entries stay."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.run_dir.files import clean_leftovers
from rl.run_dir.paths import NEVER, Retention, RunDir, is_run, numbered, numbers


def make(tmp_path):
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
    assert away
    assert (away / "weights" / "000005" / "model.safetensors").read_text() == "w5"
    assert (away / "tokens" / "000005.safetensors").exists()
    assert (
        list(numbered(run_dir.weights_dir))
        == list(numbered(run_dir.tokens_dir, ".safetensors"))
        == [4]
    )


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "needed", "left"),
    [
        (None, None, {}, range(1, 11)),
        (0, 5, {"needed": {3}}, [3, 5, 10]),
        (2, 4, {}, [4, 8, 9, 10]),
        (3, 4, {"needed": {2, 3}, "needed_from": 10}, [2, 3, 4, 8, 9, 10]),
        (1, None, {"needed_from": 6}, [6, 7, 8, 9, 10]),
    ],
)
def test_files_and_directories_are_deleted(tmp_path, keep_last, keep_every, needed, left):
    for number in range(1, 11):
        (tmp_path / f"{number:06d}").mkdir()
        (tmp_path / f"{number:06d}.batch").touch()
    for suffix in ("", ".batch"):
        Retention(tmp_path, (suffix,), keep_last, keep_every).delete_old(10, **needed)
        assert numbers(tmp_path, suffix) == list(left)


def stays(there, keep_last, keep_every, needed, needed_from):
    """Applies the rule itself to all entries."""
    newest = set(sorted(there)[max(0, len(there) - keep_last) :])
    return {
        n
        for n in there
        if n in newest or n in needed or n >= needed_from or (keep_every and n % keep_every == 0)
    }


STEPS = st.lists(
    st.tuples(
        st.integers(1, 12), st.sets(st.integers(1, 12), max_size=2), st.none() | st.integers(0, 14)
    ),
    max_size=12,
)


@given(st.sets(st.integers(1, 8)), st.integers(0, 4), st.none() | st.integers(1, 4), STEPS)
def test_what_is_kept_in_mind_is_what_the_rule_says(before, keep_last, keep_every, steps):
    """Whatever is added, even an older number again, the result equals that of checking all
    entries each time."""
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), set(before)
        for number in before:
            (folder / f"{number:06d}.batch").touch()
        retention = Retention(folder, (".batch",), keep_last, keep_every)
        for added, needed, needed_from in steps:
            limit = NEVER if needed_from is None else needed_from
            (folder / f"{added:06d}.batch").touch()
            retention.delete_old(added, needed, limit)
            expected = stays(expected | {added}, keep_last, keep_every, needed, limit)
            assert {*numbers(folder, ".batch")} == expected


def test_a_directory_is_listed_once(tmp_path, monkeypatch):
    listed = []
    list_directory = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or list_directory(path))
    retention = Retention(tmp_path, (".batch",), 2, None)
    for number in range(1, 8):
        (tmp_path / f"{number:06d}.batch").touch()
        retention.delete_old(number, needed_from=3)
    assert listed == [tmp_path] and numbers(tmp_path, ".batch") == [3, 4, 5, 6, 7]
