import importlib.util
import sys

import pytest

from rl.config import environment_id
from rl.config.environment_id import check_installed, read_id
from rl.system.errors import RunError
from rl.system.functions import load_function


def test_owner_and_version_are_taken_off():
    assert check_installed("someone/packaging@latest") == "someone/packaging"
    assert check_installed("pypi:packaging>=2") == "packaging"


@pytest.mark.parametrize(
    "layout", ["my_env.py", "my_env/__init__.py", "src/my_env/__init__.py", "__init__.py"]
)
def test_a_folder_is_used_as_it_is(tmp_path, monkeypatch, layout):
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "my_env"
    (folder / layout).parent.mkdir(parents=True)
    (folder / layout).write_text("PLACE = 7")
    assert check_installed(str(folder)) == "my_env"
    assert importlib.util.find_spec("my_env").origin == str(folder / layout)


def test_a_module_where_the_user_stands_is_found_behind_what_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    for name in ("my_env.py", "queue.py", "packaging.py"):
        (tmp_path / name).write_text("def f(): return 7")
    assert check_installed("my-env") == "my-env"
    assert importlib.util.find_spec("my_env").origin == str(tmp_path / "my_env.py")
    assert importlib.util.find_spec("packaging").origin != str(tmp_path / "packaging.py")
    assert sys.path[0] != str(tmp_path)
    assert load_function("x", "my_env:f")() == 7


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        (
            "nobody/not-there@1.0",
            f"is not installed for {sys.executable}; `uv pip install --python "
            f"{sys.executable} PACKAGE`",
        ),
        (
            "not-there",
            f"environment not-there is not installed for {sys.executable}; `uv pip install "
            f"--python {sys.executable} not-there`",
        ),
        ("me/packaging@0.9", "is installed; `uv pip install"),
        ("../escape", "environment ../escape: the folder does not exist; give the folder"),
        ("./src", "has no src.py and no package src"),
        ("a/../b", "is not installed"),
        ("a b\0c", "is not installed"),
    ],
)
def test_what_is_not_there_says_how_to_get_it(env_id, text):
    with pytest.raises(RunError) as error:
        check_installed(env_id)
    assert text in str(error.value)


def test_a_bare_name_does_not_mean_a_folder_that_is_gone(tmp_path, monkeypatch):
    """Of two clones the deleted one made the name ambiguous."""
    monkeypatch.setattr(environment_id, "homes_root", lambda: tmp_path / "homes")
    monkeypatch.chdir(tmp_path)
    ids = [tmp_path / clone / "my_sums" for clone in ("old", "new")]
    for number, folder in enumerate(ids):
        (folder / "my_sums.py").parent.mkdir(parents=True)
        (folder / "my_sums.py").write_text("")
        home = tmp_path / f"homes/requests/my_sums-{number}/home"
        home.mkdir(parents=True)
        (home / "home.txt").write_text(f"# id = {folder}\n")
    with pytest.raises(RunError, match="my_sums is ambiguous"):
        read_id("my_sums")
    (ids[0] / "my_sums.py").unlink()
    ids[0].rmdir()
    assert read_id("my_sums").path == ids[1]
