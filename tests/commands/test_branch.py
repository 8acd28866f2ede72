"""`rl branch`: what it links, keeps, records and refuses; tests/trainer/test_replay.py trains
one."""

import json
import os
import shutil

import pytest

import rl.commands.branch
from rl.commands.doctor.main import main as doctor
from rl.commands.replay import plan
from rl.config.command_line import build, from_toml, parse_args, to_toml
from rl.launch.children import Children
from rl.launch.prepare import prepare
from rl.main import subcommand
from rl.orchestrator.batches.batch_files import BatchFiles, OrchestratorState, decode_state
from rl.orchestrator.recorded.run import check_same
from rl.orchestrator.tasks.task_source import TaskRef, TaskState
from rl.run_dir.checksums import MANIFEST, checksum
from rl.run_dir.files import write_file
from rl.run_dir.paths import Change, first_step, numbered, read_origin
from rl.system.errors import RunError
from rl.wire.batch_file import decode_batch, write_batch
from rl.wire.messages import TrainBatch
from tests.commands.driver import words
from tests.flags import flags, made

STATE = OrchestratorState(
    tasks=TaskState(next_group=9, issued={"e": 8}, in_flight=[TaskRef(8, "e", 3)]),
    settled=[1],
    pending=[TaskRef(7, "e", 2)],
)


def weights(step):
    """A safetensors file without tensors."""
    header = b'{"__metadata__": {"step": "%d"}}' % step
    return len(header).to_bytes(8, "little") + header


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of four steps with the checkpoints 2 and 4, of whose versions the last two are kept."""
    monkeypatch.chdir(tmp_path)
    given = (
        "--orchestrator.environment.id e --model.name owner/m --name x --max_steps 4 "
        "--learning_rate 1e-5 --model.dtype bfloat16"
    )
    config = made(given).with_absolute_paths()
    run_dir = config.run_dir
    write_file(run_dir.config, to_toml(config).encode())
    for step in range(1, 5):
        write_batch(run_dir.batch(step), TrainBatch(step=step, samples=[]), STATE)
        write_file(run_dir.digests(step), b'{"hash": "blake3", "tensors": {}}')
    for step in (2, 4):
        write_file(run_dir.weights(step) / "model.safetensors", weights(step))
        write_file(run_dir.checkpoint(step) / "__0_0.distcp", b"state %d" % step)
        files = {"__0_0.distcp": checksum(run_dir.checkpoint(step) / "__0_0.distcp")}
        manifest = {"step": step, "world_size": 1, "model": "m", "files": files}
        write_file(run_dir.checkpoint(step) / MANIFEST, json.dumps(manifest).encode())
    return run_dir


@pytest.fixture
def launched(monkeypatch):
    """What would be started: configuration and resume of each."""
    found = []
    monkeypatch.setattr(
        rl.commands.branch,
        "start",
        lambda config, line, children, again: found.append((config, line.resume, again)) or 0,
    )
    return found


def branch(*args, code=0):
    assert subcommand("branch", flags(*args), Children()) == code


def fault(capsys, *args, code=1):
    try:
        branch(*args, code=code)
    except SystemExit as end:
        assert end.code == 2
    return capsys.readouterr().err


def test_a_branch_has_the_state_of_its_step_as_links_and_is_resumed(run, launched, capsys):
    branch(f"{run.root}@2", "--name y --trainer.optim.lr 3e-6")
    ((config, resume, again),) = launched
    new = config.run_dir
    assert new.root == run.root.with_name("y")
    assert resume == -1
    assert again == f"rl @ {new.config} --resume"
    for kind in ("checkpoint", "weights"):
        for file in getattr(run, kind)(2).iterdir():
            assert (getattr(new, kind)(2) / file.name).samefile(file)
    assert new.batch(2).samefile(run.batch(2)) and new.digests(2).samefile(run.digests(2))
    assert (
        list(numbered(new.batches, ".batch"))
        == list(numbered(new.checkpoints))
        == list(numbered(new.weights_dir))
        == [2]
    )
    assert from_toml(new.config) == config
    assert config.trainer.optim.lr == 3e-6
    assert config.max_steps == 4
    origin = read_origin(new)
    assert (origin.run, origin.step) == (str(run.root), 2)
    assert origin.changes == [Change("trainer.optim.lr", "1e-05", "3e-06")]
    said = f"{new.root}: branch of {run.root} at step 2\n  trainer.optim.lr: 1e-05 -> 3e-06\n"
    assert said in capsys.readouterr().out
    prepared = prepare(config, resume=-1, clean=False)  # as the launcher does
    prepared.lease.close()
    assert prepared.notes == [f"resuming {new.root}: checkpoint 2, newest batch 2"]
    with pytest.raises(
        RunError,
        match=rf"--resume 1: {new.root} begins at step 2, as a branch of {run.root} at step 2; "
        r"give at least",
    ):
        prepare(config, resume=1, clean=False)
    doctor([str(new.root)], Children())
    assert (
        f"  branch of {run.root} at step 2; trainer.optim.lr: 1e-05 -> 3e-06\n"
        in capsys.readouterr().out
    )


def test_a_branch_ends_what_a_resume_refuses_and_says(run, launched):
    config = build(parse_args(words(f"@ {run.config} --trainer.optim.lr 3e-6")))
    (run.root / "status").mkdir(exist_ok=True)
    with pytest.raises(
        RunError,
        match=f"1e-05 -> 3e-06\n  continue with them in a new run: rl branch {run.root} --name NEW "
        "and the same",
    ):
        prepare(config, resume=-1, clean=False)


def test_a_branch_on_a_cluster_is_not_divided_as_this_machine_would_be(run, launched):
    """Regression: it ran on this machine alone."""
    branch(f"{run.root}@2", "--name y --cluster.nodes 3 --cluster.engine slurm")
    ((config, resume, _),) = launched
    assert (config.cluster.nodes, config.trainer.ranks, config.trainer.gpus, resume) == (
        3,
        None,
        None,
        -1,
    )


def test_a_branch_of_a_run_that_was_moved_lies_beside_it(run, launched, tmp_path, capsys):
    moved = tmp_path / "elsewhere" / "m"
    moved.parent.mkdir()
    run.root.rename(moved)
    assert "m is the run itself; name the new run" in fault(capsys, f"{moved}@2", code=2)
    branch(f"{moved}@2", "--name y")
    (tmp_path / "link").symlink_to(moved.parent)
    assert "m is the run itself" in fault(
        capsys, f"{moved}@2", "--output_dir", tmp_path / "link", "--clean", code=2
    )
    assert launched[0][0].run_dir.root == moved.parent / "y"
    assert read_origin(launched[0][0].run_dir).run == str(moved)
    doctor([str(moved.parent / "y")], Children())
    assert "  step 2 of 4, batch 2, version 2, checkpoint 2\n" in capsys.readouterr().out


def test_a_branch_of_a_recorded_run_reads_its_file_anew(run, launched, tmp_path):
    """Regression: the checksums of the parent's file were taken along, and any other file was
    refused."""
    (tmp_path / "a.jsonl").write_text("first\n")
    (tmp_path / "b.jsonl").write_text("second\n")
    config = build(
        parse_args(["@", str(run.config), "--recorded.rollouts", str(tmp_path / "a.jsonl")]),
        ("orchestrator.environment",),
    )
    write_file(run.config, to_toml(config).encode())
    write_file(run.data / "recorded.json", json.dumps(check_same(config)).encode())
    branch(f"{run.root}@2", "--name y --recorded.rollouts", tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").write_text("mended\n")
    with pytest.raises(RunError, match=r"a.jsonl: has changed, or comes in another order"):
        check_same(config)
    branch(f"{run.root}@2", "--name z")
    other, same = (check_same(config) for config, *_ in launched)
    assert [*other] == [str(tmp_path / "b.jsonl")] and [*same] == [str(tmp_path / "a.jsonl")]


def test_tasks_go_on_unless_what_is_played_changes(run, launched):
    branch(run.root, "--name y --max_steps 9 --orchestrator.environment.timeout_s 5")
    branch(run.root, "--name z --max_steps 9 --orchestrator.environment.args.n 5")
    same, other = (config.run_dir for config, *_ in launched)
    assert same.batch(4).samefile(run.batch(4))
    content = decode_batch(other.batch(4).read_bytes(), "")
    state = decode_state(content.state)
    assert content.batch.step == 4
    assert state.tasks == TaskState(next_group=9, issued={}, in_flight=[])
    assert (state.settled, state.pending) == ([1], [])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "rl branch: which run? Give its directory first"),
        (("x@2",), "rl branch: x is the run itself; name the new run: --name NEW"),
        (
            ("x@2", "--name y --resume"),
            "a branch is a new run",
        ),
        (
            ("x@2", "--name y --bogus 1"),
            "in the configuration\n  bogus = 1 (--bogus)\n",
        ),
        (
            ("x@3", "--name", "y"),
            "x@3: there is no checkpoint of step 3, only of 2, 4. Which ones a run keeps is "
            "set by trainer.checkpoint",
        ),
        (("x@0", "--name", "y"), "x@0: is the base model; start a new run there instead: rl @ "),
        (("x@best", "--name", "y"), "x@best: the run has no finished evaluation"),
        (
            ("x", "--name", "y"),
            "a branch at step 4 cannot have these settings:\n  max_steps = 4\n    is already "
            "reached at step 4; raise it",
        ),
        (
            ("x@2", "--name y --model.name z/m"),
            "  model.name: 'owner/m' -> 'z/m'\n    the checkpoint holds the weights of that",
        ),
        (
            ("x@2", "--name y --model.dtype float32"),
            "    its version was published in that dtype and would be another policy",
        ),
        (
            ("x@2", "--name y --trainer.lora"),
            "trainer.lora.rank: None -> 16\n    the checkpoint holds the whole model",
        ),
        (
            ("x@2", "--name y --sft.dataset d --trainer.loss.type cross_entropy"),
            "learning -> supervised fine-tuning",
        ),
        (("z@2", "--name", "y"), "contains the runs x"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    run, launched, capsys, monkeypatch, args, said
):
    monkeypatch.chdir(run.root.parent)
    assert said in fault(capsys, *([f"./{args[0]}"] if args else []), *args[1:])
    assert not launched and [path.name for path in run.root.parent.iterdir()] == ["x"]


def test_damage_is_found_before_anything_is_written(run, launched, capsys):
    (run.checkpoint(2) / "__0_0.distcp").write_bytes(b"other")
    assert "000002/__0_0.distcp: damaged" in fault(capsys, f"{run.root}@2", "--name y")
    assert [path.name for path in run.root.parent.iterdir()] == ["x"]


def test_another_loss_drops_the_keys_of_the_one_before(run, launched):
    text = run.config.read_text()
    run.config.write_text(text.replace("kl_coefficient = 0.0", "kl_coefficient = 0.5"))
    branch(
        f"{run.root}@2",
        "--name y --trainer.loss.type clip --orchestrator.credit.type grpo",
    )
    assert run.config.read_text() != text and launched[0][0].trainer.loss.kl_coefficient == 0.5
    loss = launched[0][0].trainer.loss
    assert (loss.type, loss.clip_high) == ("clip", type(loss)().clip_high)
    changes = {
        change.key: (change.old, change.new)
        for change in read_origin(launched[0][0].run_dir).changes
    }
    assert changes["trainer.loss.type"] == ("'policy_gradient'", "'clip'")
    assert changes["trainer.loss.importance"][1] == "None"
    assert changes["trainer.loss.token_mask"][1] == "[0.0, inf]"
    assert "trainer.loss.kl_coefficient" not in changes


def test_a_dry_run_writes_nothing(run, launched, capsys, monkeypatch):
    def resolve(*_, **__):
        raise RunError("no such folder")

    monkeypatch.setattr("rl.cluster.submit.resolve_model", resolve)
    with pytest.raises(SystemExit) as end:
        branch(f"{run.root}@2", "--name y --dry-run")
    assert end.value.code == 0
    said = capsys.readouterr()
    assert said.err.endswith("rl: no such folder\n")
    (run.root.parent / "dry.toml").write_text(said.out)
    assert from_toml(run.root.parent / "dry.toml").run_dir.root == run.root.with_name("y")
    assert not launched
    assert "there is no checkpoint of step 3" in fault(
        capsys, f"{run.root}@3", "--name y --dry-run"
    )
    assert not run.root.with_name("y").exists()


def test_a_branch_that_has_trained_nothing_is_replaced_and_any_other_only_if_told_so(
    run, launched, capsys
):
    for lr in ("3e-6", "4e-6"):
        branch(f"{run.root}@2", "--name y --trainer.optim.lr", lr)
    new = launched[-1][0].run_dir
    assert from_toml(new.config).trainer.optim.lr == 4e-6
    with pytest.raises(RunError, match=f"{new.root} exists: continue that run with --resume"):
        prepare(launched[-1][0], resume=None, clean=False)
    write_batch(new.batch(3), TrainBatch(step=3, samples=[]), STATE)
    assert f"{new.root} exists: continue that run with --resume" in fault(
        capsys, f"{run.root}@2", "--name y"
    )
    branch(f"{run.root}@4", "--name y --max_steps 9 --clean")
    assert list(numbered(new.batches, ".batch")) == [4]


def test_versions_elsewhere_are_copied_there(run, launched, capsys, tmp_path, monkeypatch):
    link = os.link
    monkeypatch.setattr(
        os,
        "link",
        lambda *a: (
            (_ for _ in ()).throw(OSError(18, "cross-device"))
            if "memory" in str(a[1])
            else link(*a)
        ),
    )
    branch(f"{run.root}@2", "--name y --trainer.weights.dir", tmp_path / "memory")
    new = launched[0][0].run_dir
    assert new.weights(2) == tmp_path / "memory" / "y" / "000002"
    assert not (new.root / "weights").exists()
    assert (new.weights(2) / "model.safetensors").read_bytes() == weights(2)
    shutil.rmtree(new.root)
    expected = "memory/y holds versions 2 of another run; choose another --name"
    assert expected in fault(
        capsys, f"{run.root}@2", "--name y --trainer.weights.dir", tmp_path / "memory"
    )


def test_what_a_branch_begins_with_is_where_replay_begins_and_old_batches_go(run, launched):
    branch(f"{run.root}@2", "--name y")
    config = launched[0][0]
    new = config.run_dir
    with pytest.raises(RunError, match="the branch has no version of its own yet"):
        plan(new, config, 0, None)
    for step in (3, 4):
        write_batch(new.batch(step), TrainBatch(step=step, samples=[]), STATE)
        write_file(new.digests(step), b'{"hash": "blake3", "tensors": {}}')
    assert plan(new, config, 0, None)[0].start == 2
    assert first_step(new) == 2
    assert first_step(run) == 0
    with pytest.raises(RunError, match=f"--from 1: {new.root} is a branch and begins at step 2"):
        plan(new, config, 1, None)
    shutil.copytree(run.checkpoint(4), new.checkpoint(4))
    config.orchestrator.batches.keep_last = 1
    BatchFiles(new, config.orchestrator, {}).put_away(4)
    assert list(numbered(new.batches, ".batch")) == [4]
    shutil.rmtree(new.checkpoint(4))
    (new.checkpoint(2) / MANIFEST).unlink()
    from rl.launch.repair import repair

    with pytest.raises(
        RunError, match=f"begins with it: make it again by `rl branch {run.root}@2 --name"
    ):
        repair(new)
    new.origin.write_bytes(b"{")
    with pytest.raises(RunError, match=r"origin\.json: damaged"):
        read_origin(new)


def test_a_branch_of_fine_tuning_keeps_its_examples_and_their_order(run, launched, capsys):
    given = (
        "--model.name owner/m --name x --max_steps 4 --sft.dataset d.jsonl --model.dtype bfloat16"
    )
    config = made(given).with_absolute_paths()
    write_file(run.config, to_toml(config).encode())
    for change in (
        ("--sft.batch_size", "128"),
        ("--seed", "7"),
        ("--sft.dataset", "e.jsonl"),
        ("--model.max_model_len", "64"),
    ):
        said = fault(capsys, f"{run.root}@2", "--name y", *change)
        assert f"  {change[0][2:]}: " in said
        assert (
            "decides the examples, their order or their batches, of which some are trained" in said
        )
    run.data.mkdir()
    branch(f"{run.root}@2", "--name y --sft.validation_interval 7 --learning_rate 1e-4")
    branch(f"{run.root}@2", "--name z --sft.validation other.jsonl")
    same, other = (found[0] for found in launched)
    assert (same.sft.validation_interval, same.run_dir.data.is_dir()) == (7, True)
    assert (other.sft.validation, other.run_dir.data.is_dir()) == (
        str(run.root.parent.parent / "other.jsonl"),
        False,
    )
