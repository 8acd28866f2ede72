"""The user's functions: faults found before and during import, and the code that is blamed when
they fail."""

import math
import shutil
import sys

import numpy as np
import pytest

from rl.system.errors import GIVE_UP, RunError
from rl.system.functions import UserFunction, as_bools, as_numbers, find_fault, returned

MINE = """import functools
from os.path import join


def one(group): ...
def two(group, config=None, *more, verbose=False, **rest): return undefined
def keyword(group, config, *, verbose): ...
async def later(group, config): ...
@functools.cache
def wrapped(group): ...
class Callable:
    def __call__(self, group, config): ...
made = Callable()
number = 3
if number:
    def inside(group): ...
def leaves(group, config): exit(0)
"""
ALIKE = """def first(group, config): ...
def _hidden(group, config): ...
"""
ODD = """import asyncio
import threading
class MuteError(Exception):
    def __str__(self): return None
class Meta:
    def __float__(self): raise NotImplementedError
    def __repr__(self): raise RuntimeError
def mute(group, config): raise MuteError
def cancelled(group, config): raise asyncio.CancelledError
def slow(group, config): threading.Event().wait()
def meta(group, config): return Meta()
"""
FAULTS = {
    "one": "takes (group) (at {file}:5), but is called with (group, config); correct it",
    "keyword": "takes (group, config, *, verbose) (at {file}:7), but is called with",
    "later": "is async (at {file}:8); write a plain def",
    "tow": "names no function: {file} has no function tow; did you mean two?",
    "number": "{file} has no function number; there are",
    "wrapped": "takes (group) (at {file}:9), but is called with (group, config); correct it",
    "inside": "takes (group) (at {file}:16), but is called with (group, config); correct it",
    "Callable": "takes () (at {file}), but is called with (group, config); correct it",
}


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """The folder of an imported file stays on the import path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "plugged.py"
    path.write_text(MINE)
    return path


def test_what_the_text_of_a_file_shows(mine):
    mine.write_text(ALIKE)
    assert (
        find_fault(f"{mine}:xyz")
        == f"names no function: {mine} has no function xyz; there are first"
    )
    mine.write_text("def f(a, b):\n    retrun 1\n")
    assert find_fault(f"{mine}:f") == f"cannot be read: {mine}:2: invalid syntax; correct it"
    mine.write_text("from somewhere import *\n")
    assert find_fault(f"{mine}:f") == ""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("f", "names no function; write file.py:function or module:function"),
        ("nowhere.py:f", "names a file that does not exist: /"),
        ("no_such.module:f", "names a module that is not installed: install no_such.module"),
        (
            "/etc/passwd:f",
            "names neither a Python file nor a module; write file.py:function or module:function",
        ),
        ("math:exp", ""),
    ],
)
def test_what_a_name_shows(name, fault):
    found = find_fault(name)
    assert found.startswith(fault) and bool(found) == bool(fault)


def test_what_an_import_shows(mine):
    for name, fault in FAULTS.items():
        with pytest.raises(RunError) as error:
            UserFunction("credit", f"{mine}:{name}", "group, config")
        assert fault.replace("{file}", str(mine)) in str(error.value)
        assert error.value.exit_code == GIVE_UP
    for name in ("two", "made"):
        UserFunction("credit", f"{mine}:{name}", "group, config")


def test_its_own_line_is_named_whatever_it_raises(mine):
    """Even if the file lies beside libraries, or tries to exit the process, which would look
    like a good end."""
    for name, said in (
        ("two", "NameError: name 'undefined' is not defined (at {file}:6)"),
        ("leaves", "SystemExit: 0 (at {file}:17)"),
    ):
        with pytest.raises(RunError) as error:
            UserFunction("filter", f"{mine}:{name}", "group, config")(1, 2)
        assert str(error.value) == f"filter {mine}:{name} raised {said}; correct it".replace(
            "{file}", str(mine)
        )


def test_functions_of_one_file_share_their_module_and_a_broken_file_is_imported_anew(tmp_path):
    path = tmp_path / "shared.py"
    path.write_text("def add(a, b): ...\n1 / 0\n")
    with pytest.raises(
        RunError, match=r"importing the file raised ZeroDivisionError: .*shared\.py:2\); correct it"
    ):
        UserFunction("credit", f"{path}:add", "group, config")
    path.write_text("seen = []\ndef add(a, b): seen.append(a)\ndef count(a, b): return len(seen)\n")
    UserFunction("credit", f"{path}:add", "group, config")(1, 2)
    assert UserFunction("metrics", f"{path}:count", "rollout, config")(0, 0) == 1


def test_files_of_one_name_are_modules_of_their_own(tmp_path):
    """Looking up a class by its module, as copy and pickle do, finds that of the right file;
    each file is imported once."""
    functions = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "metrics.py"
        path.write_text(
            f"made = []\nclass Mark:\n    of = '{folder}'\ndef mark(a, b):\n    "
            "made.append(a)\n    return Mark(), len(made)\n"
        )
        functions.append(UserFunction("metrics", f"{path}:mark", "rollout, config"))
    again = UserFunction("metrics", f"{tmp_path}/a/metrics.py:mark", "rollout, config")
    for function, (folder, count) in zip(
        [*functions, again], [("a", 1), ("b", 1), ("a", 2)], strict=True
    ):
        mark, made = function(0, 0)
        assert (sys.modules[type(mark).__module__].Mark, mark.of, made) == (
            type(mark),
            folder,
            count,
        )


@pytest.mark.parametrize(
    ("stem", "form"),
    [
        ("helpers_of_this_test", "from helpers_of_this_test import of"),
        ("others_of_this_test", "import math, others_of_this_test as others; of = others.of"),
    ],
)
def test_a_file_beside_is_never_taken_for_one_of_another_folder(tmp_path, stem, form):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{stem}.py").write_text(f"of = '{folder}'\n")
        (tmp_path / folder / "mine.py").write_text(f"{form}\ndef told(a, b):\n    return of\n")
    assert UserFunction("credit", f"{tmp_path}/a/mine.py:told", "group, config")(1, 2) == "a"
    with pytest.raises(
        RunError,
        match=rf"^filter .*/b/mine\.py:told imports {stem}, and would get .*/a/{stem}\.py instead",
    ):
        UserFunction("filter", f"{tmp_path}/b/mine.py:told", "group, config")
    shutil.copy(tmp_path / "a" / f"{stem}.py", tmp_path / "b")
    # the same
    assert UserFunction("filter", f"{tmp_path}/b/mine.py:told", "group, config")(1, 2) == "a"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_file_has_the_encoding_that_python_reads_in_it(tmp_path, encoding):
    """Regression: it was read as UTF-8, and refused."""
    text = f"# -*- coding: {encoding.removesuffix('-sig')} -*-\nword = 'é'\ndef f(x): return word\n"
    (tmp_path / "own.py").write_text(text, encoding=encoding)
    assert find_fault(f"{tmp_path}/own.py:f") == ""
    assert UserFunction("key", f"{tmp_path}/own.py:f", "x")(1) == "é"


def test_results():
    assert as_numbers([1, np.float32(0.5), True], 3) == [1.0, 0.5, 1.0]
    assert as_numbers(np.arange(2), 2) == [0.0, 1.0]
    for value in (
        None,
        1.0,
        [1.0],
        [1.0, math.nan],
        "12",
        {1.0, 2.0},
        np.array(1.0),
        (1 / n for n in (1, 0)),
    ):
        # a set has no order, and an iterator would raise outside of the function
        assert as_numbers(value, 2) is None
    assert as_bools(False, 2) == [False, False]
    assert as_bools([True, False], 2) == as_bools(np.array([1, 0]) > 0, 2) == [True, False]
    assert as_bools(np.mean([0.5, 1.0]) < 0.9, 2) == as_bools(np.array(True), 2) == [True, True]
    for value in (
        None,
        1,
        [True],
        [True, None],
        {True, False},
        np.array(1),
        [np.array([True])] * 2,
    ):
        assert as_bools(value, 2) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_told_or_counted_is_reported_like_other_failures(tmp_path):
    """In a thread an error while an error is told, or one that is no Exception, is not a
    deadline that passed."""
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    said = {
        "mute": f"raised MuteError: <exception str() failed> (at {path}:8); correct it",
        "cancelled": f"raised CancelledError (at {path}:9); raise an Exception instead",
    }
    for name, text in said.items():
        with pytest.raises(RunError) as error:
            UserFunction("credit", f"{path}:{name}", "group, config").within(60.0, 1, 2)
        assert str(error.value) == f"credit {path}:{name} {text}"
    slow = UserFunction("credit", f"{path}:slow", "group, config")
    with pytest.raises(RunError, match=r"slow did not return within 0\.01 s"):
        slow.within(0.01, 1, 2)
    value = UserFunction("credit", f"{path}:meta", "group, config").within(60.0, 1, 2)
    assert as_numbers([value], 1) is None
    assert returned(value).startswith("returned <Meta instance at ")
