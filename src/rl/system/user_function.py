"""The user's own functions that a run calls, `(what it works on, its config) -> result`: what can be said of one before its file is
imported, who is to blame when it fails, and what its result is worth."""

import ast
import inspect
import math
import reprlib
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from typing import Any

from rl.system.errors import RunError
from rl.system.functions import Blame, find_fault, load_function, source_file, syntax_tree


class UserFunction:
    """A function that a setting names. Whatever it raises becomes a RunError with its file and line: another start does not change it."""

    def __init__(self, setting: str, name: str, arguments: str):
        """Imports it. `arguments`: the names of those that it is called with. Raises RunError, which starts with setting and name."""
        self.what = f"{setting} {name}"
        self.function = load_function(setting, name)
        inner = inspect.unwrap(self.function)
        code = getattr(inner, "__code__", None)
        self.file = Path(code.co_filename) if code else source_file(name.rpartition(":")[0])
        self.place = f"{self.file}:{code.co_firstlineno}" if code else str(self.file)
        if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
            raise RunError(f"{self.what} is async (at {self.place}); write a plain def")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # of what is written in C
            return
        if not accepts(signature, arguments):
            raise RunError(f"{self.what} takes {signature} (at {self.place}), but is called with ({arguments}); correct it")

    def __call__(self, *arguments: Any) -> Any:
        with Blame(self.what, "correct it", self.file):
            return self.function(*arguments)

    def wrong(self, told: str, wanted: str) -> RunError:
        """The error of a result that cannot be used: what it was, in words, and what to return instead."""
        return RunError(f"{self.what} {told} (at {self.place}); {wanted}")


def accepts(signature: inspect.Signature, arguments: str) -> bool:
    """Whether a function of this signature can be called with so many arguments."""
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        return False
    return True


# Before anything is imported --------------------------------------------------------------------------------------------


def find_call_fault(name: str, arguments: str) -> str:
    """What is wrong with a function, as far as its source text shows: it is not there, or takes other arguments. Empty if nothing is."""
    if fault := find_fault(name):
        return fault
    source, _, function = name.rpartition(":")
    path = source_file(source)
    tree = syntax_tree(path) if path.suffix == ".py" else None  # find_fault has told of a SyntaxError
    functions = [node for node in (tree.body if tree else ()) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [node for node in functions if node.name == function]
    return signature_fault(found[-1], path, arguments) if found else ""


def signature_fault(node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path, arguments: str) -> str:
    """What is wrong with a function's definition; a decorator may change its arguments."""
    if isinstance(node, ast.AsyncFunctionDef):
        return f"is async ({path}:{node.lineno}); write a plain def"
    if node.decorator_list or accepts(signature_of(node.args), arguments):
        return ""
    return f"takes ({ast.unparse(node.args)}) ({path}:{node.lineno}), but is called with ({arguments}); correct it"


def signature_of(args: ast.arguments) -> inspect.Signature:
    """The signature that a definition's arguments have; every default is None."""
    parameter, before = inspect.Parameter, [*args.posonlyargs, *args.args]
    found = []
    for i, arg in enumerate(before):
        kind = parameter.POSITIONAL_ONLY if i < len(args.posonlyargs) else parameter.POSITIONAL_OR_KEYWORD
        found.append(parameter(arg.arg, kind, default=parameter.empty if i < len(before) - len(args.defaults) else None))
    if args.vararg:
        found.append(parameter(args.vararg.arg, parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(parameter(arg.arg, parameter.KEYWORD_ONLY, default=None if default else parameter.empty))
    if args.kwarg:
        found.append(parameter(args.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(found)


# What it returns --------------------------------------------------------------------------------------------------------


def returned(value: Any) -> str:
    """A result in words, not too long."""
    return f"returned {reprlib.repr(value)}"


def as_number(value: Any) -> float | None:
    """A finite number as a float, whether Python's, numpy's or torch's; None for anything else, a text of digits too."""
    if not isinstance(value, float | int) and (isinstance(value, str | bytes) or not hasattr(value, "__float__")):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # an array of several, an integer beyond every float
        return None
    return number if math.isfinite(number) else None


def as_numbers(value: Any, count: int) -> list[float] | None:
    """`count` finite numbers, or None."""
    numbers = [as_number(item) for item in as_items(value)]
    return [number for number in numbers if number is not None] if len(numbers) == count and None not in numbers else None


def as_bools(value: Any, count: int) -> list[bool] | None:
    """`count` times true or false, of one that holds for all or of so many; None for anything else, numbers too."""
    one = as_bool(value)
    found = [as_bool(item) for item in as_items(value)] if one is None else [one] * count
    return [item for item in found if item is not None] if len(found) == count and None not in found else None


def as_bool(value: Any) -> bool | None:
    """True or false, whether Python's, numpy's or torch's; None for anything else."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    return found if isinstance(found, bool) else None


def as_items(value: Any) -> list[Any]:
    """The items of a list, a tuple or an array; none of what has no order, or has items only while it runs (a generator)."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping | Set) or getattr(value, "ndim", 1) == 0:
        return []
    return list(value)
