"""The user's functions that a run calls, `(input, config) -> result`: checks before their file
is imported, errors that blame the right code, and validation of their results."""

import ast
import inspect
import math
import queue
import reprlib
import sys
from collections.abc import Collection, Mapping, Set
from pathlib import Path
from threading import Thread
from typing import Any

from rl.system.errors import RunError
from rl.system.functions import (
    Blame,
    bound_names,
    find_fault,
    load_function,
    source_file,
    syntax_tree,
)


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
        self.file = Path(code.co_filename) if code else source_file(name.rpartition(":")[0])
        self.place = f"{self.file}:{code.co_firstlineno}" if code else str(self.file)
        if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
            raise RunError(f"{self.what} is async (at {self.place}); write a plain def")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a function written in C
            return
        if not accepts(signature, arguments):
            raise RunError(
                f"{self.what} takes {signature} (at {self.place}), but is called with "
                f"({arguments}); correct it"
            )

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
                answers.put(
                    (
                        None,
                        self.wrong(
                            f"raised {type(sys.exception()).__name__}", "raise an Exception instead"
                        ),
                    )
                )

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


def accepts(signature: inspect.Signature, arguments: str) -> bool:
    """Returns whether a function with this signature accepts that many positional arguments."""
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        return False
    return True


# Before anything is imported ----------------------------------------------------------------------


def find_call_fault(name: str, arguments: str) -> str:
    """Describes the fault of a function as far as its source text shows: it is missing or takes
    other arguments. Empty if there is none."""
    if fault := find_fault(name):
        return fault
    definition, path = find_definition(name)
    return signature_fault(definition, path, arguments) if definition else ""


def find_definition(name: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef | None, Path]:
    """Returns the definition of a function in which `find_fault` has found no fault, and its
    file; None if its text does not show one, or also assigns something else to the name."""
    source, _, function = name.rpartition(":")
    path = source_file(source)
    # find_fault has reported a SyntaxError
    tree = syntax_tree(path) if path.suffix == ".py" else None
    found = None
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            found = node
        elif not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and function in bound_names([*ast.walk(node)]):
            return None, path
    return found, path


def signature_fault(
    node: ast.FunctionDef | ast.AsyncFunctionDef, path: Path, arguments: str
) -> str:
    """Describes what is wrong with a function's definition. Arguments are not checked if it is
    decorated: that may change them."""
    if isinstance(node, ast.AsyncFunctionDef):
        return f"is async ({path}:{node.lineno}); write a plain def"
    if node.decorator_list or takes(node.args, len(arguments.split(", "))):
        return ""
    return (
        f"takes ({ast.unparse(node.args)}) ({path}:{node.lineno}), but is called with "
        f"({arguments}); correct it"
    )


def takes(args: ast.arguments, count: int) -> bool:
    """Returns whether a definition with these arguments accepts `count` positional ones."""
    positional = len(args.posonlyargs) + len(args.args)
    enough = positional - len(args.defaults) <= count and None not in args.kw_defaults
    return enough and (count <= positional or args.vararg is not None)


def required_names(args: ast.arguments) -> list[str]:
    """Returns the arguments of a definition that have no default and can be given by name."""
    plain = args.args[: max(0, len(args.args) - len(args.defaults))]
    keyword_only = [
        arg
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if default is None
    ]
    return [arg.arg for arg in [*plain, *keyword_only]]


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
    one = as_bool(value)
    items = as_items(value) if one is None else [one] * count
    found = [item for item in map(as_bool, items) if item is not None]
    return found if len(found) == len(items) == count else None


def as_bool(value: Any) -> bool | None:
    """Returns a boolean of Python, numpy or torch as a bool; None for anything else."""
    found = value.item() if getattr(value, "ndim", None) == 0 else value
    return found if isinstance(found, bool) else None


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
