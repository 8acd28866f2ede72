"""The needs of an environment: which home suits it, and what is installed in a new one."""

import platform
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from rl.config.environment_id import Source, homes_root, module_name, module_place
from rl.homes import hub
from rl.homes.build import Plan, is_package
from rl.homes.entry import api_of, find_module
from rl.homes.home import digest
from rl.homes.needs import VERIFIERS, WORKER, Api
from rl.homes.probe import probe
from rl.homes.uv import Say
from rl.run_dir.files import make_directory
from rl.system.errors import RunError

FORMAT = 1
"""Format of homes; a new number makes all of them again."""


@dataclass(frozen=True)
class Request:
    """The needs of an environment."""

    label: str
    """The environment, for messages."""
    source: Source | None
    """None: rows with a reward function."""
    api: Api | None = None
    """The API to play it by; None: the one that the package shows."""
    requirements: tuple[str, ...] = ()
    """Requirements in addition to the package's own."""
    python: str = ""
    """Versions of Python that its code needs, such as `>=3.12`; empty: any."""

    @property
    def has_package(self) -> bool:
        """Whether its home is made for it alone, rather than shared by all that need only
        verifiers."""
        return self.source is not None and self.source.kind not in ("module", "bundled")

    @property
    def id(self) -> str:
        return self.source.text if self.source and self.has_package else self.known_api or "classic"

    @property
    def name(self) -> str:
        return module_name(
            self.source.name if self.source and self.has_package else self.id
        ).lower()

    @property
    def own_package(self) -> str:
        """The distribution of an environment that comes from an index or the Hub; empty for
        others, which have a path."""
        return self.source.name if self.source and self.source.kind in ("hub", "index") else ""

    @property
    def log(self) -> Path:
        """The file with uv's output from when its home was made."""
        return homes_root() / "logs" / f"{self.name}-{self.key}.log"

    @cached_property
    def known_api(self) -> Api | None:
        """The API if it is known before anything is installed, else None. Raises RunError."""
        if self.source is None:
            return "classic"
        if self.source.kind == "bundled":
            return "v1"
        if self.source.kind in ("folder", "module"):
            _, file = find_module(self.source, Path())
            return api_of(self.source.text, probe(file), self.api)
        return self.api

    @cached_property
    def key(self) -> str:
        """A digest that is equal for requests that can share a home."""
        declared = (
            declarations(self.source.path)
            if self.source and self.source.kind == "folder" and self.source.path
            else ""
        )
        where = hub.hub_url() if self.source and self.source.kind == "hub" else ""
        needs = (sorted(self.requirements), WORKER, VERIFIERS[self.known_api or "v1"])
        return digest(
            FORMAT,
            self.id,
            where,
            self.api,
            declared,
            needs,
            self.python,
            platform.python_version(),
        )

    @property
    def pointer(self) -> Path:
        return homes_root() / "requests" / f"{self.name}-{self.key}.json"


def declarations(folder: Path) -> str:
    """The text of the files in a folder that declare what its package needs; without such files,
    how the folder is put on the import path."""
    project = folder / "pyproject.toml"
    if not project.is_file():
        return "package" if place_of(folder) == folder and is_package(folder) else ""
    text = project.read_text()
    if "dynamic" in text or "[project]" not in text:
        further = [
            *folder.glob("setup.*"),
            *folder.glob("*requirements*.txt"),
            *folder.glob("requirements/*.txt"),
        ]
        text += "".join(
            f"\n{path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(further)
            if path.is_file()
        )
    return text


def place_of(folder: Path) -> Path:
    """The path that a folder without a pyproject.toml puts on the import path: its module's
    directory, or itself if it is a package."""
    place = module_place(folder)
    assert place
    return folder if place == folder.parent else place


def plan_of(request: Request, scratch: Path, say: Say) -> tuple[Plan, str]:
    """The plan for a request, without verifiers, and its origin in words. Raises RunError and
    HubLostError."""
    what, source = f"environment {request.label}", request.source
    for text in request.requirements:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            fault = str(error).splitlines()[0]
            raise RunError(
                f"{what}: requirements: {text!r} is not valid ({fault}); write name, or "
                "name>=1.0 (PEP 508)"
            ) from None
    plan = Plan(what, (*WORKER, *request.requirements))
    if source is None or source.kind == "bundled":
        return plan, "rows" if source is None else f"{source.name}, included in verifiers"
    assert source.path or source.kind in ("hub", "index")
    if source.kind == "module":
        return plan, f"the module {source.path}"
    if source.kind == "folder":
        assert source.path
        if (source.path / "pyproject.toml").is_file():
            return replace(plan, folders=(source.path,)), f"the folder {source.path}"
        return replace(plan, path=place_of(source.path)), f"the folder {source.path}"
    if source.kind == "index":
        requirement = source.text.partition(":")[2]
        return replace(plan, own=requirement), f"{requirement} from the package index"
    make_directory(scratch)
    place = hub.find(source, scratch, say)
    return replace(
        plan, own=place.requirement, package=source.name, index=place.index
    ), f"{source.text} from {place.where}"
