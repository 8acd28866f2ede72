"""Builds one virtual environment from a plan, beside its final place. A failure leaves nothing
behind."""

import base64
import hashlib
import importlib.metadata
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import tomli_w
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl.config.environment_id import homes_root, module_file, module_name
from rl.homes.uv import Say, run_uv
from rl.run_dir.files import make_directory, temporary_name
from rl.system.errors import RunError

FOLDER_FILE = "environment.pth"
"""The file in site-packages that puts a folder without a package on the import path, also in
child processes."""


@dataclass(frozen=True)
class Plan:
    """The contents that a home is to have."""

    what: str
    """The environment, for messages."""
    requirements: tuple[str, ...]
    """All requirements except the environment's own package and verifiers."""
    own: str = ""
    """The requirement of the environment's own package, if it comes from an index or the Hub."""
    package: str = ""
    """Distribution of the environment, if only `index` has it."""
    index: str = ""
    folders: tuple[Path, ...] = ()
    """Folders of packages that are installed as editable: later changes in them take effect."""
    path: Path | None = None
    """Directory that is put on the import path, or a single package to put there."""
    python: str = ""
    """Interpreter; empty: ours."""
    exact: bool = False
    """The requirements list every package: their dependencies are not installed."""
    fresh: tuple[str, ...] = ()
    """Packages for which uv's cache is not trusted: the environment's own, and those whose
    requirement does not name a version. uv asks indexes for all others anyway."""


@contextmanager
def built(plan: Plan, log: Path, say: Say, deadline: float) -> Iterator[Path]:
    """Makes a virtual environment without packages and yields its temporary place, which is
    deleted afterwards unless it was moved. Raises UvError, OSError."""
    root = homes_root()
    make_directory(log.parent)
    temporary = temporary_name(root / "home")
    log.unlink(missing_ok=True)
    try:
        arguments = [
            "venv",
            "--relocatable",
            "--no-project",
            "--python",
            plan.python or sys.executable,
            str(temporary),
        ]
        run_uv(arguments, root, log, plan.what, say, deadline)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def install(
    plan: Plan,
    place: Path,
    log: Path,
    say: Say,
    deadline: float,
    verifiers: str = "",
    *,
    force: bool = False,
) -> None:
    """Installs the plan's packages and a version of `verifiers`; `force` overrides packages that
    ask for a different one. The owner's index is asked only for its own package: as an extra
    index it would take precedence for every name. Raises UvError."""
    wanted = [*filter(None, (plan.own, *plan.requirements, verifiers))]
    project: dict = {"project": {"name": "home", "version": "0", "dependencies": wanted}}
    if plan.index:
        index = {"name": "owner", "url": plan.index, "explicit": True}
        project["tool"] = {"uv": {"index": [index], "sources": {plan.package: {"index": "owner"}}}}
    (place / "pyproject.toml").write_text(tomli_w.dumps(project))
    arguments = [
        "pip",
        "install",
        "--python",
        str(place / "bin" / "python"),
        "--requirements",
        "pyproject.toml",
    ]
    if force:
        (place / "overrides.txt").write_text(f"{verifiers}\n")
        arguments += ["--overrides", "overrides.txt"]
    for folder in plan.folders:
        arguments += ["--editable", str(folder)]
    arguments += ["--no-deps"] if plan.exact else []
    arguments += [word for package in plan.fresh for word in ("--refresh-package", package)]
    run_uv(arguments, place, log, plan.what, say, deadline)
    if plan.path and is_package(plan.path):
        (site_packages(place) / module_name(plan.path.name)).symlink_to(plan.path)
    elif plan.path:
        (site_packages(place) / FOLDER_FILE).write_text(f"{plan.path}\n")


def is_package(path: Path) -> bool:
    """Whether a directory is itself a package, rather than one that holds its module."""
    return (path / "__init__.py").is_file() and not module_file(path, module_name(path.name))


def site_packages(place: Path) -> Path:
    """The directory of a virtual environment in which packages are installed. Raises RunError if
    there is none."""
    found = next(place.glob("lib/python3*/site-packages"), None)
    if found is None:
        raise RunError(
            f"{place} has no lib/python3*/site-packages: it is not a virtual environment"
        )
    return found


def outside(place: Path) -> list[Path]:
    """The directories outside that a virtual environment refers to: those on its import path,
    and editable packages."""
    found = [path.resolve() for path in site_packages(place).iterdir() if path.is_symlink()]
    for file in site_packages(place).glob("*.pth"):
        lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
        found += [Path(line) for line in lines if line.startswith("/")]
    return found + [Path(line[3:]) for line in packages(place) if line.startswith("-e ")]


def packages(place: Path) -> list[str]:
    """The installed packages as sorted requirements: `name==version`, `name @ address`, `-e
    folder`."""
    return sorted(
        map(requirement, importlib.metadata.distributions(path=[str(site_packages(place))])),
        key=str.lower,
    )


def at_addresses(place: Path) -> set[str]:
    """The packages that were installed from the address of a repository, a folder or a file,
    whose content may change."""
    return {line.partition(" @ ")[0] for line in packages(place) if " @ " in line}


def direct_url(found: importlib.metadata.Distribution) -> dict[str, Any]:
    """The origin (PEP 610) of a package that does not come from an index; empty for others."""
    return json.loads(found.read_text("direct_url.json") or "{}")


def requirement(found: importlib.metadata.Distribution) -> str:
    """An installed package as an equivalent requirement; a repository is pinned to its commit."""
    direct = direct_url(found)
    if not direct:
        return f"{found.name}=={found.version}"
    url, repository = direct["url"], direct.get("vcs_info")
    if direct.get("dir_info", {}).get("editable"):
        return "-e " + url2pathname(url.removeprefix("file://"))
    if repository:
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    return f"{found.name} @ {url}" + (
        f"#subdirectory={direct['subdirectory']}" if "subdirectory" in direct else ""
    )


def contents(place: Path, own: str = "") -> dict[str, str]:
    """Digests of packages by name: of those whose requirement does not pin their content
    (folders and files at an address), and of the package `own`, since another index may have a
    different package of the same name and version."""
    found = {}
    for one in importlib.metadata.distributions(path=[str(site_packages(place))]):
        direct = direct_url(one)
        editable, is_own = (
            direct.get("dir_info", {}).get("editable"),
            bool(own) and canonicalize_name(one.name) == canonicalize_name(own),
        )
        if (is_own or (direct and "vcs_info" not in direct)) and not editable:
            hashed = hashlib.blake2b(digest_size=8)
            files = [
                file
                for file in one.files or []
                if "__pycache__" not in file.parts and ".dist-info" not in file.parts[0]
            ]
            for file in sorted(map(str, files)):
                hashed.update(f"{file}\n".encode() + (site_packages(place) / file).read_bytes())
            found[one.name] = hashed.hexdigest()
    return found


def tampered(place: Path) -> str:
    """A sentence on the files that were written to since they were unpacked and differ from the
    records of their packages; empty if there are none. Homes link to files in uv's cache, so
    whatever an environment writes into one of its packages also ends up in later installations
    from that cache."""
    found, site = [], site_packages(place)
    for one in importlib.metadata.distributions(path=[str(site)]):
        files = [
            file
            for file in one.files or []
            if file.hash and file.hash.mode == "sha256" and file.parts[0] != ".."
        ]
        written = {file: (site / file).stat().st_mtime for file in files if (site / file).is_file()}
        unpacked = max(
            (time for file, time in written.items() if file.name == "METADATA"), default=0.0
        )
        # all others are as they were unpacked
        younger = [file for file, time in written.items() if time > unpacked]
        found += [
            (one.name, str(file))
            for file in younger
            if file.hash and sha256(site / file) != file.hash.value
        ]
    if not found:
        return ""
    which = f"{found[0][1]} of {found[0][0]}" + (
        f", and {len(found) - 1} more," if len(found) > 1 else ""
    )
    remedy = (
        f"`uv cache clean {' '.join(sorted({name for name, _ in found}))}`, `rl env remove` of "
        "this home, then again"
    )
    return f"{which} differs from its package's record: something wrote into uv's cache; {remedy}"


def sha256(path: Path) -> str:
    """The digest of a file as records of packages have it."""
    return (
        base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    )


def asked_of(place: Path, package: str) -> dict[str, SpecifierSet]:
    """The versions of a package that the others in a virtual environment ask for, by the names
    of those."""
    found = {}
    for one in importlib.metadata.distributions(path=[str(site_packages(place))]):
        for wanted in map(Requirement, one.requires or []):
            if canonicalize_name(wanted.name) == package and (
                not wanted.marker or wanted.marker.evaluate({"extra": ""})
            ):
                found[one.name] = wanted.specifier
    return found


def unmet(place: Path) -> str:
    """A clause naming the packages that ask for another version of verifiers than is installed;
    empty if none does."""
    version = version_of(place, "verifiers")
    others = [
        f"{name} asks for verifiers{wanted}"
        for name, wanted in asked_of(place, "verifiers").items()
        if version not in wanted
    ]
    return f"{', '.join(others)} and got {version}, the nearest supported version" if others else ""


def version_of(place: Path, package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    found = next(
        iter(importlib.metadata.distributions(name=package, path=[str(site_packages(place))])), None
    )
    return found.version if found else ""


def interpreter_fact(place: Path, name: str) -> str:
    """What pyvenv.cfg says of a virtual environment's interpreter: its `version_info`, or the
    `home` of the one below it; else empty."""
    lines = (line.partition("=") for line in (place / "pyvenv.cfg").read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")
