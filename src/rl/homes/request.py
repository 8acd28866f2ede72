"""What an environment needs: its package, the API of verifiers that its text shows, and the key of
the homes that suit it."""

import platform
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rl.config.environment_id import Source, module_name, module_place
from rl.homes.home import digest, hub_url, link_of, name_of, site_packages
from rl.homes.needs import NO_CLASSIC, VERIFIERS, WORKER, Api
from rl.system.errors import RunError

FORMAT = 1
"""Format of homes; a new number makes all of them again."""
APIS: dict[Api, str] = {
    "classic": "a function load_environment",
    "v1": "a v1 Taskset or Env in `__all__`",
}
NEITHER = f"neither {APIS['classic']} nor {APIS['v1']}"
NO_MODULES = ("setup", "conftest", "tests", "test", "docs")
"""Names of modules and packages that are never the environment."""
MOST_FILES = 500
"""Most files of a package that are read."""
IMPORTS = r"\bverifiers(?:\.| import .*\b){}\b"
CLASSIC = re.compile(r"(?<!\.)\bload_environment\b")
LEGACY, V1 = re.compile(IMPORTS.format("legacy")), re.compile(IMPORTS.format("v1"))
EXPORTS_CLASS = re.compile(r"^__all__\b[^=]*=[^\])]*[\"'][A-Z]", re.MULTILINE)
PROJECT_NAME = re.compile(r"^\[project\]$[^\[]*?^name\s*=\s*[\"'](.+?)[\"']", re.MULTILINE)


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
    def what(self) -> str:
        return f"environment {self.label}"

    @property
    def kind(self) -> str:
        return self.source.kind if self.source else "rows"

    @property
    def folder(self) -> Path | None:
        return self.source.path if self.source and self.kind == "folder" else None

    @property
    def package(self) -> str:
        """The distribution of an environment that comes from an index or the Hub; else empty."""
        return self.source.name if self.source and self.kind in ("hub", "index") else ""

    @property
    def has_package(self) -> bool:
        """Whether its home is made for it alone, rather than shared by all that need only
        verifiers."""
        return bool(self.package or self.folder)

    @property
    def id(self) -> str:
        alone = self.source if self.has_package else None
        return alone.text if alone else self.look(Path())[1]

    @cached_property
    def key(self) -> str:
        """A digest that is equal for requests that can share a home."""
        declared = declarations(self.folder) if self.folder else ""
        where = hub_url() if self.kind == "hub" else ""
        api = self.api or "v1" if self.package else self.look(Path())[1]
        needs = (sorted(self.requirements), WORKER, VERIFIERS[api])
        rest = (declared, needs, self.python, platform.python_version())
        return digest(FORMAT, self.id, where, self.api, *rest)

    @property
    def link(self) -> Path:
        """The link to the newest home that was made for it."""
        return link_of(self.id, self.key)

    def look(self, place: Path) -> tuple[str, Api, str]:
        """The environment as its text shows it; nothing is run: its module (empty if the home is
        not made for a package), its API, and why it needs a verifiers that still has the classic
        one (else empty). `place`: a virtual environment that has only its package, if it comes from
        an index or the Hub. Raises RunError if the package is no environment, or lacks the API that
        was asked for."""
        file = self.file(place)
        module = module_of(file) if file and self.has_package else ""
        text = "\n".join(path.read_text(errors="replace") for path in files_of(file))
        shown = apis(text)
        if self.package and not shown and not self.api:
            raise RunError(
                f"{self.what}: its package is not an environment: {module} has {NEITHER}; "
                'check the name; if it is one nevertheless, set kind = "classic" or "v1"'
            )
        if self.api and shown and self.api not in shown:
            raise RunError(
                f'{self.what}: kind = "{self.api}", but it does not have '
                f"{APIS[self.api]}; leave kind out"
            )
        # One that shows neither counts as classic: its worker reports the error.
        is_v1 = self.kind == "bundled" or "v1" in shown
        api = self.api or ("v1" if is_v1 else "classic")
        lacks = "verifiers.legacy" if LEGACY.search(text) else "classic API" * (api == "classic")
        return module, api, f"{NO_CLASSIC} has no {lacks}" if lacks else ""

    def file(self, place: Path) -> Path | None:
        """The file of the environment's module: the one that bears the name of the folder or the
        package, or the only one that shows an API. None for rows, and for what verifiers includes.
        `place`: see look. Raises RunError."""
        if not self.source or not self.has_package:
            return self.source.path if self.source else None
        root = self.folder or site_packages(place)
        # The last of several files of a module counts.
        files = [
            file
            for folder in (root / "src", root)
            for pattern in ("__init__.py", "*/__init__.py", "[!_]*.py")
            for file in folder.glob(pattern)
        ]
        modules = {module_of(file): file for file in files if module_of(file) not in NO_MODULES}
        wanted = {name_of(self.source.name), name_of(package_name(self.source))}
        named = [name for name in modules if name.lower() in wanted]
        shown = [name for name, file in modules.items() if apis(file.read_text(errors="replace"))]
        if len(named or shown) == 1:
            return modules[(named or shown)[0]]
        raise RunError(
            f"{self.what}: its package is not an environment: no module is called "
            f"{' or '.join(sorted(wanted))}, and of {', '.join(sorted(modules)) or 'none'} "
            f"{' and '.join(sorted(shown)) or 'none'} have an environment; "
            "check the name, or give one module the package's name"
        )


def declarations(folder: Path) -> str:
    """The text of the files in a folder that declare what its package needs, and whether the folder
    is itself that package."""
    patterns = ("pyproject.toml", "setup.*", "*requirements*.txt", "requirements/*.txt")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    return "\n".join(file.read_text(errors="replace") for file in files) + "package" * is_package(
        folder
    )


def is_package(folder: Path) -> bool:
    """Whether a folder is itself a package, rather than one that holds its module."""
    return module_place(folder) == folder.parent


def package_name(source: Source) -> str:
    """The name of the distribution; of a folder, as far as its pyproject.toml says it."""
    names = PROJECT_NAME.findall(declarations(source.path)) if source.path else []
    return [*names, source.name][0]


def module_of(file: Path) -> str:
    """The name of the module in a file."""
    return module_name(file.parent.name if file.name == "__init__.py" else file.stem)


def files_of(file: Path | None) -> list[Path]:
    """The source files of a module: the file itself, or all files of its package."""
    if file and file.name == "__init__.py":
        return sorted(file.parent.rglob("*.py"))[:MOST_FILES]
    return [file] if file else []


def apis(text: str) -> set[Api]:
    """The APIs that the text of a module shows; v1: it imports verifiers.v1, and `__all__` names a
    class."""
    shown: set[Api] = {"classic"} if CLASSIC.search(text) else set()
    return shown | {"v1"} if V1.search(text) and EXPORTS_CLASS.search(text) else shown
