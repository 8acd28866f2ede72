"""Finds the module of a package that is its environment by the installed files, whatever the
package is called."""

import importlib.metadata
import tomllib
from collections.abc import Iterable
from pathlib import Path

from rl.config.environment_id import Source, module_file, module_name, module_place
from rl.homes.build import site_packages
from rl.homes.needs import Api
from rl.homes.probe import Probe, probe
from rl.system.errors import RunError

NEITHER = "neither a function load_environment nor a v1 Taskset or Env in `__all__`"
NO_ENVIRONMENTS = ("setup", "conftest", "tests", "test", "docs")
"""Names of modules and packages in a folder that are never the environment."""


def find_module(source: Source, place: Path) -> tuple[str, Path]:
    """The name and the file of the environment's module; an installed package is looked up in
    the virtual environment `place`. Raises RunError."""
    if source.kind == "module":
        assert source.path
        return module_name(source.name), source.path
    if source.kind == "folder":
        return in_folder(source)
    return choose(source, installed_files(place, source.name), source.name)


def in_folder(source: Source) -> tuple[str, Path]:
    """The module of the environment in a folder: the one named like the folder or its package,
    or the only one that is an environment."""
    assert source.path
    folder = source.path
    name = project_name(folder) or folder.name
    if found := module_place(folder):
        file = module_file(found, module_name(folder.name))
        assert file
        return module_name(folder.name), file
    files = [
        path
        for place in (folder, folder / "src")
        for path in [*place.glob("*.py"), *place.glob("*/__init__.py")]
    ]
    return choose(source, (path for path in files if module_of(path) not in NO_ENVIRONMENTS), name)


def project_name(folder: Path) -> str:
    """The name of the package in a folder according to its pyproject.toml; empty if that gives
    none. Raises RunError."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise RunError(
            f"environment {folder}: its pyproject.toml cannot be read: {error}; fix it"
        ) from None
    return str(project.get("name", "")) if isinstance(project, dict) else ""


def installed_files(place: Path, package: str) -> list[Path]:
    """The files of the top-level modules and packages of an installed distribution, by its
    RECORD."""
    site = site_packages(place)
    found = next(iter(importlib.metadata.distributions(name=package, path=[str(site)])), None)
    names = {
        Path(*path.parts[:2]) if len(path.parts) > 1 else Path(path)
        for path in (found.files if found else None) or []
    }
    return sorted(
        site / name
        for name in names
        if name.suffix == ".py" and (len(name.parts) == 1 or name.name == "__init__.py")
    )


def module_of(file: Path) -> str:
    """The name of the module in a file."""
    return file.parent.name if file.name == "__init__.py" else file.stem


def choose(source: Source, files: Iterable[Path], package: str) -> tuple[str, Path]:
    """The top-level module that bears the package's name, or else the only one that proves to be
    an environment. Raises RunError."""
    by_name = {module_of(path): path for path in files}
    wanted = module_name(package).lower()
    for name, path in by_name.items():
        if name.lower() == wanted:
            return name, path
    found = [name for name, path in by_name.items() if probe(path).api]
    if len(found) == 1:
        return found[0], by_name[found[0]]
    looked = ", ".join(sorted(by_name)) or "no module at all"
    if found:
        several = f"its package has several environments, {', '.join(found)}"
        raise RunError(
            f"environment {source.text}: {several}; it must have one, or one that bears its name"
        )
    none = f"no module is called {wanted}, and each has {NEITHER} (it has {looked})"
    raise RunError(
        f"environment {source.text}: its package is not an environment: {none}; check the name"
    )


def api_of(text: str, found: Probe, wanted: Api | None) -> Api:
    """The API by which an environment is played. A package that shows neither counts as classic:
    its worker reports the error. Raises RunError if the package lacks the API that was asked
    for."""
    if wanted and found.api and not (found.classic if wanted == "classic" else found.v1):
        what = (
            "a function load_environment"
            if wanted == "classic"
            else "a v1 Taskset or Env in `__all__`"
        )
        raise RunError(
            f'environment {text}: kind = "{wanted}", but it does not have {what}; leave kind out'
        )
    return wanted or found.api or "classic"
