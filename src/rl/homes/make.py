"""Finds the existing home that satisfies an environment's request, or makes one."""

import contextlib
import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rl.config.environment_id import homes_root, read_id, unversioned
from rl.homes import hub
from rl.homes.build import (
    Plan,
    asked_of,
    at_addresses,
    built,
    contents,
    install,
    interpreter_fact,
    packages,
    site_packages,
    tampered,
    unmet,
    version_of,
)
from rl.homes.entry import NEITHER, api_of, find_module, project_name
from rl.homes.home import (
    FILE,
    NAMES,
    Home,
    Pointer,
    clean,
    delete,
    digest,
    read,
    read_pointer,
    users,
    write_pointer,
)
from rl.homes.needs import NO_CLASSIC, VERIFIERS, Api
from rl.homes.probe import lacking, probe
from rl.homes.records import Record, difference
from rl.homes.request import FORMAT, Request, plan_of
from rl.homes.uv import PROGRESS_S, Say, UvError, run_uv
from rl.run_dir.files import make_directory, move
from rl.run_dir.lease import NO_LOCKS
from rl.system.errors import RunError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that mean the folder of all homes, whichever file they name."""
DEADLINE_S = 1800.0
"""Limit for making one home, and for waiting until another process has made it."""
POLL_S = 0.2
TRIES = 4
"""The first attempt, and one each with another Python, with an older verifiers, and with
packages at addresses fetched again."""


def ensure(
    request: Request, say: Say, *, recorded: Home | None = None, fresh: bool = False
) -> Home:
    """The home for a request: the recorded one if given, else the newest that was made for it, else
    one that is made now.

    fresh: looks for newer packages; keeps the existing home if the index does not answer. Raises
    RunError with the remedy.
    """
    what = f"environment {request.label}"
    if recorded and (home := usable(recorded.digest, recorded.id, what, say, recorded.packages)):
        return home
    there = read_pointer(request.pointer)
    if there and not fresh and not recorded and (home := usable(there.home, request.id, what, say)):
        return home
    deadline = time.monotonic() + DEADLINE_S
    with building(request, what, say, deadline):
        if recorded:
            return usable(recorded.digest, recorded.id, what, say, recorded.packages) or again(
                request, recorded, say, deadline
            )
        now = read_pointer(request.pointer)
        if now and now != there and (home := usable(now.home, request.id, what, say)):
            return home  # another process has made it meanwhile
        try:
            home = make(request, say, deadline, fresh=fresh)
        except (hub.HubLostError, UvError) as error:
            lost = isinstance(error, hub.HubLostError) or error.offline
            if not (lost and there and (home := usable(there.home, request.id, what, say))):
                raise
            say(
                f"{error}\n{what}: using the home made on "
                f"{time.strftime('%Y-%m-%d', time.localtime(there.made))} ({home.place})"
            )
            return home
        write_pointer(request.pointer, Pointer(id=request.id, home=home.digest, made=time.time()))
    return home


def usable(name: str, id: str, what: str, say: Say, wanted: list[str] | None = None) -> Home | None:
    """The home of this name if it is whole, was made for the package that `id` means, and has
    the packages that are `wanted` (a record may have been edited); else None. Damage is
    reported; the home that takes its place deletes it."""
    home, damage = read(name)
    if home and (wanted not in (None, home.packages) or unversioned(home.id) != unversioned(id)):
        return None
    if damage:
        say(f"{what}: its home is damaged: {damage}; making it again")
    return home


@contextlib.contextmanager
def building(request: Request, what: str, say: Say, deadline: float) -> Iterator[None]:
    """Holds the lock of a request, so that only one of several processes makes the same home.
    Raises RunError at the deadline, and if the disk is full or cannot be written."""
    path, fd = homes_root() / "locks" / f"{request.name}-{request.key}.lock", -1
    held = False
    try:
        make_directory(path.parent)
        fd, told = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), 0.0
        while not taken(fd):
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() >= deadline:
                raise RunError(
                    f"{what}: process {owner} has been making its home for {DEADLINE_S:.0f} "
                    f"s (lock: {path}); see what it does, or end it"
                )
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                say(f"{what}: waiting for process {owner}, which is making its home")
            time.sleep(POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        clean()
        held = True
        yield
    except OSError as error:
        concerns_homes = (
            not held
            or error.errno in FULL
            or Path(str(error.filename)).is_relative_to(homes_root())
        )
        if not concerns_homes:  # a source folder, a file of uv, the network
            raise RunError(f"{what}: {error}") from error
        needed = (
            "on a local disk, since this one has no locks"
            if error.errno in NO_LOCKS
            else "that can be written, or free some space"
        )
        problem = f"{what}: {error.filename or homes_root()}: {error.strerror or error}"
        raise RunError(f"{problem}; set RL_ENVIRONMENTS to a folder {needed}") from None
    finally:
        if fd >= 0:
            os.close(fd)


def taken(fd: int) -> bool:
    """Takes the lock of an open file if it is free; returns whether it did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make(request: Request, say: Say, deadline: float, *, fresh: bool) -> Home:
    """Makes a home from what the package index and the Hub have now. If the package needs
    another Python or an older verifiers than was tried first, makes it again with that; the
    message names the reason. Raises UvError, HubLostError, RunError."""
    what, began, log = f"environment {request.label}", time.monotonic(), request.log
    plan, origin = plan_of(request, homes_root() / "sources" / f"{request.name}-{request.key}", say)
    plan = replace(plan, fresh=(request.own_package,) if fresh and request.own_package else ())
    if request.python:
        plan = replace(plan, python=other_python(request.python, log, what, say, deadline))
    say(f"{what}: {origin}: making its home in {homes_root()}")
    older = ""
    for _ in range(TRIES):
        try:
            with built(plan, log, say, deadline) as place:
                if plan.own:  # its source shows what it is before its dependencies are fetched
                    install(replace(plan, requirements=(), exact=True), place, log, say, deadline)
                    look(request, place)
                fill(
                    plan,
                    VERIFIERS["classic" if older else look(request, place).api],
                    place,
                    log,
                    say,
                    deadline,
                )
                found = look(request, place)
                if reason := needs_older(found, place):
                    older = reason
                elif fresh and (named := at_addresses(place).difference(plan.fresh)):
                    # their content may have come from uv's cache
                    plan = replace(plan, fresh=(*plan.fresh, *sorted(named)))
                else:
                    doubtful, home = tampered(place), described(request, found, place, older)
                    home = keep(place, home, plan, request.own_package, fresh)
                    say(
                        f"{what}: {summary(home)}; made in {time.monotonic() - began:.0f} s "
                        f"({home.place})"
                    )
                    if doubtful:
                        say(f"warning: {what}: {doubtful}")
                    return home
        except UvError as error:
            other = (
                other_python(error.python, log, what, say, deadline)
                if error.python and not plan.python
                else ""
            )
            if not other:
                raise
            plan = replace(plan, python=other)
    raise RunError(f"{what}: no version of verifiers works for it: {older}; see {log}")


def fill(plan: Plan, verifiers: str, place: Path, log: Path, say: Say, deadline: float) -> None:
    """Installs the plan and this version of verifiers; if that conflicts with what packages ask
    for, this version wins. Raises UvError."""
    try:
        install(plan, place, log, say, deadline, verifiers)
    except UvError as error:
        if "No solution found" not in error.output or "verifiers" not in error.output:
            raise
        install(plan, place, log, say, deadline, verifiers, force=True)


def other_python(versions: str, log: Path, what: str, say: Say, deadline: float) -> str:
    """The path of a Python of the required versions; empty if this one suits. Raises RunError if
    uv finds none."""
    if platform.python_version() in SpecifierSet(versions):
        return ""
    try:
        arguments = [
            "python",
            "find",
            "--no-python-downloads",
            "--no-project",
            "--system",
            versions,
        ]
        found = run_uv(arguments, homes_root(), log, what, say, deadline).strip().splitlines()[-1]
    except UvError:
        asks = (
            f"its packages want Python {versions}, this is {platform.python_version()}, and uv "
            "finds no other that matches"
        )
        raise RunError(
            f"{what}: {asks}; install one with `uv python install VERSION`, or put one on the PATH"
        ) from None
    say(f"{what}: its packages want Python {versions}: {found}")
    return found


@dataclass(frozen=True)
class Found:
    """The environment that was found in a package."""

    module: str
    file: Path | None
    api: Api


def look(request: Request, place: Path) -> Found:
    """The environment in an installed package, by its source text. Raises RunError if there is
    none."""
    source = request.source
    if source is None or not request.has_package:
        return Found("", None, request.known_api or "classic")
    module, file = find_module(source, place)
    found = probe(file)
    if request.own_package and not (found.api or found.hides or request.api):
        remedy = 'check the name; if it is one nevertheless, set kind = "classic" or "v1"'
        raise RunError(
            f"environment {source.text}: its package is not an environment: {module} has "
            f"{NEITHER}; {remedy}"
        )
    return Found(module, file, api_of(source.text, found, request.api))


def needs_older(found: Found, place: Path) -> str:
    """A clause on why a package needs a verifiers with the classic API in place of the installed
    one; empty if it does not."""
    version = version_of(place, "verifiers")
    if version in SpecifierSet(VERIFIERS["classic"].removeprefix("verifiers")):
        return ""
    if found.api == "classic":
        return f"{version} has no classic API"
    if any(
        version not in wanted and asks_older(wanted)
        for wanted in asked_of(place, "verifiers").values()
    ):
        return f"{version} is newer than its packages ask for"
    missing = lacking(probe(found.file), site_packages(place) / "verifiers") if found.file else []
    return f"{version} lacks {', '.join(missing)}" if missing else ""


def asks_older(wanted: SpecifierSet) -> bool:
    """Whether a package asks for a verifiers with the classic API, or for one from before those
    that are supported."""
    highest = [
        one.version.removesuffix(".*") for one in wanted if one.operator in ("<", "<=", "==", "~=")
    ]
    return any(Version(version) <= Version(NO_CLASSIC) for version in highest)


def described(request: Request, found: Found, place: Path, older: str) -> Home:
    """The Home of a virtual environment, without the fields that `keep` reads from its place.
    Raises RunError if verifiers does not include the environment."""
    source, verifiers, version = request.source, version_of(place, "verifiers"), ""
    if source and source.kind == "bundled":
        kinds = [
            site_packages(place) / "verifiers" / "v1" / kind / source.name
            for kind in ("tasksets", "envs")
        ]
        if not any(folder.is_dir() for folder in kinds):
            raise RunError(
                f"environment {request.label}: verifiers {verifiers} does not include {source.name}"
            )
    elif source and request.has_package:
        version = version_of(
            place,
            (project_name(source.path) if source.kind == "folder" and source.path else "")
            or source.name,
        )
    asked = asked_of(place, "verifiers")
    could_be_newer = found.api == "classic" and any(NO_CLASSIC in one for one in asked.values())
    why = unmet(place) or older or (f"{NO_CLASSIC} has no classic API" if could_be_newer else "")
    text = f"{found.api}, verifiers {verifiers}" + (f" ({why})" if why else "")
    return Home(
        digest="",
        id=request.id,
        module=found.module,
        api=found.api,
        version=version,
        why=text,
        python="",
        packages=[],
    )


def keep(place: Path, described: Home, plan: Plan, own: str = "", fresh: bool = False) -> Home:
    """Moves a virtual environment to its final place, named after its exact content, unless that
    exists already. `own`: see contents. `fresh`: replaces an existing one that lacks files.
    Raises RunError if that is in use."""
    version, path = interpreter_fact(place, "version_info"), str(plan.path or "")
    home = msgspec.structs.replace(
        described, python=version, packages=packages(place), index=plan.index, path=path
    )
    held = filter(None, (contents(place, own), plan.index))
    name = digest(
        FORMAT, home.packages, home.python, home.path, home.module, home.api, home.version, *held
    )
    home = msgspec.structs.replace(home, digest=name)
    there = homes_root() / name
    if read(name)[0] is None or (fresh and not has_all(there, place)):
        if there.exists() and (processes := users(name)):
            raise RunError(
                f"{plan.what}: its home {home.place} lacks files, and processes {processes} "
                "run in it; end them"
            )
        delete(name)
        (place / NAMES).write_text("\n".join(os.listdir(site_packages(place))))
        (place / FILE).write_bytes(msgspec.json.encode(home) + b"\n")
        try:
            move(place, there)
        except OSError:  # another request has made the same home at the same moment
            if read(name)[0] is None:
                raise
    return home


def has_all(home: Path, made: Path) -> bool:
    """Whether a home has every package file of one just made, with the same size; uv's own notes
    about them may differ."""
    old, new = site_packages(home), site_packages(made)
    files = (
        file for file in new.rglob("*.*") if file.parent.suffix != ".dist-info" and file.is_file()
    )
    return all(
        (there := old / file.relative_to(new)).is_file()
        and there.stat().st_size == file.stat().st_size
        for file in files
    )


def again(request: Request, recorded: Home, say: Say, deadline: float) -> Home:
    """Makes a home with exactly the packages of a recorded one. Raises RunError."""
    what = f"environment {request.label}"
    folders = tuple(Path(line[3:]) for line in recorded.packages if line.startswith("-e "))
    exact = tuple(line for line in recorded.packages if not line.startswith("-e "))
    package = request.source.name if request.source else ""
    path = Path(recorded.path) if recorded.path else None
    plan = Plan(
        what, exact, package=package, index=recorded.index, folders=folders, path=path, exact=True
    )
    if recorded.python != platform.python_version():
        plan = replace(
            plan, python=other_python(f"=={recorded.python}", request.log, what, say, deadline)
        )
    say(f"{what}: making its home as it was recorded ({recorded.why})")
    with built(plan, request.log, say, deadline) as place:
        install(plan, place, request.log, say, deadline)
        if doubtful := tampered(place):
            say(f"warning: {what}: {doubtful}")
        home = keep(place, recorded, plan, request.own_package)
    if recorded.digest != home.digest:
        changes = difference(recorded.packages, home.packages)
        if held := ", ".join(sorted(contents(home.place, request.own_package))):
            changes = changes or f"the content of {held}"
        if changes:
            say(f"warning: {what} cannot be made exactly as it was recorded: {changes}")
    return home


def install_record(record: Record, say: Say) -> Home:
    """The home of a record; from now on it is also the home of the id that it was made for.
    Raises RunError."""
    id = record.home.id
    request = Request(id, None if id in VERIFIERS else read_id(id))
    home = ensure(request, say, recorded=record.home)
    write_pointer(
        request.pointer.with_name(f"{request.name}-{record.key}.json"),
        Pointer(id=id, home=home.digest, made=time.time()),
    )
    return home


def summary(home: Home) -> str:
    """A home in one line."""
    version = f" {home.version}" if home.version and home.version not in home.id else ""
    return f"{home.id}{version}: {home.why}, Python {home.python}"
