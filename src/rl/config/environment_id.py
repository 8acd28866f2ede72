"""Resolves environment ids to packages, from local files only: nothing is imported, installed or
looked up on the network.

owner/name, owner/name@0.3.0     the Environments Hub
pypi:name, pypi:name==0.3.0      the package index
./folder                         a folder with a package or a module
name                             a module or ./environments/name of the current directory, or one
                                 installed under that name

`check_installed` runs in a worker's interpreter: that of the environment's home, or the one that
`python` names.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from rl.system.errors import RunError
from rl.system.terminal import nearest

ROOT_VARIABLE = "RL_ENVIRONMENTS"
INDEX_PREFIX = "pypi:"
HUB_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)(@(?P<version>[\w.+!-]+))?", re.ASCII)
REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?)(?P<rest>(\[[\w., "
    r"-]*\])?\s*([=<>!~][\w.*+!<>=~, -]*)?)",
    re.ASCII,
)
BUNDLED = (
    "harbor",
    "lean",
    "nemo_gym",
    "openenv",
    "textarena",
    "agentic_judge",
    "best_of_n",
    "shared_agentic_judge",
    "user_sim",
)
"""v1 tasksets and environments that ship with verifiers (0.3.1 to 0.4.0)."""
Kind = Literal["hub", "index", "folder", "module", "bundled"]


@dataclass(frozen=True)
class Source:
    """The package that an environment id refers to."""

    kind: Kind
    text: str
    """The id in normalised form, for comparison."""
    name: str
    """Name of the distribution, the folder or the module."""
    owner: str = ""
    version: str = ""
    """Version of a package on the Hub; empty: the newest."""
    path: Path | None = None
    """Path of the folder or of the module's file."""


def homes_root() -> Path:
    """Returns the directory of all homes: $RL_ENVIRONMENTS, or `~/.cache/rl/environments` if
    that is not set."""
    root = os.environ.get(ROOT_VARIABLE, "").strip()
    return (
        Path(root).expanduser().absolute()
        if root
        else Path.home() / ".cache" / "rl" / "environments"
    )


def module_name(path: str) -> str:
    """Returns the module name for an environment id or a distribution name."""
    return path.split("/")[-1].replace("-", "_")


def unversioned(env_id: str) -> str:
    """Returns the id of a Hub or index package without version, with the name normalised as
    package indexes do; a path unchanged."""
    return (
        env_id
        if env_id.startswith("/")
        else re.sub(r"[-_.]+", "-", re.split(r"[@\[=<>!~]", env_id, maxsplit=1)[0]).lower()
    )


def short_name(env_id: str) -> str:
    """Strips owner and version from `owner/name@version`, prefix and version from
    `pypi:name==1.0`, and the suffix from a file name."""
    if env_id.startswith(INDEX_PREFIX):
        match = REQUIREMENT.match(env_id.removeprefix(INDEX_PREFIX))
        return match["name"] if match else env_id.removeprefix(INDEX_PREFIX)
    path = Path(env_id.split("@")[0])
    if env_id.startswith((".", "/", "~")) and path.name in ("", "..", "~"):
        path = path.expanduser().resolve()
    return path.stem


def read_id(env_id: str) -> Source:
    """Returns the package that an id refers to. Raises RunError, which lists the places searched
    and how to install it."""
    if not env_id.strip():
        raise RunError(
            "the environment id is empty; write owner/name, pypi:name, ./folder, or the name "
            "of a module"
        )
    if env_id.startswith((".", "/", "~")):
        return folder(env_id)
    if env_id.startswith(INDEX_PREFIX):
        text = re.sub(r"\s*([\[\],=<>!~]+)\s*", r"\1", env_id.removeprefix(INDEX_PREFIX)).strip()
        if not (match := REQUIREMENT.fullmatch(text)):
            raise RunError(
                f"environment {env_id}: not a valid requirement; write pypi:name or pypi:name==1.0"
            )
        return Source("index", INDEX_PREFIX + text, match["name"])
    if "/" in env_id:
        if not (match := HUB_ID.fullmatch(env_id)):
            raise RunError(
                f"environment {env_id}: not a valid id; write owner/name, "
                "owner/name@version, pypi:name, or ./folder"
            )
        version = "" if match["version"] == "latest" else match["version"] or ""
        text = f"{match['owner']}/{match['name']}" + (f"@{version}" if version else "")
        return Source("hub", text, match["name"], match["owner"], version)
    return here(env_id)


def folder(env_id: str) -> Source:
    """Returns the environment in a folder. Raises RunError if the folder contains neither a
    package nor a module of its name."""
    path = Path(env_id).expanduser()
    full = path.resolve()
    if (path / "pyproject.toml").is_file() or module_place(full):
        return Source("folder", str(full), full.name, path=full)
    raise no_environment(
        path, f"no pyproject.toml, no {module_name(full.name)}.py and no package of that name"
    )


def no_environment(path: Path, lacks: str) -> RunError:
    """Returns the error for a path that is not an environment's folder; `lacks` names the
    missing files."""
    if path.suffix == ".jsonl" and path.is_file():
        return RunError(
            f"environment {path}: this is a dataset, not an environment; set `dataset` and "
            "`reward` instead of `id`"
        )
    if path.is_file():
        return RunError(f"environment {path}: this is a file; give its folder, {path.parent}")
    fault = f"has {lacks}" if path.is_dir() else "does not exist"
    return RunError(
        f"environment {path}: the folder {fault}; give the folder that contains its pyproject.toml"
    )


def module_place(path: Path) -> Path | None:
    """Returns the directory to import the module of folder NAME from: NAME/name.py, NAME/name/,
    NAME/src/name/ or NAME/__init__.py."""
    module = module_name(path.name)
    for directory in (path, path / "src", path.parent):
        if module_file(directory, module):
            return directory
    return None


def module_file(directory: Path, module: str) -> Path | None:
    """Returns the file of a module or package in a directory; None if there is none."""
    files = directory / f"{module}.py", directory / module / "__init__.py"
    return next(filter(Path.is_file, files), None)


def here(env_id: str) -> Source:
    """Returns the environment for a bare name: one in the current directory, or an installed
    one. Raises RunError."""
    name, _, version = env_id.partition("@")
    module = module_name(name)
    if module.isidentifier():
        if not version:
            python_path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            for directory in (Path.cwd(), *map(Path, python_path)):
                if path := module_file(directory, module):
                    return Source("module", module, name, path=path.resolve())
            for path in (Path("environments") / name, Path("environments") / module):
                if path.is_dir():
                    return folder(f"./{path}")
        ends = (f"@{version}", f"=={version}") if version else ""
        installed = [source for source in installed_as(name) if source.endswith(ends)]
        if len(installed) == 1:
            return read_id(installed[0])
        if installed:
            raise RunError(
                f"environment {env_id} is ambiguous: {' and '.join(installed)} are "
                "installed; give the full id"
            )
        if module in BUNDLED and not version:
            return Source("bundled", module, module)
    paths = [*Path.cwd().glob("*.py"), *Path("environments").glob("*")]
    near = nearest(name, [*BUNDLED, *(path.stem for path in paths)])
    raise RunError(
        f"environment {env_id} is not installed: there is no ./{module}.py, no "
        f"./environments/{name}, and nothing of that name in {homes_root()}; "
        f"{f'did you mean {near}? Else ' if near else ''}`rl env install owner/{name}` from the "
        f"Environments Hub, `rl env install pypi:{name}` from the package index, or give the "
        "./FOLDER of one of your own"
    )


def installed_as(name: str) -> list[str]:
    """Returns the ids under which environments of this name were installed, but for folders that
    are gone."""
    match = []
    for path in sorted(homes_root().glob(f"requests/{module_name(name).lower()}-*/home/home.txt")):
        with contextlib.suppress(OSError):  # it is being removed
            match += re.findall("^# id = (.*)", path.read_text(), re.MULTILINE)
    return [env_id for env_id in dict.fromkeys(match) if env_id[0] != "/" or Path(env_id).exists()]


def requirement_fault(text: str) -> str:
    """Returns what is wrong with a requirement, and the remedy; empty if nothing is."""
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return (
            f"{text!r} is not a requirement ({str(error).splitlines()[0]}); write name, or "
            "name>=1.0 (PEP 508)"
        )
    return ""


def fetched(ids: list[str]) -> list[str]:
    """Returns one sentence for each id whose package may be downloaded at the start of a run."""
    places = {"hub": "the Environments Hub", "index": "the package index"}
    sources = [read_id(env_id) for env_id in dict.fromkeys(ids)]
    return [
        f"{source.text}: installed from {places[source.kind]} at the start, unless already present"
        for source in sources
        if source.kind in places
    ]


def id_faults(ids: list[str]) -> list[str]:
    """Returns one error for each id that is neither available locally nor installable."""
    faults = []
    for env_id in dict.fromkeys(ids):
        try:
            read_id(env_id)
        except RunError as error:
            faults.append(str(error))
    return faults


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
