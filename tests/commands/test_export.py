"""What is said about an export that cannot be, before anything is loaded;
tests/trainer/test_export.py has the exports."""

import pytest

from rl.config.command_line import to_toml
from rl.models.tiny import make_tiny_model
from tests.commands.driver import called
from tests.flags import made


@pytest.fixture
def run(tmp_path):
    """A run that trained the whole model, with checkpoint 4 and the versions 3 and 4."""
    root = tmp_path / "outputs" / "r"
    for name in ("checkpoints/000004", "weights/000003", "weights/000004"):
        (root / name).mkdir(parents=True)
    line = f"--model.name {tmp_path}/base --name r --output_dir /elsewhere"
    config = made(f"--orchestrator.environment.id e {line}")
    (root / "config.toml").write_text(to_toml(config))
    return root


def fault(capsys, *args):
    """The message of an export that ends with 1, or as a wrong command line with 2."""
    code, _, err = called(capsys, "export", *args)
    assert code in (1, 2)
    return err


def test_wrong_command_lines(run, tmp_path, capsys):
    assert "which run? Give its directory first: rl export outputs/NAME --to DIR" in fault(
        capsys, f"--to {tmp_path}/x"
    )
    assert (
        f"where to? Give a directory: rl export {run} --to DIR, or a repository: --push OWNER/NAME"
        in fault(capsys, run)
    )
    assert "--public: needs a repository; name it with --push" in fault(
        capsys, run, f"--to {tmp_path}/x --public"
    )
    assert "--dtype float8: give bfloat16 or float32" in fault(
        capsys, run, f"--to {tmp_path}/x --dtype float8"
    )
    assert f"--merge: {run} trained the whole model and has no adapters" in fault(
        capsys, run, f"--to {tmp_path}/x --merge"
    )
    assert "did you mean" in fault(capsys, run, f"--to {tmp_path}/x --model.nam y")


def test_runs_and_steps_that_are_not_there(run, tmp_path, capsys):
    to = f"--to {tmp_path}/x"
    assert f"{run.parent} contains the runs r" in fault(capsys, run.parent / "s", to)
    assert "not a run of rl; give the directory with its config.toml" in fault(capsys, tmp_path, to)
    expected = (
        "step 5 has neither a checkpoint nor a published version; there are checkpoints 4 and "
        "versions 3-4. Which ones"
    )
    assert expected in fault(capsys, f"{run}@5", to)
    assert f"{run}@0: is the base model" in fault(capsys, f"{run}@0", to)
    assert "give a version number, or best" in fault(capsys, f"{run}@x", to)
    assert "the run has no finished evaluation" in fault(capsys, f"{run}@best", to)


def test_a_model_is_back_that_a_death_has_left_between_two_names(run, tmp_path, capsys):
    """Regression: it stayed hidden for good."""
    (tmp_path / ".model.replaced").mkdir()
    (tmp_path / ".model.replaced" / "config.json").write_text("{}")
    assert "a model exists there" in fault(capsys, run, f"--to {tmp_path}/model")
    assert not (tmp_path / ".model.replaced").exists()


def test_directories_that_must_not_be_written(run, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x").touch()
    assert f"{tmp_path}/photos/x is not a folder that can be written" in fault(
        capsys, run, f"--to {tmp_path}/photos/x/a/b"
    )
    assert "exists and is not a model" in fault(capsys, run, f"--to {tmp_path}/photos --overwrite")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "a model exists there; give another directory, or --overwrite" in fault(
        capsys, run, f"--to {tmp_path}/model"
    )
    assert "base': no such folder" in fault(capsys, run, f"--to {tmp_path}/model --overwrite")
    assert "is inside the run's own directory" in fault(
        capsys, run, f"--to {run}/weights/000003 --overwrite"
    )
    (tmp_path / "model" / ".git").mkdir()
    assert "--overwrite would delete .git beside the model" in fault(
        capsys, run, f"--to {tmp_path}/model --overwrite"
    )
    make_tiny_model(tmp_path / "base")
    (tmp_path / "link").symlink_to("base")
    for to in (tmp_path / "base", tmp_path / "photos" / ".." / "base", tmp_path / "link"):
        assert "is the base model of the run" in fault(capsys, run, "--to", to, "--overwrite")
