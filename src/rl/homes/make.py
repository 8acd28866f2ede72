"""From what an environment needs to the home that holds it: one that is there, or one that is made."""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from rl.config.environment_id import Source, homes_root, module_name, module_place, read_id, unversioned
from rl.homes import hub
from rl.homes.build import Plan, at_addresses, built, contents, is_package, packages, python_version, site_packages, tampered, version_of
from rl.homes.entry import api_of, find_module, project_name
from rl.homes.home import FILE, NAMES, Home, Pointer, delete, digest, read, read_pointer, users, write_pointer
from rl.homes.needs import VERIFIERS, WORKER, Api
from rl.homes.probe import lacking, probe
from rl.homes.records import Record, difference
from rl.homes.uv import PROGRESS_S, Say, UvError, run_uv
from rl.run_dir.files import clean_leftovers, make_directory, move
from rl.system.errors import RunError

FORMAT = 1
"""Of homes: another one makes them all anew."""
ANY_VERIFIERS = "verifiers>=0.3.1"
DEADLINE_S = 1800.0
"""For making one home, and for waiting until another process has made it."""
POLL_S = 0.2
TRIES = 6
"""Another Python, an override, another verifiers, both kinds of these after each other, and packages at addresses anew."""


@dataclass(frozen=True)
class Request:
    """What an environment needs."""

    label: str
    """The environment, for messages."""
    source: Source | None
    """None: rows with a reward function."""
    api: Api | None = None
    """The API that it is to be played by; None: what the package shows."""
    requirements: tuple[str, ...] = ()
    """Beside the package's own."""
    python: str = ""
    """Versions of Python that its code wants, `>=3.12`; empty: any."""

    @property
    def has_package(self) -> bool:
        """Whether its home is made for it alone, and not for all that need verifiers and nothing else."""
        return self.source is not None and self.source.kind not in ("module", "bundled")

    @property
    def id(self) -> str:
        return self.source.text if self.source and self.has_package else self.known_api or "classic"

    @property
    def name(self) -> str:
        return module_name(self.source.name if self.source and self.has_package else self.id).lower()

    @property
    def own_package(self) -> str:
        """The distribution of an environment that comes from an index or the Hub; empty for others, which say where they lie."""
        return self.source.name if self.source and self.source.kind in ("hub", "index") else ""

    @cached_property
    def known_api(self) -> Api | None:
        """The API as far as it is known before anything is installed. Raises RunError."""
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
        """Equal for requests that the same home suits."""
        declared = declarations(self.source.path) if self.source and self.source.kind == "folder" and self.source.path else ""
        where = hub.hub_url() if self.source and self.source.kind == "hub" else ""
        needs = (sorted(self.requirements), WORKER, VERIFIERS[self.known_api or "v1"])
        return digest(FORMAT, self.id, where, self.api, declared, needs, self.python, platform.python_version())

    @property
    def pointer(self) -> Path:
        return homes_root() / "requests" / f"{self.name}-{self.key}.json"


def ensure(request: Request, say: Say, *, recorded: Home | None = None, fresh: bool = False) -> Home:
    """The home for a request: the recorded one where that is given, else the newest that was made for it, else one that is made now.

    fresh: newer packages are looked for; what is there is kept where nobody answers. Raises RunError with the remedy.
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
            return usable(recorded.digest, recorded.id, what, say, recorded.packages) or again(request, recorded, say, deadline)
        now = read_pointer(request.pointer)
        if now and now != there and (home := usable(now.home, request.id, what, say)):
            return home  # another process has made it meanwhile
        try:
            home = make(request, say, deadline, fresh=fresh)
        except (hub.HubLostError, UvError) as error:
            lost = isinstance(error, hub.HubLostError) or error.offline
            if not (lost and there and (home := usable(there.home, request.id, what, say))):
                raise
            say(f"{error}\n{what}: the home of {time.strftime('%Y-%m-%d', time.localtime(there.made))} is used ({home.place})")
            return home
        write_pointer(request.pointer, Pointer(id=request.id, home=home.digest, made=time.time()))
    return home


def usable(name: str, id: str, what: str, say: Say, wanted: list[str] | None = None) -> Home | None:
    """A home that is there and whole, was made for the package that `id` means, and has the packages that are `wanted`: a record may have
    been edited. One that is damaged is told; what takes its place deletes it."""
    home, damage = read(name)
    if home and (wanted not in (None, home.packages) or unversioned(home.id) != unversioned(id)):
        return None
    if damage:
        say(f"{what}: its home is damaged: {damage}; it is made anew")
    return home


@contextlib.contextmanager
def building(request: Request, what: str, say: Say, deadline: float) -> Iterator[None]:
    """Holds the lock of a request: of two processes that want the same home, one makes it. Raises RunError at the deadline, and where the
    disk is full or cannot be written."""
    path, fd = homes_root() / "locks" / f"{request.name}-{request.key}.lock", -1
    try:
        make_directory(path.parent)
        fd, told = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), 0.0
        while not taken(fd):
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() >= deadline:
                raise RunError(f"{what}: process {owner} makes its home for {DEADLINE_S:.0f} s (lock: {path}); see what it does, or end it")
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                say(f"{what}: waiting for process {owner}, which makes its home")
            time.sleep(POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        clean_leftovers(homes_root())
        yield
    except OSError as error:
        remedy = "make room, or have RL_ENVIRONMENTS name a folder that can be written"
        raise RunError(f"{what}: {error.filename or homes_root()}: {error.strerror or error}; {remedy}") from None
    finally:
        if fd >= 0:
            os.close(fd)


def taken(fd: int) -> bool:
    """Takes the lock of an open file, if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def make(request: Request, say: Say, deadline: float, *, fresh: bool) -> Home:
    """Makes a home from what the package index and the Hub have now. Where the package needs another Python or another verifiers than was
    tried first, it is made once more with that; the line that is said names the reason. Raises UvError, HubLostError, RunError."""
    what, began = f"environment {request.label}", time.monotonic()
    log = homes_root() / "logs" / f"{request.name}-{request.key}.log"
    api = request.known_api
    verifiers, why, forced = VERIFIERS[api] if api else ANY_VERIFIERS, "", False
    scratch = homes_root() / "sources" / f"{request.name}-{request.key}"
    plan, origin = plan_of(request, scratch, say)
    plan = replace(plan, fresh=(request.own_package,) if fresh and request.own_package else ())
    if request.python:
        plan = replace(plan, python=other_python(request.python, log, what, say, deadline))
    say(f"{what}: {origin}: making its home in {homes_root()}")
    for _ in range(TRIES):
        overrides = (verifiers,) if forced else ()
        try:
            with built(replace(plan, requirements=(*plan.requirements, verifiers), overrides=overrides), log, say, deadline) as place:
                found = look(request, place)
                reason = unfit(found, place, request)
                if not reason and fresh and (named := at_addresses(place).difference(plan.fresh)):
                    plan = replace(plan, fresh=(*plan.fresh, *sorted(named)))  # what they hold may be what uv remembers
                elif not reason:
                    doubtful = doubts(found, place, request)
                    home = keep(place, replace_why(found, why), plan, request.own_package, fresh)
                    say(f"{what}: {summary(home)}; made in {time.monotonic() - began:.0f} s ({home.place})")
                    for text in doubtful:
                        say(f"warning: {what}: {text}")
                    return home
                else:
                    verifiers, why = VERIFIERS["classic" if "lacks" in reason else found.api], why if forced else reason
        except UvError as error:
            if error.python and not plan.python and (other := other_python(error.python, log, what, say, deadline)):
                plan = replace(plan, python=other)
            elif "No solution found" in error.output and "verifiers" in error.output and not forced and plan.requirements:
                forced, why = True, "in place of the versions that it asks for, which cannot be played here"
            else:
                raise
    raise RunError(f"{what}: no version of verifiers suits it: {why}; see {log}")


def declarations(folder: Path) -> str:
    """The text of the files in a folder that say what its package needs; of a folder without one how it is put on the import path."""
    project = folder / "pyproject.toml"
    if not project.is_file():
        return "package" if place_of(folder) == folder and is_package(folder) else ""
    text = project.read_text()
    if "dynamic" in text or "[project]" not in text:
        further = [*folder.glob("setup.*"), *folder.glob("*requirements*.txt"), *folder.glob("requirements/*.txt")]
        text += "".join(f"\n{path.name}\n{path.read_text(errors='replace')}" for path in sorted(further) if path.is_file())
    return text


def place_of(folder: Path) -> Path:
    """What a folder without a pyproject.toml puts on the import path: the directory of its module, or itself, if it is a package."""
    place = module_place(folder)
    assert place
    return folder if place == folder.parent else place


def plan_of(request: Request, scratch: Path, say: Say) -> tuple[Plan, str]:
    """What is to be installed for a request, without verifiers, and where it comes from in words. Raises RunError and HubLostError."""
    what, source = f"environment {request.label}", request.source
    for text in request.requirements:
        try:
            Requirement(text)
        except InvalidRequirement as error:
            fault = str(error).splitlines()[0]
            raise RunError(f"{what}: requirements: {text!r} is none ({fault}); write name, or name>=1.0 (PEP 508)") from None
    plan = Plan(what, (*WORKER, *request.requirements))
    if source is None or source.kind == "bundled":
        return plan, "rows" if source is None else f"{source.name}, which verifiers brings"
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
        return replace(plan, requirements=(requirement, *plan.requirements)), f"{requirement} from the package index"
    make_directory(scratch)
    place = hub.find(source, scratch, say)
    plan = replace(plan, requirements=(place.requirement, *plan.requirements), package=source.name, index=place.index)
    return plan, f"{source.text} from {place.where}"


def other_python(versions: str, log: Path, what: str, say: Say, deadline: float) -> str:
    """The path of a Python that packages want, if this one does not suit them. Raises RunError when uv finds none."""
    if platform.python_version() in SpecifierSet(versions):
        return ""
    try:
        arguments = ["python", "find", "--no-python-downloads", "--no-project", "--system", versions]
        found = run_uv(arguments, homes_root(), log, what, say, deadline).strip().splitlines()[-1]
    except UvError:
        asks = f"its packages want Python {versions}, this is {platform.python_version()}, and uv finds none that suits"
        raise RunError(f"{what}: {asks}; install one (`uv python install VERSION` does), or put it on the PATH") from None
    say(f"{what}: its packages want Python {versions}: {found}")
    return found


@dataclass(frozen=True)
class Found:
    """What a virtual environment turned out to hold."""

    module: str
    file: Path | None
    api: Api
    version: str
    verifiers: str
    id: str


def look(request: Request, place: Path) -> Found:
    """What is in a virtual environment that was just made. Raises RunError where that is no environment."""
    source, verifiers = request.source, version_of(place, "verifiers")
    if source is None or not request.has_package:
        if source and source.kind == "bundled":
            kinds = [site_packages(place) / "verifiers" / "v1" / kind / source.name for kind in ("tasksets", "envs")]
            if not any(folder.is_dir() for folder in kinds):
                raise RunError(f"environment {request.label}: verifiers {verifiers} does not bring {source.name}")
        return Found("", None, request.known_api or "classic", "", verifiers, request.id)
    module, file = find_module(source, place)
    package = (project_name(source.path) if source.kind == "folder" and source.path else "") or source.name
    return Found(module, file, api_of(source.text, probe(file), request.api), version_of(place, package), verifiers, request.id)


def unfit(found: Found, place: Path, request: Request) -> str:
    """Why the installed verifiers does not suit a package, as a part of a sentence; empty if it does."""
    wanted = SpecifierSet(VERIFIERS[found.api].removeprefix("verifiers"))
    if found.verifiers not in wanted:
        has_not = "has no classic API" if found.api == "classic" else "is not known here"
        return f"for {found.verifiers}, the newest that it allows, {has_not}"
    classic = SpecifierSet(VERIFIERS["classic"].removeprefix("verifiers"))
    if found.file and found.verifiers not in classic and (missing := lacking(probe(found.file), site_packages(place) / "verifiers")):
        return f"for {found.verifiers} lacks {', '.join(missing)}"
    return ""


def doubts(found: Found, place: Path, request: Request) -> list[str]:
    """What is doubtful about a virtual environment that was made, a sentence each."""
    shows = "its package shows neither a function load_environment nor a v1 Taskset or Env in `__all__`: is it an environment?"
    unseen = request.own_package and found.file and not probe(found.file).api
    return list(filter(None, [f"{shows} Check the name; it is taken for a classic one" if unseen else "", tampered(place)]))


def replace_why(found: Found, why: str) -> Home:
    """The description of a home without what is read from its place."""
    text = f"{found.api}, verifiers {found.verifiers}" + (f" ({why})" if why else "")
    return Home(digest="", id=found.id, module=found.module, api=found.api, version=found.version, why=text, python="", packages=[])


def name_of(home: Home, *held: object) -> str:
    """The digest of a home. `held`: what its other fields do not say; that which is empty does not count."""
    return digest(FORMAT, home.packages, home.python, home.path, home.module, home.api, home.version, *filter(None, held))


def keep(place: Path, described: Home, plan: Plan, own: str = "", fresh: bool = False) -> Home:
    """Gives a virtual environment its final place, named after exactly what is in it, unless that is there already. `own`: see contents.
    `fresh`: one that is there and lacks something is replaced. Raises RunError while that is in use."""
    found = {"python": python_version(place), "packages": packages(place), "index": plan.index, "path": str(plan.path or "")}
    home = msgspec.structs.replace(described, **found)
    home = msgspec.structs.replace(home, digest=(name := name_of(home, contents(place, own), plan.index)))
    there = homes_root() / name
    if read(name)[0] is None or (fresh and not has_all(there, place)):
        if there.exists() and (pids := users(name)):
            raise RunError(f"{plan.what}: its home {home.place} lacks files, and processes {', '.join(map(str, pids))} run in it; end them")
        delete(name)
        (place / NAMES).write_text("\n".join(os.listdir(site_packages(place))))
        (place / FILE).write_bytes(msgspec.json.encode(home) + b"\n")
        try:
            move(place, there)
        except OSError:  # another request came to the same home, at the same moment
            if read(name)[0] is None:
                raise
    return home


def has_all(home: Path, made: Path) -> bool:
    """Whether a home has every file of the packages that one just made has, in the same size; what uv notes about them may differ."""
    old, new = site_packages(home), site_packages(made)
    files = (file for file in new.rglob("*.*") if file.parent.suffix != ".dist-info" and file.is_file())
    return all((there := old / file.relative_to(new)).is_file() and there.stat().st_size == file.stat().st_size for file in files)


def again(request: Request, recorded: Home, say: Say, deadline: float) -> Home:
    """Makes a home with exactly the packages of one that was recorded. Raises RunError."""
    what = f"environment {request.label}"
    log = homes_root() / "logs" / f"{request.name}-{request.key}.log"
    folders = tuple(Path(line[3:]) for line in recorded.packages if line.startswith("-e "))
    exact = tuple(line for line in recorded.packages if not line.startswith("-e "))
    package = request.source.name if request.source else ""
    path = Path(recorded.path) if recorded.path else None
    plan = Plan(what, exact, package=package, index=recorded.index, folders=folders, path=path, exact=True)
    if recorded.python != platform.python_version():
        plan = replace(plan, python=other_python(f"=={recorded.python}", log, what, say, deadline))
    say(f"{what}: making its home as it was recorded ({recorded.why})")
    with built(plan, log, say, deadline) as place:
        if doubtful := tampered(place):
            say(f"warning: {what}: {doubtful}")
        home = keep(place, recorded, plan, request.own_package)
    if recorded.digest not in (home.digest, name_of(home, contents(home.place))):  # the latter by versions before owners counted
        changes = difference(recorded.packages, home.packages)
        if held := ", ".join(sorted(contents(home.place, request.own_package))):
            changes = changes or f"the content of {held}"
        if changes:
            say(f"warning: {what} cannot be made exactly as it was recorded: {changes}")
    return home


def install_record(record: Record, say: Say) -> Home:
    """The home of a record, and from now on that of the id that it was made for. Raises RunError."""
    id = record.home.id
    request = Request(id, None if id in VERIFIERS else read_id(id))
    home = ensure(request, say, recorded=record.home)
    write_pointer(request.pointer.with_name(f"{request.name}-{record.key}.json"), Pointer(id=id, home=home.digest, made=time.time()))
    return home


def summary(home: Home) -> str:
    """A home in one line."""
    version = f" {home.version}" if home.version and home.version not in home.id else ""
    return f"{home.id}{version}: {home.why}, Python {home.python}"
