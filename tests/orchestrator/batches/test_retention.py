"""Which batches and rollouts are kept, and in which form."""

import gzip
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config.orchestrator import OrchestratorConfig, RetentionConfig
from rl.diagnosis.rollouts import read_all, rollout_files
from rl.launch.repair import repair
from rl.orchestrator.batches.batch_files import BatchFiles
from rl.run_dir.files import CorruptFileError
from rl.run_dir.paths import RunDir, numbers
from rl.trainer.sft.rows import DataSource, files_of, json_rows
from rl.wire.batch_file import check_rollouts, remove_rollouts, write_rollouts
from tests.launch.long_run import make_checkpoint


def made(root, checkpoints=(), steps=12):
    run_dir = RunDir(root, root / "weights")
    run_dir.batches.mkdir()
    run_dir.rollouts_dir.mkdir()
    for step in range(1, steps + 1):
        run_dir.batch(step).touch()
        run_dir.rollouts(step).touch()
        run_dir.rollouts(step).with_suffix(".sha256").touch()
    for step in checkpoints:
        run_dir.checkpoint(step).mkdir(parents=True)
    return run_dir


def kept(tmp_path, checkpoints=(), **settings):
    run_dir = made(tmp_path, checkpoints)
    BatchFiles(run_dir, OrchestratorConfig(**settings), {}).put_away(12)
    assert numbers(run_dir.rollouts_dir, ".sha256") == numbers(run_dir.rollouts_dir, ".jsonl")
    return numbers(run_dir.batches, ".batch"), numbers(run_dir.rollouts_dir, ".jsonl")


ALL = list(range(1, 13))


@pytest.mark.parametrize(
    ("checkpoints", "retention", "expected"),
    [
        ([12], {}, (ALL, ALL)),
        # what a resume needs, in any case
        ([8, 10], {"keep_last": 2, "keep_every": 5}, ([5, *range(8, 13)], [5, 10, 11, 12])),
        ([], {"keep_last": 1}, (ALL, [12])),
    ],
)
def test_what_is_kept(tmp_path, checkpoints, retention, expected):
    settings = RetentionConfig(**retention)
    assert kept(tmp_path, checkpoints, batches=settings, rollouts=settings) == expected


@settings(max_examples=60)
@given(
    st.sets(st.integers(1, 20), max_size=4),
    st.integers(1, 4),
    st.none() | st.integers(1, 6),
    st.integers(1, 3),
)
def test_nothing_that_a_resume_needs_is_deleted(checkpoints, keep_last, keep_every, interval):
    """Over all commits of a run, with checkpoints that come and go: every batch after each
    checkpoint is kept, and its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = made(Path(folder), steps=0)
        run_dir.checkpoints.mkdir()
        config = OrchestratorConfig(
            batches=RetentionConfig(keep_last=keep_last, keep_every=keep_every)
        )
        old = BatchFiles(run_dir, config, {})
        for step in range(1, 21):
            run_dir.batch(step).touch()
            if step - interval in checkpoints:  # written while training goes on
                run_dir.checkpoint(step - interval).mkdir()
                for gone in numbers(run_dir.checkpoints)[:-2]:
                    run_dir.checkpoint(gone).rmdir()
            old.put_away(step)
            oldest = min(numbers(run_dir.checkpoints), default=0)
            assert set(range(max(1, oldest), step + 1)) <= set(numbers(run_dir.batches, ".batch"))
            if step % 7 == 0:
                old = BatchFiles(run_dir, config, {})  # a restart


def test_a_commit_lists_nothing_that_grows(tmp_path, monkeypatch):
    run_dir = made(tmp_path, checkpoints=[8])
    old = BatchFiles(
        run_dir,
        OrchestratorConfig(
            batches=RetentionConfig(keep_last=2), rollouts=RetentionConfig(keep_last=2)
        ),
        {},
    )
    old.put_away(12)
    listed, list_directory = [], os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda path: listed.append(Path(path).name) or list_directory(path)
    )
    for step in range(13, 17):
        old.put_away(step)
    run_dir.checkpoint(15).mkdir()
    run_dir.checkpoint(8).rmdir()
    old.put_away(17)
    assert {*listed} == {"checkpoints"} and numbers(run_dir.batches, ".batch") == []


LINE = (
    b'{"group_id": %d, "reward": 1.0, "messages": [{"role": "user", "content": "x"}], "trained": '
    b'true, "outcome": "finished"}\n'
)


@pytest.fixture
def compressed(tmp_path, monkeypatch):
    """Five steps, of which the oldest three are compressed, although the process died after the
    commit of step 4."""
    monkeypatch.setattr("rl.orchestrator.batches.batch_files.PLAIN_STEPS", 2)
    run_dir = RunDir(tmp_path / "r", tmp_path / "r" / "weights")
    for step in range(1, 6):
        write_rollouts(run_dir.rollouts(step), LINE % step * 20)
        if step != 4:
            BatchFiles(run_dir, OrchestratorConfig(), {}).put_away(step)
    return run_dir


def test_old_rollouts_are_compressed_and_read_as_before(compressed):
    files, damaged = compressed.rollout_files(), []
    assert [path.name for path in files.values()] == [
        f"{n:06d}.jsonl{'.gz' * (n < 4)}" for n in range(1, 6)
    ]
    assert (
        files[1].stat().st_size < len(LINE) * 4
        and gzip.decompress(files[1].read_bytes()) == LINE % 1 * 20
    )
    assert [row["group_id"] for row in read_all(rollout_files(compressed), damaged)] == [
        n for n in (5, 4, 3, 2, 1) for _ in range(20)
    ]
    rows = list(json_rows(files_of(DataSource(str(compressed.root), "train", "sft.dataset"))))
    assert [row["group_id"] for _, row in rows] == [n for n in (1, 2, 3, 4, 5) for _ in range(20)]
    listed = [compressed.rollouts(1), compressed.rollouts(4)]  # before the first one was compressed
    assert (
        len(list(read_all(listed, damaged))) == 40
        and len(list(json_rows(listed))) == 40
        and damaged == []
    )


def test_damage_of_a_compressed_file_is_found(compressed):
    data = bytearray((path := compressed.rollout_files()[2]).read_bytes())
    for i in (1, 30, len(data) - 2):
        flipped = bytearray(data)
        flipped[i] ^= 16
        path.write_bytes(flipped)
        with pytest.raises(CorruptFileError, match=r"000002\.jsonl\.gz: damaged"):
            check_rollouts(path)
    path.write_bytes(data[:40])
    with pytest.raises(CorruptFileError, match=r"000002\.jsonl\.gz: damaged"):
        check_rollouts(path)
    (compressed.rollouts_dir / "000002.sha256").unlink()
    with pytest.raises(CorruptFileError, match=r"000002\.jsonl\.gz: damaged"):
        check_rollouts(path)
    assert repair(compressed) != [] and not path.exists()  # no checkpoint: it may still be needed


def test_compressed_rollouts_go_with_their_steps(compressed):
    make_checkpoint(compressed, 1)
    away = compressed.discard_after(2)
    assert sorted(path.name for path in (away / "rollouts").glob("*.gz")) == [
        "000003.jsonl.gz"
    ] and list(compressed.rollout_files()) == [
        1,
        2,
    ]
    remove_rollouts(compressed, after=1)
    assert sorted(path.name for path in compressed.rollouts_dir.iterdir()) == [
        "000001.jsonl.gz",
        "000001.sha256",
    ]


def test_a_file_that_is_not_what_was_written_is_not_compressed(run_dir, monkeypatch, caplog):
    monkeypatch.setattr("rl.orchestrator.batches.batch_files.PLAIN_STEPS", 0)
    write_rollouts(run_dir.rollouts(1), LINE % 1)
    run_dir.rollouts(1).write_bytes(LINE % 2)
    BatchFiles(run_dir, OrchestratorConfig(), {}).put_away(1)
    assert (
        "the rollouts of step 1 are not compressed: " in caplog.text
        and run_dir.rollouts(1).exists()
    )
