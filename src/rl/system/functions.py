"""The user's functions that settings name, `file.py:function` or `module:function`: loading and
calling them, errors that blame the right code, and validation of their results."""

import contextlib
import importlib.util
import inspect
import math
import os
import queue
import re
import reprlib
import sys
import traceback
import zlib
from collections.abc import Callable, Collection, Mapping, Set
from importlib.machinery import PathFinder
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

from rl.system.errors import RunError
from rl.system.terminal import did_you_mean

FOLDERS: set[Path] = set()
"""Folders of the files that were imported."""
HOW = "write file.py:function or module:function"
IMPORT = re.compile(r"^\s*(?:from\s+(\w+)|import\s+(\w[\w., ]*))", re.MULTILINE)


class Blame(contextlib.AbstractContextManager[None]):
    """Turns any exception that third-party code raises in the block into a RunError that says
    what failed, why, where, and the remedy."""

    def __init__(self, what: str, remedy: str, folder: Path | None = None):
        self.what, self.remedy, self.folder = what, remedy, folder

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, RunError):
            raise RunError(f"{self.what} {raised(error, self.folder)}; {self.remedy}") from error


def described(error: BaseException) -> str:
    """Returns the class of an error and its text, even if its own `__str__` fails."""
    return f"{type(error).__name__}: {traceback.TracebackException(type(error), error, None)}"


def raised(error: BaseException, folder: Path | None = None) -> str:
    """Describes an error of third-party code with the line that raised it: the innermost one in
    `folder` if there is one, because lines inside libraries say little."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"raised {described(error)} (at {error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)]
    line = next(
        (f"{frame.filename}:{frame.lineno}" for frame in reversed(inside or frames)),
        "an unknown place",
    )
    return f"raised {described(error)} (at {line})"


def find_fault(name: str) -> str:
    """Describes what is wrong with a function's name, as far as can be told without importing
    anything; empty if no fault is found."""
    source, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        return f"names no function; {HOW}"
    if not source.endswith(".py"):
        if not all(word.isidentifier() for word in source.split(".")):
            return f"names neither a Python file nor a module; {HOW}"
        package = source.partition(".")[0]
        # in the end, one where the user stands
        if importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()]):
            return ""
        return (
            f"names a module that is not installed: install {source}, or name a file: "
            "file.py:function"
        )
    path = Path(source).expanduser().absolute()
    if not path.is_file():
        return f"names a file that does not exist: {path}"
    try:
        data = path.read_bytes()  # Python reads its encoding in it
        compile(data, path, "exec")
    except SyntaxError as error:
        return f"cannot be read: {path}:{error.lineno}: {error.msg}; correct it"
    except (OSError, ValueError, RecursionError):  # loading it will report that
        return ""
    text = data.decode(errors="replace")
    if re.search(rf"\b({function}|__getattr__|globals|setattr|exec)\b|import \*", text):
        return ""
    functions = re.findall(r"^def ([^_]\w*)", text, re.MULTILINE)
    remedy = did_you_mean(function, functions)
    return f"names no function: {path} has no function {function}; {remedy}"


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Loads the function `file.py:function` or `package.module:function`. Raises RunError, which
    starts with setting and name."""
    what = f"{setting} {name}"
    if fault := find_fault(name):
        raise RunError(f"{what} {fault}")
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source).expanduser().absolute()
        with Blame(f"{what}: importing the file", "correct it", path.parent):
            if fault := wrong_neighbour(path):
                raise RunError(f"{what} {fault}")
            module = import_file(path)
    else:
        with Blame(f"{what}: importing the module", "install it, or name a file: file.py:function"):
            sys.path.append(os.getcwd())
            module = importlib.import_module(source)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            key for key, value in inspect.getmembers(module, inspect.isfunction) if key[0] != "_"
        ]
        remedy = did_you_mean(attribute, functions)
        raise RunError(f"{what}: {module.__file__} has no function {attribute}; {remedy}")
    return function


def import_file(path: Path) -> ModuleType:
    """Imports a Python file as a module, which can itself import files beside it. The file is
    imported once for all its functions."""
    # unique per file: files in other folders may share the stem
    name = f"functions_of_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    FOLDERS.add(path.parent)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        on_failure.pop_all()
    return module


def wrong_neighbour(path: Path) -> str:
    """Describes the first import of a file that would get a file of another function's folder
    instead of the one beside it, or empty."""
    folders = FOLDERS | {path.parent}
    imports = IMPORT.findall(path.read_text(errors="replace"))
    names = {name for pair in imports for name in "".join(pair).split(",")}
    for stem in (re.split(r"\W", name.strip())[0] for name in names):
        beside = path.with_name(f"{stem}.py")
        loaded = getattr(sys.modules.get(stem), "__file__", None)
        files = [Path(loaded or "")] if loaded else [Path(p, beside.name) for p in sys.path]
        taken = next((file for file in files if file.parent in folders and file.is_file()), beside)
        if beside.is_file() and beside.read_bytes() != taken.read_bytes():
            return (
                f"imports {stem}, and would get {taken} instead of the file beside it; "
                "rename one of them"
            )
    return ""


class UserFunction:
    """A function that a setting names. Any exception becomes a RunError with file and line: a
    restart would not help."""

    def __init__(self, setting: str, name: str, arguments: str):
        """Imports it. `arguments`: the names of the arguments it is called with. Raises
        RunError, which starts with setting and name."""
        self.what = f"{setting} {name}"
        self.function = load_function(setting, name)
        inner = inspect.unwrap(self.function)
        code = getattr(inner, "__code__", None)
        module = inspect.getmodule(self.function)
        self.file = Path(code.co_filename if code else getattr(module, "__file__", "") or "")
        self.place = f"{self.file}:{code.co_firstlineno}" if code else str(self.file)
        if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
            raise RunError(f"{self.what} is async (at {self.place}); write a plain def")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a function written in C
            return
        try:
            signature.bind(*arguments.split(", "))
        except TypeError:
            raise RunError(
                f"{self.what} takes {signature} (at {self.place}), but is called with "
                f"({arguments}); correct it"
            ) from None

    def __call__(self, *arguments: Any) -> Any:
        with Blame(self.what, "correct it", self.file):
            return self.function(*arguments)

    def within(self, deadline_s: float, *arguments: Any) -> Any:
        """Calls it in a thread. Raises RunError if it fails or has not returned by the deadline;
        the thread is then abandoned."""
        answers: queue.SimpleQueue[tuple[Any, RunError | None]] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put((self(*arguments), None))
            except RunError as error:
                answers.put((None, error))
            finally:  # the last resort: what is no Exception ends the thread
                told = f"raised {type(sys.exception()).__name__}"
                answers.put((None, self.wrong(told, "raise an Exception instead")))

        Thread(target=call, name=self.what, daemon=True).start()
        try:
            result, error = answers.get(timeout=deadline_s)
        except queue.Empty:
            raise self.wrong(
                f"did not return within {deadline_s:g} s",
                "make it faster, or check what it waits for",
            ) from None
        if error:
            raise error
        return result

    def wrong(self, told: str, wanted: str) -> RunError:
        """Returns the error for an unusable result: `told` describes the result, `wanted` says
        what to return instead."""
        return RunError(f"{self.what} {told} (at {self.place}); {wanted}")


# What it returns ----------------------------------------------------------------------------------


def returned(value: Any) -> str:
    """Describes a result, abbreviated if it is long."""
    return f"returned {reprlib.repr(value)}"


def as_number(value: Any) -> float | None:
    """Returns a finite number of Python, numpy or torch as a float; None for anything else,
    including strings of digits."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    # An array of several numbers, an integer too large for a float, a tensor without values.
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def as_numbers(value: Any, count: int) -> list[float] | None:
    """Returns `count` finite numbers, or None if the value is anything else."""
    items = as_items(value)
    numbers = [number for number in map(as_number, items) if number is not None]
    return numbers if len(numbers) == len(items) == count else None


def as_bools(value: Any, count: int) -> list[bool] | None:
    """Returns `count` booleans, from a single one that applies to all or from that many; None
    for anything else, including numbers."""
    items = as_items(value) if as_bool(value) is None else [value] * count
    bools = [flag for flag in map(as_bool, items) if flag is not None]
    return bools if len(bools) == len(items) == count else None


def as_bool(value: Any) -> bool | None:
    """Returns a boolean of Python, numpy or torch as a bool; None for anything else."""
    scalar = value.item() if getattr(value, "ndim", None) == 0 else value
    return scalar if isinstance(scalar, bool) else None


def as_items(value: Any) -> list[Any]:
    """Returns the items of a list, tuple or array; empty for unordered collections, generators
    and anything else."""
    if (
        not isinstance(value, Collection)
        or isinstance(value, str | bytes | Mapping | Set)
        or getattr(value, "ndim", 1) == 0
    ):
        return []
    return list(value)
