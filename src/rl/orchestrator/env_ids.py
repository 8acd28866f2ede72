"""Environment ids: `name`, `owner/name`, `owner/name@version`. Light, so that a missing one is reported at once."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rl import functions


class EnvLoadError(Exception):
    """An environment cannot be used; the message names the remedy."""


class Blame(functions.Blame):
    """Whatever somebody else's code raises inside becomes an EnvLoadError: what failed, why, where, and the remedy."""

    error = EnvLoadError


def check_installed(env_id: str) -> str:
    """The id without its version, if a module of that name is installed in that version. Raises EnvLoadError with the command otherwise.

    An id that is spelled as a path (`./folder`) is not installed but put on the path of imports, and its name is returned.
    """
    if env_id.startswith((".", "/", "~")):
        return use_folder(Path(env_id).expanduser())
    path, _, version = env_id.partition("@")
    name = path.split("/")[-1]
    install = f"prime env install {env_id}" if "/" in path else f"uv pip install {name}"
    module = module_name(path)
    if not module.isidentifier() or (importlib.util.find_spec(module) is None and not comes_with_verifiers(module)):
        own = [folder for folder in (Path("environments") / name, Path("environments") / module) if folder.is_dir()]
        folder = f"./{own[0]}" if own else "FOLDER"
        raise EnvLoadError(f"environment {env_id} is not installed; `{install}`, or `uv pip install {folder}` for one of your own")
    if version and version != "latest":
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "one without a version"
        if found != version:
            raise EnvLoadError(f"environment {env_id}: {found} is installed; `{install}`")
    return path


def use_folder(folder: Path) -> str:
    """Makes the environment in a folder importable: NAME/name.py, NAME/name/ or NAME/src/name/, or the package NAME itself."""
    name = folder.resolve().name
    module = module_name(name)
    for place in (folder, folder / "src", folder.resolve().parent):
        if (place / f"{module}.py").is_file() or (place / module / "__init__.py").is_file():
            sys.path.insert(0, str(place.resolve()))
            return name
    what = f"has no {module}.py and no package {module}" if folder.is_dir() else "does not exist"
    raise EnvLoadError(f"environment {folder}: the folder {what}; give the folder that its pyproject.toml is in")


def module_name(path: str) -> str:
    return path.split("/")[-1].replace("-", "_")


def comes_with_verifiers(module: str) -> bool:
    """Whether verifiers brings a v1 taskset or environment of that name. It is looked for as a file: importing v1 takes seconds."""
    spec = importlib.util.find_spec("verifiers")
    folders = [Path(folder) / "v1" for folder in (spec.submodule_search_locations if spec else None) or []]
    return any((folder / kind / module / "__init__.py").exists() for folder in folders for kind in ("tasksets", "envs"))


def is_v1(env_id: str) -> bool:
    """Whether an environment is a package of the verifiers v1 API: one with a v1 Taskset or Env in `__all__`. Classic otherwise.

    A package that is both is v1: exporting the class is as deliberate as writing `load_environment`, and verifiers 0.4 has no classic
    API any more. Imports the package. Raises EnvLoadError for one that is not installed, fails to import, or is neither.
    """
    module = module_name(check_installed(env_id))
    if comes_with_verifiers(module):
        return True
    with Blame(f"environment {env_id}: importing {module}", "mend it, or install what it needs"):
        package = importlib.import_module(module)
    if exported(package):
        return True
    if not hasattr(package, "load_environment"):
        raise EnvLoadError(
            f"environment {env_id}: {package.__file__} has no function load_environment, and no v1 Taskset or Env in `__all__`; add one"
        )
    return False


def exported(package: ModuleType) -> list[str]:
    """Which v1 plugins a package exports: `Taskset`, `Env`, both, or none."""
    v1 = sys.modules.get("verifiers.v1")
    if v1 is None:  # then the package cannot have subclassed anything of it
        return []
    found = [getattr(package, name, None) for name in getattr(package, "__all__", ())]
    classes = [one for one in found if isinstance(one, type)]
    kinds = {"Taskset": v1.Taskset, "Env": v1.Env}
    return [name for name, base in kinds.items() if any(issubclass(one, base) and one is not base for one in classes)]
