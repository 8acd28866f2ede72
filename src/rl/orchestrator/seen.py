"""Which files of this machine a worker in a sandbox sees: those that its settings name, its interpreter and its packages, and of what holds
them nothing else."""

import ast
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl.config.environment_id import module_file, module_name
from rl.homes.build import outside
from rl.homes.home import is_of_package
from rl.homes.probe import files_of, nodes
from rl.system.credentials import strings
from rl.system.errors import RunError
from rl.system.sandbox import SYSTEM
from rl.wire.worker_messages import EnvSpec

HELD = ("/etc", "/run", "/tmp", "/var")
"""Directories of this machine that nothing opens as a whole."""


@dataclass(frozen=True)
class Named:
    """What the settings of an environment name."""

    shown: frozenset[Path]
    """Absolute, without `..`."""
    left_out: frozenset[str]
    """Texts that name something which is not shown, for it holds what nobody meant: `//`, `../`."""


def named_files(env: EnvSpec, python: str, run_dir: Path) -> Named:
    """The files and directories that the settings of an environment name: its module or folder, rows, its reward, paths in arguments.

    A text in the arguments may be a path and mean something else, so what it opens is bounded: nothing that holds the working directory,
    the home directory, the run directory or this machine's settings.
    """
    shown, left_out = set(modules(env, python)), set()
    texts = [text for text in (env.dataset, env.eval_dataset) if text]
    texts += [text for table in (env.args, env.set_kwargs) for _, text in strings(table) if "/" in text and "://" not in text]
    for text in texts:
        given = os.path.expanduser(text)
        if not os.path.exists(given):  # Path.exists raises for what is too long for a name
            continue
        path = straight(given)
        same = path.exists() and path.samefile(given)  # `link/..` is elsewhere, and in a sandbox nowhere
        if same and not holds_more(path, run_dir):
            shown.add(path)
        else:
            left_out.add(text)
    return Named(frozenset(shown), frozenset(left_out))


def straight(text: str | Path) -> Path:
    """An absolute path without `~` and `..`, and with one slash at its beginning."""
    return Path("/", os.path.abspath(os.path.expanduser(text)).lstrip("/"))


def holds_more(path: Path, run_dir: Path) -> bool:
    """Whether a path shows what no text in an environment's arguments is to open: devices and processes of this machine, the run directory
    or a part of it, or a directory that holds the working directory, the home directory or what is in HELD."""
    real, run = path.resolve(), run_dir.resolve()
    held = map(Path, (Path.cwd(), Path.home(), run, tempfile.gettempdir(), "/dev/shm", *HELD))
    if any(one.resolve().is_relative_to(real) for one in held):
        return True
    machine = real.is_relative_to("/dev") and not real.is_relative_to("/dev/shm")
    return machine or any(real.is_relative_to(one) for one in (run, "/proc", "/sys"))


def modules(env: EnvSpec, python: str) -> Iterator[Path]:
    """The environment's own folder, or the files of its module or of its reward function, with those beside them that they import. With a
    home of a package no module is looked for in the working directory."""
    if env.id and env.id.startswith((".", "/", "~")):
        yield straight(env.id)
    elif env.id and not is_of_package(python) and (file := module_file(Path.cwd(), module_name(env.id))):
        yield from with_neighbours(file)
    source = env.reward.rpartition(":")[0] if env.reward else ""
    if source.endswith(".py"):
        yield from with_neighbours(straight(source))
    elif source and (file := module_file(Path.cwd(), source.partition(".")[0])):
        yield from with_neighbours(file)


def with_neighbours(file: Path) -> set[Path]:
    """A module's file, or the folder of a package, and the modules beside it that it imports, as their source texts show."""
    found: set[Path] = set()
    left = [file]
    while left:
        file = left.pop()
        shown = file.parent if file.name == "__init__.py" else file
        if shown not in found:
            found.add(shown)
            names = {name for source in files_of(file) for name in imported(source)}
            left += [other for name in names if (other := module_file(shown.parent, name))]
    return found


def imported(file: Path) -> Iterator[str]:
    """The top-level modules that a file imports."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


# Interpreters -----------------------------------------------------------------------------------------------------------


def interpreter_places(python: Path) -> tuple[set[Path], dict[Path, Path]]:
    """The directories of an interpreter: its virtual environment, what that was made from, packages that lie elsewhere; and, of the links
    by which it is started and that lie in none of these, what each leads to. Raises RunError where the home directory is in one of them."""
    python = straight(python)
    place, started = python.parent.parent, [python]
    found, packages = set[Path](), set[Path]()
    if (place / "pyvenv.cfg").is_file():
        homes = list(bases(place))
        started += [home / python.resolve().name for home in homes if (home / python.resolve().name).exists()]
        prefixes = {one.resolve().parent.parent for one in started}
        found = {place, *(home.parent for home in homes if home.resolve().parent in prefixes)}  # the same directory by another name
        packages = set(outside(place))
    found |= {one.resolve().parent.parent for one in started}
    for one in found - {Path("/")}:
        if Path.home().resolve().is_relative_to(one.resolve()) and not is_system(one):
            remedy = "take one that has a directory of its own, such as a virtual environment"
            raise RunError(f"the interpreter {python} belongs to {one}, and all of that would be seen in its sandbox; {remedy}")
    found |= packages
    links = {link: one.resolve() for one in started for link in hops(one) if link != one.resolve() and not is_system(link)}
    return found, {link: real for link, real in links.items() if not any(link.is_relative_to(one) for one in found - {Path("/")})}


def bases(place: Path) -> Iterator[Path]:
    """The directory of the interpreter that a virtual environment was made from, as its pyvenv.cfg says."""
    lines = (line.partition("=") for line in (place / "pyvenv.cfg").read_text().splitlines())
    yield from (Path(value.strip()) for key, _, value in lines if key.strip() == "home")


def is_system(path: Path) -> bool:
    return any(path.is_relative_to(one) for one in SYSTEM)


def hops(path: Path) -> Iterator[Path]:
    """A path and, while it is a link, what it leads to."""
    for _ in range(40):  # as the kernel bounds it
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))


def with_targets(folder: Path) -> Iterator[Path]:
    """A model's folder, and what its links lead to: a hub's cache keeps the content elsewhere."""
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_symlink())


def followed(paths: set[Path]) -> set[Path]:
    """The paths, with what it leads to in place of each that is reached by a link in a directory which is seen: the link is there."""
    found = set()
    for path in paths:
        holders = [one for one in paths if path != one and path.is_relative_to(one)]
        by_link = any(path.resolve() != one.resolve() / path.relative_to(one) for one in holders)
        outer = {hop for hop in hops(path) if not any(hop.is_relative_to(one) for one in holders)}
        found |= {path.resolve(), *outer} if by_link else {path}
    return found


# The run directory ------------------------------------------------------------------------------------------------------


def hidden_places(run_dir: Path, seen: set[Path]) -> set[Path]:
    """Every place at which the run directory, or that of a run beside it, would be found in what is seen, by whatever link or mount."""
    real = run_dir.resolve()
    found = {path for path in (run_dir.absolute(), real) if not any(path.is_relative_to(one) for one in seen)}
    found |= set(places_of(real, seen))
    others = [token.parents[1].name for token in real.parent.glob("*/status/token")]
    return found | {place / name for place in places_of(real.parent, seen) for name in others}


def places_of(directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Where a directory is found in what is seen. `directory` is without links."""
    for one in filter(Path.is_dir, seen):
        for i in range(1, len(directory.parts) + 1):
            rest = directory.parts[i:]
            inner = one.resolve().joinpath(*rest)
            if inner.is_dir() and inner.resolve() == inner and inner.samefile(directory):
                yield one.joinpath(*rest)
