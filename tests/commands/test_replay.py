"""`rl replay` as a user starts it."""

import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rl.commands.replay import Verdict, division_of, main, plan
from rl.config.command_line import from_toml, to_toml
from rl.config.trainer import ReplayConfig
from rl.launch.children import Children
from rl.models.tiny import make_tiny_model
from rl.run_dir.checksums import checksum
from rl.run_dir.files import write_file
from rl.run_dir.paths import RunDir
from rl.system.errors import RunError
from rl.system.machine import Machine
from rl.wire.batch_file import write_batch
from tests import jsonl
from tests.cluster.configs import run_config
from tests.commands.driver import words
from tests.families import CONFIGS
from tests.flags import made
from tests.trainer.samples import make_batch
from tests.trainer.stub_orchestrator import StubOrchestrator

STEPS = 3


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of three steps on two ranks that divide the experts between them; only the last two
    versions are kept."""
    root = tmp_path_factory.mktemp("run")
    model = make_tiny_model(root / "model", CONFIGS["qwen3_moe"])
    # the stub's log-probabilities are no model's
    config = made(
        f"--name run --output_dir {root} --max_steps {STEPS} --model.name {model} --model.dtype float32",
        "--orchestrator.environment.id test --trainer.optim.lr 1e-3 --trainer.strict_parity false",
        "--trainer.gpus 0 --trainer.ranks 2 --trainer.expert_parallel 2",
        "--trainer.checkpoint.interval 2 --trainer.weights.keep_last 2",
    )
    write_file(config.run_dir.config, to_toml(config).encode())
    batches = [make_batch(step) for step in range(1, STEPS + 1)]
    for batch in batches:
        write_batch(config.run_dir.batch(batch.step), batch, {})
    ranks = words("-m torch.distributed.run --standalone --nproc-per-node=2 -m rl.trainer.main")
    with StubOrchestrator(config.run_dir, batches):
        command = [sys.executable, *ranks, f"@{config.run_dir.config}"]
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return config.run_dir


def rl_replay(*args):
    command = [sys.executable, "-m", "rl.main", "replay", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_two_ranks_are_replayed_as_two_ranks(run_dir):
    done = rl_replay(run_dir.root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:-1] == [
        "version 1: equal to its digests",
        "version 2: equal to its digests and weights",
        "checkpoint 2: equal (float32 weights, optimizer, random numbers)",
        "version 3: equal to its digests and weights",
        "checkpoint 3: equal (float32 weights, optimizer, random numbers)",
    ]
    last = (
        r"EQUAL: versions 1-3, retrained from the base model in \d+ s \(.*\), equal those of the "
        r"run, bit for bit; .* checkpoint 2-3"
    )
    assert re.fullmatch(last, done.stdout.splitlines()[-1])


EQUAL = {
    "kept": ["digests"],
    "tensor": None,
    "max_difference": None,
    "fault": None,
    "unlike": "",
    "deterministic": True,
}
DIFFERENT = EQUAL | {
    "kept": ["digests", "weights"],
    "tensor": "model.norm.weight",
    "max_difference": 0.00123,
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {
                "version": 3,
                **DIFFERENT,
                "max_difference": None,
                "unlike": "threads 2 there and 1 here",
            },
            "first in model.norm.weight, (by how much is unknown without weights to "
            "compare); versions 1-2 are equal\n"
            "  it was trained under other conditions, which may be the reason: threads 2 "
            "there and 1 here",
        ),
        (
            {"version": 3, **EQUAL, "fault": "x: cut"},
            "version 3: the retrained version is equal, but a file of the run is damaged: x: cut",
        ),
        (
            {"checkpoint": 2, "tensor": "optimizer.exp_avg.x", "ranks": [0], "fault": None},
            "from its checkpoint, first in optimizer.exp_avg.x",
        ),
        (
            {"checkpoint": 2, "tensor": None, "ranks": [1], "fault": None},
            "the state after step 2 differs from its checkpoint, on ranks [1]",
        ),
        (
            {"checkpoint": 2, "tensor": None, "ranks": [], "fault": "x: damaged"},
            "DIFFERENT: checkpoint 2 is damaged: x: damaged",
        ),
    ],
)
def test_what_differs_is_named(run_dir, tmp_path, found, said):
    verdict = Verdict(
        run_dir,
        RunDir(tmp_path, tmp_path / "weights"),
        ReplayConfig(run=str(run_dir.root), weights=str(run_dir.weights_dir), until=3),
    )
    for version in (1, 2):
        assert verdict.check({"version": version, **EQUAL}) is None
    assert said in verdict.check(found)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "which run? Give only its directory"),
        (
            ["{root}", "--until", "9"],
            "--until 9: the newest version of {root} is 3; give at most that",
        ),
        (
            ["{root}", "--from", "3"],
            "--from 3: leaves no step to train before --until 3; give a smaller one",
        ),
        (
            ["{root}", "--from", "1"],
            "{root}: batches 1-2 are missing (there are 3; orchestrator.batches sets which "
            "are kept): give --from 2",
        ),
        (["{root}x"], "no such run or model folder; "),
        (
            ["{root}/empty"],
            "{root}/empty: the run has no version yet; there is nothing to compare with",
        ),
    ],
)
def test_what_cannot_be_told_is_said(run_dir, tmp_path, capsys, args, said):
    root = tmp_path / "run"
    shutil.copytree(run_dir.root, root)
    for step in (1, 2):
        (root / "batches" / f"{step:06d}.batch").unlink()
    (root / "empty").mkdir()
    shutil.copy(root / "config.toml", root / "empty")
    with pytest.raises(SystemExit) as end:
        main([arg.replace("{root}", str(root)) for arg in args], Children())
    assert end.value.code == 2 and said.replace("{root}", str(root)) in capsys.readouterr().err


def test_examples_that_are_damaged_and_checkpoints_of_a_newer_rl_cannot_be_told_of(tmp_path):
    """Neither is a run that trained something else."""
    run_dir, tuned = RunDir(tmp_path, tmp_path / "weights"), SimpleNamespace(sft=True)
    for path in (
        run_dir.digests(6),
        run_dir.data / "train" / "ends.npy",
        run_dir.checkpoint(4) / "__0_0.distcp",
    ):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    files = {"train/ends.npy": checksum(run_dir.data / "train" / "ends.npy")}
    (run_dir.data / "manifest.json").write_text(json.dumps({"train": {}, "files": files}))
    assert plan(run_dir, tuned, 0, None)[0].until == 6
    (run_dir.data / "train" / "ends.npy").write_text("[]")
    with pytest.raises(
        RunError, match=r"train/ends\.npy: damaged; delete .*data to have it made again"
    ):
        plan(run_dir, tuned, 0, None)
    manifest = {
        "step": 4,
        "world_size": 1,
        "model": "m",
        "files": {"__0_0.distcp": {"size": 2, "blake9": "00"}},
    }
    (run_dir.checkpoint(4) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"its hash is 'blake9'.*a newer rl wrote it"):
        plan(run_dir, tuned, 4, None)


def test_a_run_that_has_deleted_old_batches_is_replayed_from_the_oldest_checkpoint_that_can_be(
    run_dir, tmp_path
):
    from rl.commands.options import open_run

    root = tmp_path / "run"
    shutil.copytree(run_dir.root, root)
    (root / "batches" / "000001.batch").unlink()
    kept, config = open_run(root)
    replay, notes = plan(kept, config, 0, None)
    assert (replay.start, replay.until) == (2, 3)
    why = "batches 1 were deleted (orchestrator.batches)"
    assert notes == [f"{why}: starting at checkpoint 2, the oldest with all later batches"]


def test_notes(run_dir, tmp_path):
    """A damaged checkpoint on the way, and settings that were changed in the middle."""
    from rl.commands.replay import changes_within
    from rl.config.command_line import from_toml

    shutil.copytree(run_dir.root, tmp_path / "run")
    copy = RunDir(tmp_path / "run", tmp_path / "run" / "weights")
    (copy.checkpoint(2) / "__0_0.distcp").write_bytes(b"")
    config = from_toml(copy.config)
    replay, notes = plan(copy, config, 2, None)
    assert (replay.start, replay.until) == (0, 3)
    assert "checkpoint 2 is damaged and is skipped" in notes[0]
    assert notes[1] == "there is no intact checkpoint 2: starting at the base model"
    line = {"time": 0, "step": 2, "key": "trainer.micro_batch_tokens", "old": 64, "new": 128}
    (copy.root / "changes.jsonl").write_text(jsonl.text(line, line | {"key": "max_steps"}))
    assert changes_within(copy, replay, config) == [
        "trainer.micro_batch_tokens was changed from 64 to 128 after step 2: steps up to it "
        "may differ; --from 2 retrains the later ones"
    ]
    with (copy.root / "changes.jsonl").open("a") as file:
        file.write(json.dumps(line)[:40])  # a kill while it was written
    assert len(changes_within(copy, replay, config)) == 1


def test_a_run_of_a_cluster_is_replayed_on_this_machine_alone(tmp_path, monkeypatch):
    """Regression: its own numbers of GPUs, in place of the counts that divided the machines, left
    fewer of these for training than min_trainer_nodes."""
    gpus = {"trainer": {"gpus": 2}, "inference": {"gpus": 2}}
    config = run_config(tmp_path, {"nodes": 4, "min_trainer_nodes": 2}, **gpus)
    made_by = {"device": "NVIDIA H200", "ranks": 4, "threads": 1}
    write_file(config.run_dir.digests(1), json.dumps({"made_by": made_by}).encode())
    box = Machine(gpus=["0", "1", "2", "3"], cores=[0])
    monkeypatch.setattr("rl.commands.replay.machine", lambda: box)
    replay = ReplayConfig(run=str(tmp_path), weights="w", until=1)
    assert division_of(config, config.run_dir, replay).ranks == 4
    write_file(tmp_path / "again.toml", to_toml(config).encode())
    assert from_toml(tmp_path / "again.toml").trainer.gpus == 4
