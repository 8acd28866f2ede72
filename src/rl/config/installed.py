"""Checks that an environment is importable in a worker's interpreter: that of its home, or the
one that `python` names."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

from rl.config.environment_id import (
    INDEX_PREFIX,
    module_file,
    module_name,
    module_place,
    no_environment,
    short_name,
)
from rl.system.errors import RunError


def check_installed(env_id: str) -> str:
    """Returns the id without its version. Raises RunError with the remedy if no such module is
    installed in that version.

    An id written as a path (`./folder`) needs no installation: the folder is added to the import
    path, and its name is returned.
    """
    if env_id.startswith((".", "/", "~")):
        return use_folder(Path(env_id).expanduser())
    if env_id.startswith(INDEX_PREFIX):
        env_id = short_name(env_id)
    path, _, version = env_id.partition("@")
    name = path.split("/")[-1]
    python = f"uv pip install --python {sys.executable}"
    install = f"`{python} {name}`" if "/" not in path else f"`{python} PACKAGE`"
    module = module_name(path)
    if here := module_file(Path(), module):
        # behind what is installed: other files there may have names of packages
        sys.path.append(os.getcwd())
    if (Path(sys.prefix) / "home.txt").is_file():
        install = (
            f"neither its home nor {Path.cwd()} contains a module {module}; give its folder, "
            f"./{name}"
        )
    if not module.isidentifier() or not (
        here or importlib.util.find_spec(module) or comes_with_verifiers(module)
    ):
        raise RunError(f"environment {env_id} is not installed for {sys.executable}; {install}")
    if version and version != "latest":
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = "a package without a version"
        if installed != version:
            raise RunError(f"environment {env_id}: {installed} is installed; {install}")
    return path


def use_folder(folder: Path) -> str:
    """Adds a folder's module (NAME/name.py, NAME/name/, NAME/src/name/ or NAME itself) to the
    import path, and returns its name."""
    name = folder.resolve().name
    module = module_name(name)
    if directory := module_place(folder.resolve()):
        sys.path.insert(0, str(directory))
        return name
    raise no_environment(folder, f"no {module}.py and no package {module}")


def comes_with_verifiers(module: str) -> bool:
    """Returns whether verifiers ships a v1 taskset or environment of that name. Looks for a
    file, because importing v1 takes seconds."""
    spec = importlib.util.find_spec("verifiers")
    folders = [
        Path(folder) / "v1" for folder in (spec.submodule_search_locations if spec else None) or []
    ]
    return any(
        (folder / kind / module / "__init__.py").exists()
        for folder in folders
        for kind in ("tasksets", "envs")
    )
