"""Finds out from its source text which API an environment's package is written for. Nothing is
imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl.homes.needs import Api
from rl.system.functions import bound_names, syntax_tree

CLASSIC, V1 = "load_environment", "verifiers.v1"
MOST_FILES = 500
"""Most files of a package that are read."""


@dataclass(frozen=True)
class Probe:
    """The APIs that a module offers."""

    classic: bool
    """It has a function load_environment."""
    v1: bool
    """It names something in `__all__`, and imports verifiers.v1."""
    imports: frozenset[str]
    """Modules of verifiers that it imports, by their full names."""
    hides: bool
    """Its text cannot be parsed, or may bind further names by `import *` or `__getattr__`."""

    @property
    def api(self) -> Api | None:
        """The API by which it is played: v1 if it has both, as in the worker; None if it shows
        neither."""
        return "v1" if self.v1 else "classic" if self.classic else None


def files_of(file: Path) -> list[Path]:
    """The source files of a module: the file itself, or all files of its package."""
    return sorted(file.parent.rglob("*.py"))[:MOST_FILES] if file.name == "__init__.py" else [file]


def probe(file: Path) -> Probe:
    """Reads a module's file, and for its imports its whole package. A file that is not Python
    offers nothing: importing it reports why."""
    nodes = nodes_of(file)
    names, functions = (
        bound_names(nodes),
        {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)},
    )
    exported = set(exports(nodes)) - functions
    hides = bool({"*", "__getattr__"} & names) or not nodes
    imports = frozenset(
        name for path in files_of(file) for name in verifiers_imports(nodes_of(path))
    )
    is_v1 = any(name == V1 or name.startswith(f"{V1}.") for name in imports)
    return Probe(CLASSIC in names, is_v1 and bool(exported - {CLASSIC}), imports, hides)


def nodes_of(file: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree; none if it cannot be parsed."""
    try:
        tree = syntax_tree(file)
    except SyntaxError:
        tree = None
    return [*ast.walk(tree)] if tree else []


def exports(nodes: list[ast.AST]) -> Iterator[str]:
    """The names in `__all__`."""
    for node in nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if (
            any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
            and node.value
        ):
            yield from (
                leaf.value
                for leaf in ast.walk(node.value)
                if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
            )


def verifiers_imports(nodes: list[ast.AST]) -> Iterator[str]:
    """The modules of verifiers that a file imports, including `v1` and `legacy` imported from
    verifiers itself."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.split(".")[0] == "verifiers"
            )
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "verifiers"
        ):
            yield node.module or ""
            yield from (
                f"verifiers.{alias.name}"
                for alias in node.names
                if node.module == "verifiers" and alias.name in ("v1", "legacy")
            )


def lacking(found: Probe, verifiers: Path) -> list[str]:
    """The modules that a package imports but that have no file in this folder of verifiers. Up
    to 0.3 some names work without a file."""
    places = {name: verifiers.joinpath(*name.split(".")[1:]) for name in found.imports}
    return sorted(
        name
        for name, place in places.items()
        if not place.is_dir() and not place.with_suffix(".py").is_file()
    )
