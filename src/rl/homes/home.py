"""A home: a virtual environment in the cache with its description, and its record in a run.

<root>/NAME-DIGEST/            a virtual environment, named after what is installed in it
<root>/NAME-DIGEST/home.txt    its record
<root>/requests/NAME-KEY/      home, a link to the newest that was made for a request; lock, held
                               while it is made; log, uv's output; a private package's source
<run>/environments/NAME.txt    the Home of a run's environment: requirements below a header
"""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from urllib.request import url2pathname

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl.config.environment_id import homes_root, module_name, short_name, unversioned
from rl.homes.needs import Api
from rl.run_dir.files import temporary_name
from rl.system.errors import RunError

HUB_VARIABLE = "RL_ENVIRONMENTS_HUB"
HUB = "https://api.primeintellect.ai/api/v1/environmentshub"
FILE = "home.txt"
LINE = re.compile(r"^# (\w+) = (.*)", re.MULTILINE)


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a virtual environment, and what it was made for."""

    id: str
    """The environment id in normalized form; `classic` or `v1` where only verifiers is needed."""
    module: str
    """The module that is the environment; empty if the home was not made for a package."""
    api: Api
    version: str
    """Version of the environment's package; empty without one."""
    why: str
    """Which verifiers it has, and why."""
    python: str = ""
    """Version of its interpreter."""
    packages: list[str] = []
    """All installed packages, as `uv pip freeze` prints them."""
    index: str = ""
    """Address of the index that has the environment's package; empty: the usual one."""
    path: str = ""
    """Directory on the import path; empty: none."""
    key: str = ""
    """Of the request that it was made for."""
    code: str = ""
    """In a record: digest of the environment's source files, if they are in the user's folders."""

    @property
    def place(self) -> Path:
        content = digest(self.id, self.api, self.python, self.index, self.packages)
        return homes_root() / f"{name_of(self.id)}-{content}"

    @property
    def interpreter(self) -> Path:
        return self.place / "bin" / "python"

    @property
    def from_owner(self) -> list[str]:
        """The requirement of the environment's package if it comes from its owner's index."""
        start = unversioned(self.id).rpartition("/")[2] + "=="
        return [line for line in self.packages if self.index and line.startswith(start)]

    @property
    def summary(self) -> str:
        """The home in one line."""
        version = f" {self.version}" if self.version and self.version not in self.id else ""
        return f"{self.id}{version}: {self.why}, Python {self.python}"


def hub_url() -> str:
    return os.environ.get(HUB_VARIABLE, "").strip("/ ") or HUB


def name_of(env_id: str) -> str:
    """The name of an environment in the names of files."""
    return module_name(short_name(env_id)).lower()


def link_of(env_id: str, key: str) -> Path:
    """The link to the newest home that was made for a request."""
    return homes_root() / "requests" / f"{name_of(env_id)}-{key}" / "home"


def digest(*values: object) -> str:
    """A short name for some values: equal for equal values, in any process."""
    return hashlib.blake2b(msgspec.json.encode(values), digest_size=8).hexdigest()


# Homes in the cache ---------------------------------------------------------------------------


def read(place: Path) -> Home | None:
    """The home at a place or link; None if it does not exist or is damaged."""
    home = read_record(place / FILE)
    return home if home and (place / "bin" / "python").exists() else None


def delete(place: Path) -> None:
    """Deletes a home; it loses its name first, so a half-deleted one is never found. Raises
    RunError if a process of this machine runs in it."""
    if pids := users(place):
        raise RunError(f"{place}: in use by processes {pids}; end them first")
    doomed = temporary_name(place)
    if place.exists():
        place.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def users(place: Path) -> str:
    """The processes of this machine that run in a home, for messages; empty if there are none."""
    import psutil  # workers, whose homes lack it, import this module

    return ", ".join(
        str(process.pid)
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [""])[0].startswith(f"{place}/")
    )


# Virtual environments -------------------------------------------------------------------------


def home_of(python: str) -> Path | None:
    """The place of the home that an interpreter is in; None if it is in none."""
    root, path = homes_root(), Path(python)
    return root / path.relative_to(root).parts[0] if root in path.parents else None


def is_of_package(python: str) -> bool:
    """Whether an interpreter belongs to a home that was made for a package rather than for a
    module of the current directory."""
    path = home_of(python)
    return bool(path and (home := read(path)) and home.module)


def site_packages(place: Path) -> Path:
    """The directory in which a virtual environment has its packages. Raises RunError if there is
    none."""
    for site in place.glob("lib/python3*/site-packages"):
        return site
    raise RunError(f"{place} has no lib/python3*/site-packages: it is not a virtual environment")


def version_of(place: Path, package: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    path = [str(site_packages(place))]
    packages = importlib.metadata.distributions(path=path, name=package)
    return next((package.version for package in packages), "")


def unmet_in(place: Path) -> dict[str, SpecifierSet]:
    """The versions of verifiers that packages ask for and did not get, by their names."""
    version = version_of(place, "verifiers")
    return {
        package.name: needed.specifier
        for package in importlib.metadata.distributions(path=[str(site_packages(place))])
        for needed in map(Requirement, package.requires or [])
        if canonicalize_name(needed.name) == "verifiers"
        and version not in needed.specifier
        and (not needed.marker or needed.marker.evaluate({"extra": ""}))
    }


def unmet(place: Path) -> str:
    """A clause naming the packages that ask for another version of verifiers than is installed;
    empty if none does."""
    asked = [f"{name} asks for verifiers{versions}" for name, versions in unmet_in(place).items()]
    got = f"and got {version_of(place, 'verifiers')}, the nearest supported version"
    return f"{', '.join(asked)} {got}" if asked else ""


def outside(place: Path) -> list[Path]:
    """The directories outside that a virtual environment refers to: those on its import path, and
    editable packages."""
    site = site_packages(place)
    paths = "\n".join(file.read_text(errors="replace") for file in site.glob("*.pth"))
    origins = [json.loads(file.read_text()) for file in site.glob("*.dist-info/direct_url.json")]
    return [
        *(path.resolve() for path in site.iterdir() if path.is_symlink()),
        *map(Path, re.findall(r"^\s*(/.*?)\s*$", paths, re.MULTILINE)),
        *(
            Path(url2pathname(origin["url"].removeprefix("file://")))
            for origin in origins
            if origin.get("dir_info", {}).get("editable")
        ),
    ]


def interpreter_fact(place: Path, name: str) -> str:
    """What pyvenv.cfg says of a virtual environment's interpreter: its `version_info`, or the
    `home` of the one below it; else empty."""
    text = (place / "pyvenv.cfg").read_text()
    return next(iter(re.findall(rf"^{name} *= *(.*?) *$", text, re.MULTILINE)), "")


# Records of runs ------------------------------------------------------------------------------


def text_of(name: str, home: Home) -> str:
    """The record of a home: comments with the other fields, then requirements that uv and pip can
    read."""
    lines = [f"# Environment {name} was played with these packages."]
    for field in Home.__struct_fields__:
        if field != "packages":
            lines.append(f"# {field} = {getattr(home, field)}")
    for line in home.from_owner:
        lines += [
            "# uv and pip would look elsewhere for the next one:",
            "# `rl env install` of this file installs it, too.",
            f"# own = {line}",
        ]
    lines += [line for line in home.packages if line not in home.from_owner]
    return "\n".join(lines) + "\n"


def read_record(path: Path) -> Home | None:
    """The record in a file; None if there is none, if `rl` did not write it, or if it contains
    several."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    fields = LINE.findall(text)
    head = dict(fields)
    # Earlier versions of rl wrote folders in another way than `uv pip freeze`.
    lines = [*text.replace("\n-e /", "\n-e file:///").splitlines(), head.get("own", "")]
    packages = [line for line in lines if line and line[0] != "#"]
    try:
        home = msgspec.convert(head | {"packages": sorted(packages, key=str.lower)}, Home)
    except msgspec.ValidationError:
        return None
    return home if len(head) == len(fields) else None


def read_records(folder: Path) -> dict[str, Home]:
    """The records in a folder, by environment name."""
    files = sorted(folder.glob("*.txt"))
    return {file.stem: record for file in files if (record := read_record(file))}


def difference(old: list[str], new: list[str]) -> str:
    """The differences between two lists of packages; empty if there are none."""
    gone, added = sorted({*old} - {*new}), sorted({*new} - {*old})
    return f"{', '.join(gone) or 'none'} -> {', '.join(added) or 'none'}" * bool(gone or added)
