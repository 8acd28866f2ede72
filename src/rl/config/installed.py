"""Environment ids: `name`, `owner/name`, `owner/name@version`. Light, so that a missing one is reported at once."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from rl.config.orchestrator import OrchestratorConfig
from rl.system.errors import RunError


def check_installed(env_id: str) -> str:
    """The id without its version, if a module of that name is installed in that version. Raises RunError with the command otherwise.

    An id that is written as a path (`./folder`) needs no installation: the folder is put on the import path, and its name is returned.
    """
    if env_id.startswith((".", "/", "~")):
        return use_folder(Path(env_id).expanduser())
    path, _, version = env_id.partition("@")
    name = path.split("/")[-1]
    install = f"prime env install {env_id}" if "/" in path else f"uv pip install {name}"
    module = module_name(path)
    # Workers have the current directory on their path, a command may not.
    here = Path(f"{module}.py").is_file() or Path(module, "__init__.py").is_file()
    if not module.isidentifier() or not (here or importlib.util.find_spec(module) or comes_with_verifiers(module)):
        own = [folder for folder in (Path("environments") / name, Path("environments") / module) if folder.is_dir()]
        folder = f"./{own[0]}" if own else "FOLDER"
        raise RunError(f"environment {env_id} is not installed; `{install}`, or `uv pip install {folder}` for one of your own")
    if version and version != "latest":
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "one without a version"
        if found != version:
            raise RunError(f"environment {env_id}: {found} is installed; `{install}`")
    return path


def missing_environments(ids: Iterable[str]) -> list[str]:
    """Which of these environments cannot be used and why, a sentence each, with the command that installs it."""
    faults = []
    for env_id in dict.fromkeys(ids):
        try:
            check_installed(env_id)
        except RunError as error:
            faults.append(str(error))
    return faults


def check_environments(settings: OrchestratorConfig) -> None:
    """Raises RunError that names every environment of a configuration that is missing, before anything is started."""
    if faults := missing_environments(settings.env_ids):
        raise RunError("\n".join(faults))


def use_folder(folder: Path) -> str:
    """Makes the environment in a folder importable: NAME/name.py, NAME/name/ or NAME/src/name/, or the package NAME itself."""
    name = folder.resolve().name
    module = module_name(name)
    for place in (folder, folder / "src", folder.resolve().parent):
        if (place / f"{module}.py").is_file() or (place / module / "__init__.py").is_file():
            sys.path.insert(0, str(place.resolve()))
            return name
    what = f"has no {module}.py and no package {module}" if folder.is_dir() else "does not exist"
    raise RunError(f"environment {folder}: the folder {what}; give the folder that its pyproject.toml is in")


def module_name(path: str) -> str:
    return path.split("/")[-1].replace("-", "_")


def comes_with_verifiers(module: str) -> bool:
    """Whether verifiers brings a v1 taskset or environment of that name. It is looked for as a file: importing v1 takes seconds."""
    spec = importlib.util.find_spec("verifiers")
    folders = [Path(folder) / "v1" for folder in (spec.submodule_search_locations if spec else None) or []]
    return any((folder / kind / module / "__init__.py").exists() for folder in folders for kind in ("tasksets", "envs"))
