"""Loads the user's functions that settings name: `file.py:function` or `module:function`."""

import ast
import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rl.system.errors import RunError
from rl.system.terminal import did_you_mean

FOLDERS: set[Path] = set()
"""Folders of the files that were imported."""


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
    """Describes an error of third-party code with the place where it was raised."""
    return f"raised {described(error)} (at {place(error, folder)})"


def place(error: BaseException, folder: Path | None = None) -> str:
    """Returns file:line of an error: the innermost frame in `folder` if there is one, because
    lines inside libraries say little."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)]
    return next(
        (f"{frame.filename}:{frame.lineno}" for frame in reversed(own or frames)),
        "an unknown place",
    )


def find_fault(name: str) -> str:
    """Describes what is wrong with a function's name, as far as can be told without importing
    anything; empty if no fault is found."""
    source, colon, function = name.rpartition(":")
    if not colon or not function.isidentifier():
        return "names no function; write file.py:function or module:function"
    if source.endswith(".py"):
        path = source_file(source)
        return (
            missing_in(path, function)
            if path.is_file()
            else f"names a file that does not exist: {path}"
        )
    if not all(part.isidentifier() for part in source.split(".")):
        return "names neither a Python file nor a module; write file.py:function or module:function"
    if not first_place(source.partition(".")[0]):
        return (
            f"names a module that is not installed: install {source}, or name a file: "
            "file.py:function"
        )
    path = source_file(source)
    return missing_in(path, function) if path.suffix == ".py" else ""


def source_file(source: str) -> Path:
    """Returns the Python file of `file.py` or `package.module`; a path without `.py` if only an
    import would find it."""
    if source.endswith(".py"):
        return Path(source).expanduser().absolute()
    top, *rest = source.split(".")
    place = first_place(top) or Path()
    for part in rest:
        place = next(
            (
                path
                for path in (place.parent / f"{part}.py", place.parent / part / "__init__.py")
                if path.is_file()
            ),
            Path(),
        )
    return place


def first_place(package: str) -> Path | None:
    """Returns the file that a package or module would be imported from, or None: in the end, one
    in the current directory."""
    spec = importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    return Path(spec.origin or "") if spec else None


def syntax_tree(path: Path) -> ast.Module | None:
    """Returns the syntax tree of a Python file; None if the file cannot be read, which loading
    it will report. Raises SyntaxError."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return ast.parse(path.read_bytes(), str(path))
    return None


def missing_in(path: Path, function: str) -> str:
    """Describes the fault of a function's name that is not bound in a file; empty if it is
    bound, or if that cannot be told."""
    try:
        tree = syntax_tree(path)
    except SyntaxError as error:
        return f"cannot be read: {path}:{error.lineno}: {error.msg}; correct it"
    if tree is None:
        return ""
    nodes = list(ast.walk(tree))
    used, bound = {node.id for node in nodes if isinstance(node, ast.Name)}, bound_names(nodes)
    if function in bound or {"*", "__getattr__"} & bound or {"globals", "setattr", "exec"} & used:
        return ""
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
    ]
    return f"names no function: {lacks(path, function, names)}"


def bound_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the names that the nodes of a syntax tree bind, by definition, assignment or
    import."""
    bound = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    bound |= {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return bound | {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def lacks(path: object, function: str, functions: list[str]) -> str:
    """Returns the message about a missing function, with a suggestion or the functions that the
    file has."""
    return f"{path} has no function {function}; {did_you_mean(function, functions)}"


def load_function(setting: str, name: str) -> Callable[..., Any]:
    """Loads the function `file.py:function` or `package.module:function`. Raises RunError, which
    starts with setting and name."""
    what = f"{setting} {name}"
    if fault := find_fault(name):
        raise RunError(f"{what} {fault}")
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        path = Path(source).expanduser().absolute()
        if fault := wrong_neighbour(path):
            raise RunError(f"{what} {fault}")
        with Blame(f"{what}: importing the file", "correct it", path.parent):
            module = import_file(path)
    else:
        with Blame(f"{what}: importing the module", "install it, or name a file: file.py:function"):
            sys.path.append(os.getcwd())
            module = importlib.import_module(source)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and not key.startswith("_")
        ]
        raise RunError(f"{what}: {lacks(module.__file__, attribute, functions)}")
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
    nodes = list(ast.walk(syntax_tree(path) or ast.Module([], [])))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    for file in {f"{name.partition('.')[0]}.py" for name in names}:
        own, ours = path.parent / file, FOLDERS | {path.parent}
        loaded = getattr(sys.modules.get(own.stem), "__file__", None)
        places = [Path(loaded)] if loaded else [Path(folder) / file for folder in sys.path]
        found = next((place for place in places if place.parent in ours and place.is_file()), own)
        if own.is_file() and own.read_bytes() != found.read_bytes():
            return (
                f"imports {own.stem}, and would get {found} instead of the file beside it; "
                "rename one of them"
            )
    return ""
