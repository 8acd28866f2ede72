"""The rules of the run directory: new, --clean, --resume, --resume N, and what a resume may
change."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.config.command_line import build, from_toml, parse_args
from rl.config.stored import run_dir_of, stored_config
from rl.launch.prepare import prepare
from rl.run_dir import lease
from rl.run_dir.lease import LockOwner, hold_role
from rl.run_dir.metrics import Merger, MetricsLog
from rl.run_dir.paths import RunDir
from rl.run_dir.status import RunEnd, Staleness
from rl.system.errors import RunError
from rl.wire.batch_file import write_batch
from rl.wire.messages import TrainBatch
from tests import jsonl
from tests.flags import flags, made
from tests.launch.long_run import make_run, restored


class Place:
    """Prepares runs named `r` in one directory, as `rl` would, and releases them again."""

    base = "--orchestrator.environment.id e --name r --output_dir TMP/outputs"

    def __init__(self, tmp):
        self.tmp = tmp
        self.run_dir = self.config().run_dir
        self.root = self.run_dir.root

    def config(self, *args, **variables):
        base = self.base.replace("TMP", str(self.tmp))
        return made(base, *args, **variables).with_absolute_paths()

    def __call__(self, *args, resume=None, clean=False):
        prepared = prepare(self.config(*args), resume=resume, clean=clean)
        prepared.lease.close()
        return prepared

    def fails(self, *args, resume=None, clean=False):
        with pytest.raises(RunError) as error:
            self(*args, resume=resume, clean=clean)
        return str(error.value)

    def fill(self, steps, checkpoints=()):
        """Writes the files of a run with this many steps."""
        for step in range(1, steps + 1):
            write_batch(self.run_dir.batch(step), TrainBatch(step=step, samples=[]), None)
            self.run_dir.weights(step).mkdir(parents=True)
            self.run_dir.rollouts(step).parent.mkdir(exist_ok=True)
            self.run_dir.rollouts(step).touch()
            MetricsLog(self.run_dir.metrics, "trainer").write(step, {"loss/mean": 1.0})
        Merger(self.run_dir.metrics).merge()
        for step in checkpoints:
            self.run_dir.checkpoint(step).mkdir(parents=True)
        self.run_dir.pending.touch()


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_a_resume_opens_as_many_files_however_long_the_run_is(tmp_path):
    opened, counts = [], []

    def hook(event, arguments):
        if event == "open" and str(tmp_path) in str(arguments[0]):
            opened.append(arguments[0])

    sys.addaudithook(hook)  # permanent: audit hooks cannot be removed
    for steps in (20, 60):
        config = make_run(tmp_path / str(steps), steps)
        opened.clear()
        prepare(config, resume=-1, clean=False).lease.close()
        restored(config)
        counts.append(len(opened))
    assert counts[0] == counts[1] < 100


def test_a_new_run_has_its_resolved_configuration_and_an_existing_one_needs_resume_or_clean(place):
    assert place().notes == []
    assert from_toml(place.run_dir.config) == place.config()
    place.fill(1)
    assert (
        place.fails()
        == f"{place.root} exists: continue that run with --resume, delete it with --clean, or "
        "choose another --name"
    )
    assert "give only one of them" in place.fails(resume=-1, clean=True)


def test_resume_of_a_run_that_is_not_there_says_which_there_are(place):
    assert place.fails(resume=4).startswith(
        f"--resume: there is no run in {place.root}. Leave it out to start one"
    )
    assert not place.root.exists()
    place("--name r2")
    assert "give another run: rl sft @ RUN/config.toml --resume" in place.fails(
        "--sft.dataset rows.jsonl", resume=-1
    )
    assert (
        f"there is no run in {place.root}; in {place.tmp}/outputs there are r2. Leave"
        in place.fails(resume=-1)
    )


def test_a_directory_in_which_nothing_was_made_is_used_again(place):
    """As after a misspelt model or an environment that does not load: the settings may change."""
    place("--model.name misspelt")
    place.run_dir.pending.parent.mkdir()
    place.run_dir.pending.touch()
    MetricsLog(place.run_dir.metrics, "eval").write(0, {"eval/e/reward_mean": 1.0})
    place.run_dir.eval(0, "e").parent.mkdir(parents=True)
    place.run_dir.logs.mkdir()
    assert place(resume=-1).notes == [f"reusing {place.root}: the run in it had made nothing yet"]
    assert from_toml(place.run_dir.config) == place.config()
    assert sorted(path.name for path in place.root.iterdir()) == [
        "config.toml",
        "logs",
        "named_files.json",
        "status",
    ]
    place.run_dir.evals.mkdir()
    assert place(resume=-1).notes == [f"resuming {place.root}: checkpoint none, newest batch none"]
    assert place.run_dir.evals.exists()
    assert place("--max_lag 0").notes
    assert from_toml(place.run_dir.config).max_lag == 0
    assert not place.run_dir.evals.exists()
    assert "--resume 3: needs batches 1 to 3" in place.fails("--max_lag 0", resume=3)
    for path in (
        place.run_dir.batch(1),
        place.run_dir.pending,
        place.run_dir.digests(1),
        place.run_dir.checkpoint(1) / "x",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        assert " exists: continue that run with --resume" in place.fails()
        shutil.rmtree(path.parent if path.parent.name != "000001" else path.parent.parent)


def test_a_run_lives_where_its_config_toml_lies(place):
    """After a run is moved and renamed, readers and a resume use the new place."""
    place()
    place.fill(2, (1,))
    there = place.tmp / "elsewhere" / "moved"
    there.parent.mkdir()
    place.root.rename(there)
    config = made("@", str(there / "config.toml"), "--max_steps", "7")
    assert config.run_dir.root == there and from_toml(there / "config.toml").name == "moved"
    prepared = prepare(config.with_absolute_paths(), resume=-1, clean=False)
    prepared.lease.close()
    assert prepared.notes == [
        f"resuming {there}: checkpoint 1, newest batch 2",
        "changed: name: 'r' -> 'moved'",
        f"changed: output_dir: '{place.tmp}/outputs' -> '{there.parent}'",
        "changed: max_steps: 100 -> 7",
    ]
    assert not place.root.exists() and 'name = "moved"' in (there / "config.toml").read_text()
    assert (
        made("@", str(there / "config.toml"), "--name", "new").run_dir.root == there.parent / "new"
    )
    (there.parent / "link").symlink_to(there)
    assert made("@", str(there.parent / "link" / "config.toml")).run_dir.root == there
    # a copy of the settings is no run
    (place.tmp / "config.toml").write_bytes((there / "config.toml").read_bytes())
    assert made("@", str(place.tmp / "config.toml")).run_dir.root == there


def test_versions_that_lie_elsewhere_go_with_a_renamed_run_and_stay_with_the_one_it_was_copied_from(
    place,
):
    args = ("--trainer.weights.dir", str(place.tmp / "memory"))
    place(*args)
    place.fill(1, (1,))
    (place.tmp / "memory" / "r" / "000001").mkdir(parents=True)
    renamed = place.root.with_name("s")
    place.root.rename(renamed)
    # the run was not resumed yet
    assert run_dir_of(renamed, stored_config(renamed)).weights_dir == place.tmp / "memory" / "r"
    place(*args, "--name s", resume=-1)
    assert [path.name for path in (place.tmp / "memory").iterdir()] == ["s"]
    assert run_dir_of(renamed, stored_config(renamed)).weights(1).is_dir()
    copy = place.tmp / "backup" / "s"
    shutil.copytree(renamed, copy)
    same = made("@", str(copy / "config.toml"))
    for how in ({"resume": -1, "clean": False}, {"resume": None, "clean": True}):
        with pytest.raises(
            RunError,
            match=f"memory/s holds the versions of {renamed}, of which {copy} is a copy: rename "
            "that directory",
        ):
            prepare(same, **how)
    place(
        "--name t",
        *args,
        "--output_dir",
        str(copy.rename(copy.with_name("t")).parent),
        resume=-1,
    )
    assert (place.tmp / "memory" / "s" / "000001").is_dir()


def test_a_copy_of_a_run_has_a_wandb_run_of_its_own(place):
    """Regression: it went on with its original's. A run that was moved goes on with its own."""
    place()
    place.fill(1, (1,))
    place.run_dir.wandb.write_text('{"id": "x", "sent": {"trainer": 1}}')
    moved = place.root.rename(place.root.with_name("moved"))
    place("--name moved", resume=-1)
    copy = shutil.copytree(moved, moved.with_name("copy"))
    place("--name moved", resume=-1)
    assert (moved / "wandb.json").exists()
    place("--name copy", resume=-1)
    assert not (copy / "wandb.json").exists() and (moved / "wandb.json").exists()


def test_a_path_that_has_moved_is_no_other_setting(place):
    for name in ("old", "new", "other"):
        (place.tmp / name).mkdir()
        (place.tmp / name / "model").mkdir()
    place("--model.name", str(place.tmp / "old" / "model"))
    place.fill(1, (1,))
    # both are there
    assert "model.name: " in place.fails(
        "--model.name", str(place.tmp / "new" / "model"), resume=-1
    )
    shutil.rmtree(place.tmp / "old")
    assert "model.name: " in place.fails("--model.name", str(place.tmp / "new"), resume=-1)
    assert any(
        "changed: model.name" in note
        for note in place("--model.name", str(place.tmp / "new" / "model"), resume=-1).notes
    )


def test_a_model_with_another_name_and_the_same_weights_is_no_other_setting(place):
    """Regression: a base model that had moved could not be named anew."""
    for name, value in (("a", 0), ("b", 0), ("c", 1)):
        (place.tmp / name).mkdir()
        (place.tmp / name / "config.json").write_text("{}")
        save_file({"w": np.full(4, value, np.float32)}, place.tmp / name / "model.safetensors")
    place("--model.name", str(place.tmp / "a"))
    place.fill(1, (1,))
    shutil.rmtree(place.tmp / "a")
    assert "model.name: " in place.fails("--model.name", str(place.tmp / "c"), resume=-1)
    notes = place("--model.name", str(place.tmp / "b"), resume=-1).notes
    assert [note.split()[1] for note in notes[1:]] == ["model.name:"]


def test_a_length_that_the_start_has_shortened_is_no_other_setting(place):
    """Regression: `--resume` with the same file was refused, after the first start had written
    what the model has."""
    model = place.tmp / "model"
    model.mkdir()
    args = ("--model.name", str(model), "--model.max_model_len")
    (model / "config.json").write_text('{"max_position_embeddings": 1024}')
    save_file({"w": np.zeros(4, np.float32)}, model / "model.safetensors")
    place(*args, "1024")
    place.fill(1, (1,))
    place(*args, "2048", resume=-1)
    assert from_toml(place.run_dir.config).model.max_model_len == 1024
    place(*args, "512", clean=True)
    place.fill(1, (1,))
    assert "model.max_model_len: 512 -> 2048" in place.fails(*args, "2048", resume=-1)


def test_a_start_that_was_interrupted_before_config_toml_can_be_repeated(place):
    place.run_dir.status("x").parent.mkdir(parents=True)
    (place.root / ".config.toml.123.tmp").touch()
    assert place().notes == []


@pytest.mark.parametrize("name", ["thesis.tex", "config.toml"])
def test_only_run_directories_are_touched(place, name):
    """A configuration may be the user's own."""
    place.root.mkdir(parents=True)
    (place.root / name).write_text("max_steps = 3\n")
    for how in ({"resume": -1}, {}, {}, {"clean": True}):
        assert f"is not a run directory, and has {name}; choose another --name" in place.fails(
            **how
        )
        assert [path.read_text() for path in place.root.iterdir()] == ["max_steps = 3\n"]


def test_a_path_that_no_directory_can_have_names_the_remedy(place):
    place.tmp.joinpath("file").touch()
    for output_dir, said in (
        (place.tmp / "file", "Not a directory"),
        (Path("/proc/x"), "No such file or directory"),
    ):
        message = place.fails("--output_dir", str(output_dir))
        assert message.startswith(f"{output_dir / 'r'} cannot be made, ")
        assert f": {said}; choose another output_dir" in message
    place.root.parent.mkdir()
    place.root.touch()
    assert (
        f"{place.root} cannot be made, {place.root}: File exists; choose another" in place.fails()
    )


def test_clean_starts_over(place):
    place()
    place.fill(3, (2,))
    (place.root / "wandb.json").write_text("{}")
    place.run_dir.status("trainer").write_text("{}")
    until = (
        "as soon as this one has finished a group or a step; until then it is in "
        f"{place.run_dir.cleaned}"
    )
    assert place("--max_lag 0", clean=True).notes == [f"deletes the run in {place.root} {until}"]
    assert sorted(path.name for path in place.root.iterdir()) == [
        ".cleaned",
        "config.toml",
        "named_files.json",
        "status",
    ]
    assert sorted(path.name for path in place.run_dir.status_dir.iterdir()) == [
        "rl.000002.lease",
        "rl.lock",
    ]
    assert from_toml(place.run_dir.config).max_lag == 0
    assert place(clean=True).notes == [f"deleted the run in {place.root}"], (
        "a second one, after a start that made nothing, costs nothing"
    )
    kept = RunDir(place.run_dir.cleaned, place.run_dir.cleaned / "weights")
    assert kept.newest_batch() == 3 and kept.status("trainer").exists()
    kept.root.rename(place.root.with_name("back"))
    config = from_toml(place.root.with_name("back") / "config.toml")
    back = prepare(config, resume=-1, clean=False)
    back.lease.close()
    assert back.notes[0].endswith("back: checkpoint 2, newest batch 3") and config.max_lag == 1


def test_weights_elsewhere_belong_to_the_run(place):
    elsewhere = place.tmp / "memory" / "r"
    args = ("--trainer.weights.dir", str(place.tmp / "memory"))
    (elsewhere / "000002").mkdir(parents=True)
    assert f"{elsewhere} holds versions 2 to 2 of another run" in place.fails(*args)
    (elsewhere / ".000003.tmp").mkdir()
    (elsewhere / "mine").touch()
    place(*args, clean=True)
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    (elsewhere / "mine").unlink()
    (elsewhere / "000001").mkdir()
    place(clean=True)  # the weights of the run as it was configured before
    assert not elsewhere.exists()


def test_another_configuration_is_refused_with_every_difference(place):
    place()
    place.fill(1)
    before = place.run_dir.config.read_bytes()
    said = place.fails(
        "--seed 1 --max_lag 0 --orchestrator.environment.args.n 5 --max_steps 9",
        resume=-1,
    )
    assert said.splitlines()[:4] == [
        f"{place.root} was made with another configuration, 3 settings differ:",
        "  seed: 0 -> 1",
        "  max_lag: 1 -> 0",
        "  orchestrator.environment.0.args.n: None -> 5",
    ]
    assert "--name" in said and "--clean" in said
    assert place.run_dir.config.read_bytes() == before
    assert not (place.root / "changes.jsonl").exists()


@pytest.mark.parametrize(("top_p", "before"), [(0.8, 0), (1.0, 512)])
def test_a_run_of_a_version_without_kept_ids_goes_on_without_them(place, top_p, before):
    """Its batches have none. Regression: after them the loss changed, and nothing said so."""
    same = f"--orchestrator.sampling.top_p {top_p}"
    place(same)
    place.fill(1)
    text = place.run_dir.config.read_text()
    place.run_dir.config.write_text(text.replace("max_kept = 512\n", ""))
    assert stored_config(place.root).trainer.max_kept == before
    for asked in ([], [], [f"--trainer.max_kept {before}"]):
        place(same, *asked, resume=-1)
        assert f"max_kept = {before}\n" in place.run_dir.config.read_text()
    if not before:
        asked = place.fails(same, "--trainer.max_kept 256", resume=-1)
        assert "1 setting differs:\n  trainer.max_kept: 0 -> 256\n" in asked


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("max_steps", "200", 100, 200),
        ("inference.vllm.max_num_seqs", "8", None, 8),
        ("trainer.checkpoint.interval", "5", None, 5),
        ("trainer.gpus", "2", None, 2),
        ("orchestrator.rollout_timeout_s", "5", 600.0, 5.0),
        ("wandb.project", "p", None, "p"),
    ],
)
def test_what_may_change_is_recorded(place, key, value, old, new):
    place()
    place.fill(3, (2,))
    changes = place.root / "changes.jsonl"
    assert place(resume=-1).notes == [f"resuming {place.root}: checkpoint 2, newest batch 3"]
    assert not changes.exists()
    prepared = place(f"--{key}", value, resume=-1)
    lines = jsonl.read(changes)
    (line,) = [line for line in lines if line["key"] == key]
    # which is there now, with its other settings
    assert len(lines) == 1 or key.startswith("wandb.")
    assert line.pop("time") > 1.7e9
    assert line == {"step": 2, "key": key, "old": old, "new": new}
    assert f"changed: {key}: {old!r} -> {new!r}" in prepared.notes
    assert from_toml(place.run_dir.config) == place.config(f"--{key}", value)


def test_a_learning_rate_that_another_max_steps_changes_is_said_and_must_be_confirmed(place):
    """Regression: it jumped from 2.5e-4 to 9e-4 in silence."""
    linear = flags("--trainer.optim.schedule linear --learning_rate 1e-3")
    place(*linear, "--max_steps 4")
    place.fill(4, (2, 4))
    rates = (
        "learning rate of step 4: 0.00025 before, 0.000925 with these settings, which go on from "
        "there"
    )
    refused = f"max_steps: 4 -> 40: {rates}. To accept that, name the step: --resume 4"
    assert place.fails(*linear, "--max_steps 40", resume=-1) == refused
    assert from_toml(place.run_dir.config).max_steps == 4 and place.run_dir.newest_batch() == 4
    assert place(*linear, "--max_steps 40", resume=4).notes[1:] == [
        rates,
        "changed: max_steps: 4 -> 40",
    ]
    # it is the run's own from then on
    assert len(place(*linear, "--max_steps 40", resume=-1).notes) == 1
    linear += ("--trainer.optim.warmup_steps", "9")
    place(*linear, "--max_steps 40", clean=True)
    place.fill(4, (4,))
    # a warm-up goes on as before
    assert place(*linear, "--max_steps 20", resume=-1).notes[1:] == ["changed: max_steps: 40 -> 20"]


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.optim.lr", "1"],
        ["--orchestrator.batch_size", "8"],
        ["--model.name", "x"],
        ["--orchestrator.environment.id", "f"],
        ["--trainer.weights.dir", "/dev/shm"],
    ],
)
def test_what_may_not_change(place, args):
    place()
    place.fill(1)
    assert "was made with another configuration" in place.fails(*args, resume=-1)


class Rows(Place):
    """Prepares runs whose settings name files."""

    base = (
        "--orchestrator.environment.dataset TMP/rows.jsonl --orchestrator.environment.reward TMP/r.py:f "
        "--orchestrator.eval.dataset TMP/held.jsonl --orchestrator.eval.reward TMP/other.py:f "
        "--orchestrator.credit.function TMP/c.py:g --model.name TMP/base "
        "--model.chat_template TMP/chat.jinja --name r --output_dir TMP/outputs"
    )


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("rows.jsonl", "orchestrator.environment.0.dataset"),
        ("chat.jinja", "model.chat_template"),
        ("base/model.safetensors", "model.name"),
        ("held.jsonl", ""),
        ("r.py", "orchestrator.environment.0.reward"),
        ("c.py", "orchestrator.credit.function"),
    ],
)
def test_a_file_that_was_edited_in_place_is_another_setting(tmp_path, file, key):
    """Regression: rows, templates and weights that were edited before --resume were trained
    without a word."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    for name in ("rows.jsonl", "held.jsonl", "chat.jinja", "r.py", "c.py"):
        (tmp_path / name).write_text("before")
    save_file({"w": np.zeros(4, np.float32)}, tmp_path / "base" / "model.safetensors")
    place = Rows(tmp_path)
    place()
    place.fill(3, (2,))
    assert place(resume=-1).notes == [f"resuming {place.root}: checkpoint 2, newest batch 3"]
    if file.endswith(".safetensors"):
        save_file({"w": np.ones(4, np.float32)}, tmp_path / file)
    else:
        (tmp_path / file).write_text("after it")
    told = (
        f"{key or 'orchestrator.eval.0.dataset'} (content of "
        f"{'base' if key == 'model.name' else file}): "
    )
    if key.startswith(("model", "orchestrator.environment.0.dataset")):
        assert "1 setting differs:\n  " + told in place.fails(resume=-1)
        return
    notes = place(resume=-1).notes
    assert notes[1].startswith(f"changed: {told}")
    assert all(f"(content of {file})" in note for note in notes[1:])
    line, *_ = jsonl.read(place.root / "changes.jsonl")
    assert line["key"] == told.removesuffix(": ")
    assert line["old"] != line["new"]
    assert line["step"] == 2
    assert len(place(resume=-1).notes) == 1, "said once"


def test_fewer_steps_than_there_are_is_refused(place):
    place()
    place.fill(3, (2,))
    said = f"max_steps = 2: {place.root} already has 3 steps; give at least that"
    assert place.fails("--max_steps 2", resume=-1) == f"{said}, or go back with --resume 2"
    assert place.fails("--max_steps 2", resume=3) == said
    assert place.run_dir.newest_batch() == 3 and from_toml(place.run_dir.config).max_steps == 100
    place("--max_steps 2", resume=2)
    assert place.run_dir.newest_batch() == 2


def test_a_run_with_all_its_steps_is_done(place):
    place("--max_steps 3")
    place.fill(3, (3,))
    # it did not report its end: the last evaluation may be missing
    assert not place("--max_steps 3", resume=-1).why_over
    place.run_dir.run_end.write_bytes(msgspec.json.encode(RunEnd("3 steps done", 1.0)))
    said = "all 3 steps are done; raise --max_steps to continue"
    assert place("--max_steps 3", resume=-1).why_over == said
    assert not place("--max_steps 4", resume=-1).why_over
    assert not place("--max_steps 4", resume=2).why_over


def test_a_run_that_reached_its_target_is_over_until_the_target_is_another(place):
    target = "--orchestrator.eval.target 0.95"
    place(target)
    place.fill(3, (3,))
    end = RunEnd("eval e reached 0.975 at version 3; its target is 0.95", 1.0, "early")
    place.run_dir.run_end.write_bytes(msgspec.json.encode(end))
    assert not place(target, resume=-1).why_over, "version 3 is not evaluated"
    place.run_dir.eval(3, "e").parent.mkdir(parents=True)
    place.run_dir.run_end.write_bytes(msgspec.json.encode(end))
    assert place(target, resume=-1).why_over == (
        f"the run ended at step 3 of 100: {end.reason}; raise orchestrator.eval.target to continue"
    )
    for _ in range(2):  # the first start was killed before its orchestrator began
        assert not place("--orchestrator.eval.target 0.99", resume=-1).why_over
    place.run_dir.run_end.write_bytes(msgspec.json.encode(RunEnd("nothing", 1.0, "doubtful")))
    assert not place("--orchestrator.eval.target 0.99", resume=-1).why_over


def test_a_solved_run_is_over_until_its_reward_is_edited(place):
    reward, rows = place.tmp / "r.py", place.tmp / "rows.jsonl"
    rows.write_text("{}")
    reward.write_text("def f(): return 1")
    name = "--name r --orchestrator.environment.name e --orchestrator.eval.target 0.95 "
    place.base = f"{name}--output_dir TMP/outputs --orchestrator.environment.dataset {rows}"
    flags = f"--orchestrator.environment.reward {reward}:f"
    place(flags)
    place.fill(3, (3,))
    place.run_dir.eval(3, "e").parent.mkdir(parents=True)
    place.run_dir.run_end.write_bytes(msgspec.json.encode(RunEnd("solved", 1.0, "early")))
    assert place(flags, resume=-1).why_over == "the run ended at step 3 of 100: solved"
    reward.write_text("def f(): return 2")
    assert not place(flags, resume=-1).why_over


def test_workers_and_evals_may_change_in_their_lists_and_nan_is_the_same_setting_as_nan(place):
    own = flags("--trainer.loss.function math:fsum --trainer.loss.args.fill nan")
    place("--orchestrator.eval.interval 5", *own)
    place.fill(1)
    place(
        "--orchestrator.eval.interval 2 --orchestrator.environment.workers 3",
        *own,
        resume=-1,
    )
    keys = [line["key"] for line in jsonl.read(place.root / "changes.jsonl")]
    assert sorted(keys) == ["orchestrator.environment.0.workers", "orchestrator.eval.0.interval"]


def test_resume_at_a_step_moves_the_rest_away(place):
    place()
    place.fill(4, (1, 3))
    (place.root / "wandb.json").write_text("{}")
    prepared = place(resume=2)
    (away,) = place.run_dir.discarded.iterdir()
    assert prepared.notes == [
        f"resuming {place.root}: checkpoint 1, newest batch 2",
        f"moved everything after step 2 to {away}",
    ]
    assert prepared.run_dir.newest_batch() == 2
    left = sorted(
        str(path.relative_to(place.root))
        for path in place.root.rglob("*")
        if path.name[:6].isdigit() and away not in path.parents
    )
    assert [path for path in left if not path.startswith("discarded")] == [
        "batches/000001.batch",
        "batches/000002.batch",
        "checkpoints/000001",
        "rollouts/000001.jsonl",
        "rollouts/000002.jsonl",
        "weights/000001",
        "weights/000002",
    ]
    assert sorted(
        str(path.relative_to(away))
        for path in away.rglob("*")
        if path.suffix or path.name.isdigit()
    ) == [
        "batches/000003.batch",
        "batches/000004.batch",
        "batches/pending.log",
        "checkpoints/000003",
        "metrics.jsonl",
        "rollouts/000003.jsonl",
        "rollouts/000004.jsonl",
        "wandb.json",
        "weights/000003",
        "weights/000004",
    ]
    assert [line["step"] for line in jsonl.read(place.run_dir.metrics)] == [1, 2]
    assert [line["step"] for line in jsonl.read(away / "metrics.jsonl")] == [3, 4]


def test_a_cut_that_was_killed_before_its_end_leaves_no_line_of_what_is_gone(place):
    """`rl` died after the batches were moved; the next command is a plain --resume."""
    place()
    place.fill(4, (1,))
    for step in (3, 4):
        place.run_dir.batch(step).unlink()
    place(resume=-1)
    assert [line["step"] for line in jsonl.read(place.run_dir.metrics)] == [1, 2]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            2,
            "--resume 2: needs batches 1 to 2 of {root}, 2 missing; there are batches 1, 3-5 "
            "and checkpoints 3",
        ),
        (3, None),
        (5, None),
        (
            7,
            "--resume 7: needs batches 4 to 7 of {root}, 6-7 missing; there are batches 1, "
            "3-5 and checkpoints 3",
        ),
        (1, None),
        (0, None),
    ],
)
def test_resume_at_a_step_needs_the_batches_after_the_checkpoint(place, step, message):
    place()
    place.fill(5, (3,))
    place.run_dir.batch(2).unlink()
    if message:
        assert place.fails(resume=step) == message.format(root=place.root)
        assert not place.run_dir.discarded.exists()
        assert place.run_dir.metrics.read_text().count("\n") == 5
    else:
        assert place(resume=step).run_dir.newest_batch() == step


def test_survivors_of_a_dead_rl_are_waited_for(place, monkeypatch):
    monkeypatch.setattr("rl.launch.prepare.ROLE_WAIT_S", 0.3)
    place()
    survivor = hold_role(place.run_dir.lock("trainer"))
    assert (
        f"{place.root}: trainer of this run is already running (pid {os.getpid()} on "
        in place.fails(resume=-1)
    )
    survivor.close()
    place(resume=-1)


def test_dead_roles_on_another_host_are_watched_together(place, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_S", 30.0)
    place()
    far = msgspec.json.encode(LockOwner(1, "far", "0123abcd-4026531836", "1"))
    for role in ("orchestrator", "trainer", "inference", "trainer-1"):
        lock = place.run_dir.lock(role)
        lock.touch()
        lease.lease_path(lock, 3).write_bytes(far)
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(Staleness.__init__, "__defaults__", (lambda: now[0],))
    place(resume=-1)
    # four, one after another, take 120 s; threads that sleep at once each move the clock
    assert 30.0 <= now[0] < 3 * 30.0


def test_servers_that_rl_has_not_started_go_on_through_a_resume_but_not_through_clean(
    place, monkeypatch
):
    monkeypatch.setattr("rl.launch.prepare.ROLE_WAIT_S", 0.1)
    place()
    lives, dead = "inference-a-1", "inference-a-2"
    for name in (lives, dead):
        place.run_dir.status(name).write_text("{}")
    lease = hold_role(place.run_dir.lock(lives))
    # being written by a server on another host
    beat = place.run_dir.status_dir / f".{lives}.json.0123abcd-1-{os.getpid()}-7.tmp"
    beat.touch()
    place.run_dir.status("inference").write_text("{}")  # of the last attempt
    place(resume=-1)
    assert not place.run_dir.status("inference").exists()
    assert place.run_dir.status(lives).exists()
    assert not place.run_dir.status(dead).exists()
    assert beat.exists()
    # it holds the run's token
    assert f"{lives} of this run is already running" in place.fails(clean=True)
    lease.close()
    place(clean=True)


def test_paths_mean_the_same_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    args = flags(
        "--orchestrator.environment.id e --model.name model --trainer.weights.dir w --model.chat_template t.jinja"
    )
    config = build(parse_args(args)).with_absolute_paths()
    assert config.model.name == str(tmp_path / "model")
    assert config.model.chat_template == str(tmp_path / "t.jinja")
    assert config.run_dir.root == tmp_path / "outputs" / "e-model"
    assert config.run_dir.weights_dir == tmp_path / "w" / "e-model"
    assert made(*args, "--model.name", "owner/m").with_absolute_paths().model.name == "owner/m"
