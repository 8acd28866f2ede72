"""Decides which of this machine's files a sandboxed worker sees: those its settings name, its
interpreter and its packages, and nothing else in the directories that contain them."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rl.config.environment_id import module_file, module_name
from rl.homes.home import interpreter_fact, is_of_package, outside
from rl.system.errors import RunError
from rl.system.sandbox import OWN, SYSTEM
from rl.wire.worker_messages import EnvSpec


def named_files(env: EnvSpec, python: str, read: Collection[str], run_dir: Path) -> set[Path]:
    """Returns the absolute paths that an environment's settings name: its module or folder, its
    rows, its reward, and `read`.

    Raises RunError for paths that do not exist, and for paths that no sandbox shows.
    """
    rows = [text for text in (env.dataset, env.eval_dataset) if text and straight(text).exists()]
    for text in (*rows, *read):
        path = straight(text)
        real, run = path.resolve(), run_dir.resolve()
        if not path.exists():
            raise RunError(
                f"read names {text!r}, but {path} does not exist: correct it, or leave it out"
            )
        if str(real) in OWN or any(
            real.is_relative_to(one) for one in ("/proc", "/sys", "/dev", run)
        ):
            what = (
                "a part of the run directory, which is always hidden"
                if real.is_relative_to(run)
                else "its own: name files in it"
            )
            raise RunError(f"{text!r} cannot be shown in a sandbox, in which {path} is {what}")
    return {straight(text) for text in (*rows, *read)} | set(modules(env, python))


def straight(text: str | Path) -> Path:
    """Returns an absolute path without `~` and `..`, and with a single leading slash."""
    return Path("/", os.path.abspath(os.path.expanduser(text)).lstrip("/"))


def modules(env: EnvSpec, python: str) -> Iterator[Path]:
    """Yields the environment's own folder, or the file or package folder of its module, and
    those of its reward function. If the home is a package's, the environment's module is not
    looked for in the working directory."""
    if env.id and env.id.startswith((".", "/", "~")):
        yield straight(env.id)
    elif (
        env.id
        and not is_of_package(python)
        and (file := module_file(Path.cwd(), module_name(env.id)))
    ):
        yield whole(file)
    source = env.reward.rpartition(":")[0] if env.reward else ""
    if source.endswith(".py"):
        yield straight(source)
    elif source and (file := module_file(Path.cwd(), source.partition(".")[0])):
        yield whole(file)


def whole(file: Path) -> Path:
    """Returns a module's file, or for a package its folder."""
    return file.parent if file.name == "__init__.py" else file


# Interpreters -------------------------------------------------------------------------------------


def interpreter_places(python: Path) -> tuple[set[Path], dict[Path, Path]]:
    """Returns the directories of an interpreter (its virtual environment, its base installation,
    packages elsewhere), and a map from the links outside of these by which it is started to
    their targets. Raises RunError if one of them contains the home directory."""
    python = straight(python)
    place, started = python.parent.parent, [python]
    found, packages = set[Path](), set[Path]()
    if (place / "pyvenv.cfg").is_file():
        base, found = interpreter_fact(place, "home"), {place}
        started += [one for one in [Path(base, python.resolve().name)] if base and one.exists()]
        if base and Path(base).resolve().parent in {one.resolve().parent.parent for one in started}:
            found.add(Path(base).parent)  # the same directory by another name
        packages = set(outside(place))
    found |= {one.resolve().parent.parent for one in started}
    for one in found - {Path("/")}:
        if Path.home().resolve().is_relative_to(one.resolve()) and not is_system(one):
            remedy = "use one that has a directory of its own, such as a virtual environment"
            raise RunError(
                f"the interpreter {python} belongs to {one}, all of which would be visible "
                f"in its sandbox; {remedy}"
            )
    found |= packages
    links = {
        link: one.resolve()
        for one in started
        for link in hops(one)
        if link != one.resolve() and not is_system(link)
    }
    return found, {
        link: real
        for link, real in links.items()
        if not any(link.is_relative_to(one) for one in found - {Path("/")})
    }


def is_system(path: Path) -> bool:
    return any(path.is_relative_to(one) for one in SYSTEM)


def hops(path: Path) -> Iterator[Path]:
    """Yields a path and, as long as it is a link, its target."""
    for _ in range(40):  # the kernel's limit
        yield path
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent.resolve() / os.readlink(path)))


def with_targets(folder: Path) -> Iterator[Path]:
    """Yields a model's folder and the links in it: the hub's cache keeps the content elsewhere."""
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_symlink())


def followed(paths: set[Path]) -> set[Path]:
    """Returns the paths; one that is reached through a link in a visible directory is replaced
    by its target, since the link is visible."""
    found = set()
    for path in paths:
        holders = [one for one in paths if path != one and path.is_relative_to(one)]
        by_link = any(path.resolve() != one.resolve() / path.relative_to(one) for one in holders)
        outer = {hop for hop in hops(path) if not any(hop.is_relative_to(one) for one in holders)}
        found |= {path.resolve(), *outer} if by_link else {path}
    return found


# The run directory --------------------------------------------------------------------------------


def hidden_places(run_dir: Path, seen: set[Path]) -> set[Path]:
    """Returns every path at which the run directory, or the folder of all runs, would be visible in
    `seen`, through any link or mount.

    Raises RunError if that folder itself is to be seen: runs that start later will have their
    tokens there.
    """
    real = run_dir.resolve()
    found = {
        path
        for path in (run_dir.absolute(), real)
        if not any(path.is_relative_to(one) for one in seen)
    }
    found |= set(places_of(real, seen))
    runs = set(places_of(real.parent, seen))
    if runs & seen:
        remedy = "set output_dir (`rl eval`, `rl collect`: TMPDIR) to a folder that holds only runs"
        raise RunError(
            f"its sandbox would show {min(runs & seen)} with the tokens of all runs in it: {remedy}"
        )
    return {path for path in found if not any(path.is_relative_to(one) for one in runs)} | runs


def places_of(directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Yields the paths at which a directory is visible in `seen`. `directory` must not contain
    links."""
    for one in filter(Path.is_dir, seen):
        for i in range(1, len(directory.parts) + 1):
            rest = directory.parts[i:]
            inner = one.resolve().joinpath(*rest)
            if inner.is_dir() and inner.resolve() == inner and inner.samefile(directory):
                yield one.joinpath(*rest)
