"""Decides which of this machine's files a sandboxed worker sees: those its settings name, its
interpreter and its packages, and nothing else in the directories that contain them."""

import os
from collections.abc import Collection, Iterable, Iterator
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
        hidden = f"{text!r} cannot be shown in a sandbox, in which {path} is"
        if real.is_relative_to(run):
            raise RunError(f"{hidden} a part of the run directory, which is always hidden")
        if str(real) in OWN or is_below(real, ("/proc", "/sys", "/dev")):
            raise RunError(f"{hidden} its own: name files in it")
    return {straight(text) for text in (*rows, *read)} | set(modules(env, python))


def is_below(path: Path, folders: Iterable[str | Path]) -> bool:
    """Whether a path is one of some folders, or in one."""
    return any(path.is_relative_to(folder) for folder in folders)


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
    home, started = python.parent.parent, [python]
    shown, packages = set[Path](), set[Path]()
    if (home / "pyvenv.cfg").is_file():
        shown, packages = {home}, set(outside(home))
        if base := interpreter_fact(home, "home"):
            folders = {python.resolve().parents[1]}
            if (real := Path(base, python.resolve().name)).exists():
                started.append(real)
                folders.add(real.resolve().parents[1])
            if Path(base).resolve().parent in folders:
                shown.add(Path(base).parent)  # the same directory by another name
    shown |= {path.resolve().parents[1] for path in started}
    for folder in shown - {Path("/")}:
        if Path.home().resolve().is_relative_to(folder.resolve()) and not is_below(folder, SYSTEM):
            raise RunError(
                f"the interpreter {python} belongs to {folder}, all of which would be visible "
                "in its sandbox; use one that has a directory of its own, such as a virtual "
                "environment"
            )
    shown |= packages
    return shown, {
        link: path.resolve()
        for path in started
        for link in hops(path)
        if link != path.resolve() and not is_below(link, {*SYSTEM, *shown} - {Path("/")})
    }


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
    shown = set()
    for path in paths:
        holders = [holder for holder in paths if path != holder and path.is_relative_to(holder)]
        if any(path.resolve() != holder.resolve() / path.relative_to(holder) for holder in holders):
            shown |= {path.resolve(), *(hop for hop in hops(path) if not is_below(hop, holders))}
        else:
            shown.add(path)
    return shown


# The run directory --------------------------------------------------------------------------------


def hidden_places(run_dir: Path, seen: set[Path]) -> set[Path]:
    """Returns every path at which the run directory, or the folder of all runs, would be visible in
    `seen`, through any link or mount.

    Raises RunError if that folder itself is to be seen: runs that start later will have their
    tokens there.
    """
    real = run_dir.resolve()
    hidden = {path for path in (run_dir.absolute(), real) if not is_below(path, seen)}
    hidden |= set(places_of(real, seen))
    runs = set(places_of(real.parent, seen))
    if runs & seen:
        raise RunError(
            f"its sandbox would show {min(runs & seen)} with the tokens of all runs in it: set "
            "output_dir (`rl eval`, `rl collect`: TMPDIR) to a folder that holds only runs"
        )
    return {path for path in hidden if not is_below(path, runs)} | runs


def places_of(directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Yields the paths at which a directory is visible in `seen`. `directory` must not contain
    links."""
    for folder in filter(Path.is_dir, seen):
        for i in range(1, len(directory.parts) + 1):
            rest = directory.parts[i:]
            inner = folder.resolve().joinpath(*rest)
            if inner.is_dir() and inner.resolve() == inner and inner.samefile(directory):
                yield folder.joinpath(*rest)
