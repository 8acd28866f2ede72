"""One virtual environment as a plan says, made beside its final place. A failure leaves nothing."""

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from rl.config.environment_id import homes_root
from rl.homes.uv import Say, run_uv
from rl.run_dir.files import make_directory, temporary_name
from rl.system.errors import RunError

FOLDER_FILE = "environment.pth"
"""The file in site-packages that puts a folder without a package on the import path, of child processes, too."""


@dataclass(frozen=True)
class Plan:
    """What a home is to hold."""

    what: str
    """The environment, for messages."""
    requirements: tuple[str, ...]
    package: str = ""
    """Distribution of the environment, if `index` alone has it."""
    index: str = ""
    folder: Path | None = None
    """Folder of a package, which is installed as it lies there: what is changed in it later counts."""
    path: Path | None = None
    """Directory that is put on the import path."""
    overrides: tuple[str, ...] = ()
    """Requirements that hold in place of what packages ask for."""
    python: str = ""
    """Interpreter; empty: ours."""
    exact: bool = False
    """The requirements are all packages: nothing else is installed."""


@contextmanager
def built(plan: Plan, log: Path, say: Say, deadline: float) -> Iterator[Path]:
    """Makes the virtual environment and yields its temporary place; what is still there afterwards is deleted. Raises UvError, OSError."""
    root = homes_root()
    make_directory(log.parent)
    temporary = temporary_name(root / "home")
    log.unlink(missing_ok=True)
    try:
        arguments = ["venv", "--relocatable", "--no-project", "--python", plan.python or sys.executable, str(temporary)]
        run_uv(arguments, root, log, plan.what, say, deadline)
        install(plan, temporary, log, say, deadline)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def install(plan: Plan, place: Path, log: Path, say: Say, deadline: float) -> None:
    """Installs what the plan says. The owner's index is asked for its package and for no other: as an index beside the usual one it would
    go before that for every name."""
    project: dict = {"project": {"name": "home", "version": "0", "dependencies": list(plan.requirements)}}
    if plan.index:
        index = {"name": "owner", "url": plan.index, "explicit": True}
        project["tool"] = {"uv": {"index": [index], "sources": {plan.package: {"index": "owner"}}}}
    (place / "pyproject.toml").write_text(tomli_w.dumps(project))
    arguments = ["pip", "install", "--python", str(place / "bin" / "python"), "--requirements", "pyproject.toml"]
    if plan.overrides:
        (place / "overrides.txt").write_text("\n".join(plan.overrides) + "\n")
        arguments += ["--overrides", "overrides.txt"]
    if plan.folder:
        arguments += ["--editable", str(plan.folder)]
    if plan.exact:
        arguments.append("--no-deps")
    run_uv(arguments, place, log, plan.what, say, deadline)
    if plan.path:
        (site_packages(place) / FOLDER_FILE).write_text(f"{plan.path}\n")


def site_packages(place: Path) -> Path:
    """The directory of a virtual environment in which packages are installed. Raises RunError if there is none."""
    found = next(place.glob("lib/python3*/site-packages"), None)
    if found is None:
        raise RunError(f"{place} has no lib/python3*/site-packages: it is no virtual environment")
    return found


def outside(place: Path) -> list[Path]:
    """Directories that a virtual environment refers to: those on its import path, and packages that are installed as they lie there."""
    found = []
    for file in site_packages(place).glob("*.pth"):
        lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
        found += [Path(line) for line in lines if line.startswith("/")]
    return found + [Path(line[3:]) for line in packages(place) if line.startswith("-e ")]


def packages(place: Path) -> list[str]:
    """What is installed, as requirements: `name==version`, `name @ address`, `-e folder`; sorted."""
    lines = []
    for found in importlib.metadata.distributions(path=[str(site_packages(place))]):
        direct = json.loads(found.read_text("direct_url.json") or "{}")
        if direct.get("dir_info", {}).get("editable"):
            lines.append("-e " + direct["url"].removeprefix("file://"))
        elif "url" in direct:
            lines.append(f"{found.name} @ {direct['url']}")
        else:
            lines.append(f"{found.name}=={found.version}")
    return sorted(lines, key=str.lower)


def version_of(place: Path, package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    found = next(iter(importlib.metadata.distributions(name=package, path=[str(site_packages(place))])), None)
    return found.version if found else ""


def python_version(place: Path) -> str:
    """The version of a virtual environment's interpreter, as pyvenv.cfg says; empty if it does not."""
    lines = (line.partition("=") for line in (place / "pyvenv.cfg").read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == "version_info"), "")
