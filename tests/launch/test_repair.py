"""Bit rot in every kind of file of a run: what is found, what is moved away, and where the run
continues."""

import errno
import json
from pathlib import Path

import pytest

from rl.commands.doctor.main import damaged_files
from rl.launch.repair import repair
from rl.orchestrator.batches.batch_files import PendingLog
from rl.run_dir.checksums import checksum
from rl.run_dir.files import CorruptFileError
from rl.run_dir.metrics import MetricsLog, read_metrics
from rl.run_dir.paths import RunDir, numbered
from rl.system.errors import RunError
from rl.wire.batch_file import TrainBatch, write_batch, write_rollouts
from rl.wire.messages import VersionSpan
from rl.wire.rollouts import Group, Rollout, Turn
from tests.launch.long_run import make_checkpoint, make_version


def finished(group_id, sampled_by):
    turn = Turn.of([1], [2], [-1.0], [VersionSpan(sampled_by, 1)])
    return Group(
        group_id=group_id, env="e", task=0, rollouts=[Rollout(turns=[turn])], advantages=[0.0]
    )


@pytest.fixture
def run_dir(tmp_path):
    """A run with six steps, checkpoints at 2 and 4, and two pending groups."""
    run_dir = RunDir(tmp_path / "r", tmp_path / "r" / "weights")
    for step in range(1, 7):
        write_batch(run_dir.batch(step), TrainBatch(step=step, samples=[]), None)
        lines = [{"group_id": 2 * step + i // 2, "rollout_id": i % 2, "env": "e"} for i in range(4)]
        write_rollouts(
            run_dir.rollouts(step),
            b"".join(json.dumps(line).replace(" ", "").encode() + b"\n" for line in lines),
        )
        MetricsLog(run_dir.metrics, "trainer").write(step, {"loss/mean": 1.0})
        if step > 3:
            make_version(run_dir, step)
    for step in (2, 4):
        make_checkpoint(run_dir, step)
    PendingLog(run_dir.pending).append([finished(14, 4), finished(15, 5)])
    return run_dir


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def left(run_dir):
    kinds = [
        numbered(run_dir.batches, ".batch"),
        numbered(run_dir.checkpoints),
        numbered(run_dir.weights_dir),
    ]
    return [list(kind) for kind in kinds]


def test_a_sound_run_is_left_alone(run_dir):
    flip(run_dir.batch(2))  # before the checkpoint: nothing needs it
    assert repair(run_dir) == [] == repair(run_dir, thorough=False)
    assert left(run_dir) == [[1, 2, 3, 4, 5, 6], [2, 4], [4, 5, 6]]
    assert not run_dir.discarded.exists()


def test_a_needed_batch_takes_the_later_steps_with_it(run_dir):
    flip(run_dir.batch(5))
    (remark,) = repair(run_dir)
    (away,) = run_dir.discarded.iterdir()
    assert remark == (
        f"{run_dir.batch(5)}: damaged record at byte 0 (magic, length or checksum does not "
        "match); everything after step 4 was moved to "
        f"{away}: batches 5 to 6 are sampled and trained again, and the groups in them are dropped"
    )
    assert left(run_dir) == [[1, 2, 3, 4], [2, 4], [4]]
    # where groups that wait can be looked up
    assert (away / "batches" / "pending.log").read_bytes() == run_dir.pending.read_bytes()
    log = PendingLog(run_dir.pending)
    assert log.load(set(), 4) == [
        "1 finished groups are played on: versions after 4, which were rolled back, sampled some of their episodes"
    ]
    assert [group.group_id for group in log.groups] == [14]
    assert sorted(read_metrics(run_dir.metrics)) == [(step, "trainer") for step in range(1, 5)]
    assert (away / "remarks.txt").read_text() == remark + "\n"
    assert (away / "batches" / "000005.batch").exists()
    assert repair(run_dir) == []


def test_a_damaged_checkpoint_costs_nothing_else(run_dir):
    flip(run_dir.checkpoint(4) / "__0_0.distcp")
    assert repair(run_dir, thorough=False) == []  # its reader will report it
    (remark,) = repair(run_dir)
    assert (
        "000004/__0_0.distcp: damaged; the trainer starts from an older checkpoint (moved to "
        in remark
    )
    assert left(run_dir) == [[1, 2, 3, 4, 5, 6], [2], [4, 5, 6]]


def test_a_missing_batch_behind_a_damaged_checkpoint_goes_back_further(run_dir):
    flip(run_dir.checkpoint(4) / "__0_0.distcp")
    run_dir.batch(3).unlink()
    first, second = repair(run_dir)
    assert "checkpoint" in first and "000003.batch: missing; everything after step 2" in second
    assert left(run_dir) == [[1, 2], [2], []]


def test_damaged_weights_are_made_again(run_dir):
    flip(run_dir.weights(6) / "model.safetensors")
    (remark,) = repair(run_dir, thorough=False)
    assert "tensor w is not what was written; the trainer makes it again" in remark
    assert left(run_dir)[2] == [4, 5]


def test_damaged_rollouts_are_named(run_dir):
    """Only those after the checkpoint are read, so that the time of a resume does not grow with
    the run."""
    flip(run_dir.rollouts(1))
    flip(run_dir.rollouts(5))
    (remark,) = repair(run_dir)
    assert (
        "000005.jsonl: damaged, its checksum does not match; only readers of rollouts need it"
        in remark
    )
    assert not run_dir.rollouts(5).exists() and left(run_dir)[0] == [1, 2, 3, 4, 5, 6]
    (fault,) = damaged_files(run_dir)
    assert fault == (
        f"{run_dir.rollouts(1)}: damaged, its checksum does not match; move it and 000001.sha256 "
        "away to continue without it; only readers of rollouts need it"
    )


@pytest.mark.parametrize("kind", ["weights", "checkpoints"])
def test_what_a_newer_rl_wrote_is_left_where_it_is(run_dir, kind):
    if kind == "weights":
        (run_dir.weights(5) / "digests.json").write_text(
            json.dumps({"hash": "blake9", "tensors": {"w": "00"}})
        )
    else:
        path = run_dir.checkpoint(4) / "manifest.json"
        path.write_text(path.read_text().replace("blake3", "blake9"))
    (fault,) = damaged_files(run_dir)
    assert "its hash is 'blake9'" in fault
    assert "a newer rl wrote it" in fault
    assert "--resume" not in fault
    # otherwise the trainer reads it and ends
    for thorough in (False, True) if kind == "weights" else (True,):
        with pytest.raises(RunError, match="a newer rl wrote it") as error:
            repair(run_dir, thorough=thorough)
        assert not isinstance(error.value, CorruptFileError)
    assert left(run_dir) == [[1, 2, 3, 4, 5, 6], [2, 4], [4, 5, 6]]
    assert not run_dir.discarded.exists()


def record(run_dir, number, **changed):
    """Writes a version's record in `digests/`: its own digests with these changes."""
    run_dir.digests(number).parent.mkdir(exist_ok=True)
    run_dir.digests(number).write_text(
        json.dumps(json.loads((run_dir.weights(number) / "digests.json").read_text()) | changed)
    )


def test_records_of_versions_are_judged(run_dir):
    for number in (4, 5, 6):
        record(run_dir, number)
    run_dir.digests(3).write_text(run_dir.digests(4).read_text())  # its version is gone
    assert damaged_files(run_dir) == []
    flip(run_dir.digests(5))
    record(run_dir, 6, tensors={"w": "00"})
    first, second = damaged_files(run_dir)
    assert first.startswith(f"{run_dir.digests(5)}: missing or damaged; a resume rewrites")
    assert second.startswith(
        f"{run_dir.digests(6)}: differs from {run_dir.weights(6) / 'digests.json'} in tensor "
        "w; a resume"
    )
    record(run_dir, 5, made_by={"threads": 1})
    record(run_dir, 6)
    assert damaged_files(run_dir) == []  # only one of the two has it
    own = run_dir.weights(5) / "digests.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"made_by": {"threads": 2}}))
    assert [fault.partition(";")[0] for fault in damaged_files(run_dir)] == [
        f"{run_dir.digests(5)}: differs from {own} in made_by"
    ]


def test_a_version_that_lost_its_digests_is_judged_by_its_record(run_dir):
    """A version that never had either, such as a user's model, is accepted."""
    for number in (4, 5, 6):
        record(run_dir, number)
        (run_dir.weights(number) / "digests.json").unlink()
    run_dir.digests(4).unlink()
    for number in (4, 6):
        flip(run_dir.weights(number) / "model.safetensors")
    (fault,) = damaged_files(run_dir)
    assert fault.startswith(
        f"{run_dir.weights(6) / 'model.safetensors'}: tensor w is not what was written; "
        "`--resume` moves"
    )
    (remark,) = repair(run_dir, thorough=False)
    assert (
        "000006/model.safetensors: tensor w is not what was written; the trainer makes it again"
        in remark
    )
    assert left(run_dir)[2] == [4, 5]


def test_examples_of_supervised_runs_are_judged(run_dir):
    (run_dir.data / "train").mkdir(parents=True)
    (run_dir.data / "train" / "ends.npy").write_bytes(bytes(100))
    manifest = {
        "train": {},
        "files": {"train/ends.npy": checksum(run_dir.data / "train" / "ends.npy")},
    }
    (run_dir.data / "manifest.json").write_text(json.dumps(manifest))
    assert damaged_files(run_dir) == []
    flip(run_dir.data / "train" / "ends.npy")
    (fault,) = damaged_files(run_dir)
    assert fault.startswith(
        f"{run_dir.data / 'train' / 'ends.npy'}: damaged; delete {run_dir.data} to have it "
        "made again"
    )


@pytest.mark.parametrize("has_data", [True, False])
def test_supervised_runs_have_no_batches(run_dir, has_data):
    """A repair does not need their data either: if damaged data is deleted, it is made again and
    the checkpoints stay."""
    for step in range(1, 7):
        run_dir.batch(step).unlink()
    if has_data:
        run_dir.data.mkdir()
    flip(run_dir.checkpoint(4) / "__0_0.distcp")
    assert len(repair(run_dir, logged=False)) == 1 and left(run_dir) == [[], [2], [4, 5, 6]]


def test_what_the_disk_cannot_give_back_is_damaged(run_dir, monkeypatch):
    lost, really = (
        (run_dir.checkpoint(4) / "__0_0.distcp", run_dir.batch(6), run_dir.rollouts(5)),
        Path.open,
    )

    def opened(path, *args, **more):
        if path in lost:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return really(path, *args, **more)

    monkeypatch.setattr(Path, "open", opened)
    remarks = repair(run_dir)
    assert (
        "__0_0.distcp: cannot be read (Input/output error); the trainer starts from an older "
        "checkpoint" in remarks[0]
    )
    assert (
        "000006.batch: cannot be read (Input/output error); everything after step 5 was moved"
        in remarks[1]
    )
    assert left(run_dir) == [[1, 2, 3, 4, 5], [2], [4, 5]] and not run_dir.rollouts(5).exists()
