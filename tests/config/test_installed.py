import importlib.util
import sys

import pytest

from rl.config.installed import check_installed
from rl.system.errors import RunError


def test_owner_and_version_are_taken_off():
    assert check_installed("someone/single-digit-addition@0.1.0") == "someone/single-digit-addition"
    assert check_installed("single-digit-addition@latest") == "single-digit-addition"


@pytest.mark.parametrize("layout", ["my_env.py", "my_env/__init__.py", "src/my_env/__init__.py", "__init__.py"])
def test_a_folder_is_used_as_it_is(tmp_path, monkeypatch, layout):
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "my_env"
    (folder / layout).parent.mkdir(parents=True)
    (folder / layout).write_text("PLACE = 7")
    assert check_installed(str(folder)) == "my_env" and importlib.util.find_spec("my_env").origin == str(folder / layout)


def test_a_folder_that_only_needs_to_be_installed_is_named(tmp_path, monkeypatch):
    (tmp_path / "environments" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"`uv pip install ./environments/mine`"):
        check_installed("mine")


@pytest.mark.parametrize(
    ("env_id", "text"),
    [
        ("nobody/not-there@1.0", "`prime env install nobody/not-there@1.0`"),
        ("not-there", "environment not-there is not installed; `uv pip install not-there`"),
        ("me/single-digit-addition@9.9", "0.1.0 is installed; `prime env install me/single-digit-addition@9.9`"),
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
