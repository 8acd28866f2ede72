"""Finds the existing home that satisfies an environment's request, or makes one with uv.

Public packages of the Environments Hub are in their owner's package index. Private packages, and
those without an index, are fetched as source by the Hub's command `prime`, if that is installed and
logged in. This is modelled on the Hub's own clients and tested against a server with its layout,
never against the Hub itself.
"""

import contextlib
import errno
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from filelock import FileLock, Timeout
from packaging.specifiers import SpecifierSet

from rl.config.environment_id import Source, homes_root, module_name, module_place, read_id
from rl.homes import home as homes
from rl.homes.home import HUB_VARIABLE, Home, hub_url, site_packages, version_of
from rl.homes.needs import NO_CLASSIC, VERIFIERS, WORKER
from rl.homes.request import Request, is_package, package_name
from rl.homes.uv import Job, NetworkError, Say, UvError, last_lines
from rl.run_dir.access_token import hides_keys
from rl.run_dir.files import clean_leftovers, make_directory, temporary_name
from rl.run_dir.lease import NO_LOCKS
from rl.system.errors import RunError

TIMEOUT_S = 30.0
PULL_TIMEOUT_S = 300.0


class Location(NamedTuple):
    """Where an environment comes from."""

    words: str
    """For messages."""
    requirement: str = ""
    """What uv installs; empty: nothing, or a module or folder as it lies there."""
    index: str = ""
    """Address of the owner's index, which is asked only for this package; empty: the usual one."""


def find(source: Source, folder: Path, job: Job) -> Location:
    """Finds the location of a package of the Hub. `folder`: for the source of a private package.
    Raises RunError if it is not found, and NetworkError if the Hub does not answer."""
    import httpx

    address = f"{hub_url()}/{source.owner}/{source.name}/@{source.version or 'latest'}"
    hub = f"environment {source.text}: the Environments Hub"
    try:
        answer = httpx.get(address, timeout=TIMEOUT_S, follow_redirects=True)
        details = answer.json() if answer.status_code == 200 else {}
        details = details.get("data", details)
        index, wheel = map(web_address, map(details.get, ("simple_index_url", "wheel_url")))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fault = f"{address}: {error or type(error).__name__}"
        raise NetworkError(f"{hub} does not answer ({fault}); check the network") from None
    except (ValueError, AttributeError):
        raise NetworkError(
            f"environment {source.text}: the answer of {address} is not the Hub's; "
            f"is {HUB_VARIABLE} the Hub's address?"
        ) from None
    if answer.status_code >= 500:
        raise NetworkError(f"{hub} answered {answer.status_code} ({address}); try again later")
    words = f"{source.text} from the Environments Hub ({index or wheel or 'by `prime`'})"
    if index:
        pinned = f"{source.name}=={source.version}"
        return Location(words, pinned if source.version else source.name, index)
    if not wheel:
        lacks = "has no public package of it" if details else f"answered {answer.status_code}"
        wheel = pull(source, folder, f"environment {source.text}: {address} {lacks}", job)
    return Location(words, f"{source.name} @ {wheel}")


def web_address(value: object) -> str:
    """The address if it is https or on this machine, and has no user name or password; else empty.
    Anybody on the way could replace what comes over plain http."""
    text = value if isinstance(value, str) else ""
    is_web = re.fullmatch(r"https?://[^/?#@\s]+([/?#]\S*)?", text)
    return text if is_web and hides_keys(text) else ""


def pull(source: Source, folder: Path, fault: str, job: Job) -> str:
    """Fetches the source of a package that is not public with `prime`, and returns its address.
    Raises RunError."""
    prime = shutil.which("prime")
    if not prime:
        raise RunError(
            f"{fault}; check owner, name and version. "
            "If it is private: `uv tool install prime`, `prime login`, then try again"
        )
    target = folder / module_name(source.name)
    job.say(f"{fault}; trying `prime env pull`")
    make_directory(folder)
    shutil.rmtree(target, ignore_errors=True)
    command = [prime, "env", "pull", source.text, "--target", str(target)]
    limited = replace(job, deadline=time.monotonic() + PULL_TIMEOUT_S)
    code, output = limited.run(command, dict(os.environ))
    if code != 0 or not (target / "pyproject.toml").is_file():
        raise RunError(
            f"{fault}, and `prime env pull` ended with code {code}; "
            "check owner, name and version, and `prime login`. "
            f"{last_lines('prime', output)}"
        )
    return target.as_uri()


BLAMED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, *NO_LOCKS)
"""Errors that mean the folder of all homes, whichever file they name."""
DEADLINE_S = 1800.0
"""Limit for making one home, and for waiting until another process has made it."""
OTHER_PYTHON = re.compile(
    r"(?:does not satisfy|requires) Python *"
    r"((?:(?:[<>]=?|[=!]=|~=(?=\d+\.))\d+(?:\.\d+)*,? *)+)"
)
"""What uv says of a package that needs a Python of other versions."""
FOLDER_FILE = "environment.pth"
"""The file in site-packages that puts a folder without a package on the import path, also in child
processes."""


def ensure(
    request: Request, say: Say, *, recorded: Home | None = None, fresh: bool = False
) -> Home:
    """The home for a request: with the recorded packages if given, else the newest that was made
    for it, else one that is made now.

    fresh: looks for newer packages; keeps the existing home if the index does not answer. Raises
    RunError with the remedy.
    """
    path = recorded.place if recorded else request.link
    home = homes.read(path)
    if home and not fresh:
        return home
    with building(request, say) as job:
        home = homes.read(path)  # another process may have made it meanwhile
        if home and not fresh:
            return home
        if recorded:
            return again(request, recorded, job)
        try:
            return choose(make(request, job, fresh))
        except NetworkError as error:
            if not home:
                raise
            say(f"{error}\n{job.what}: using the home that is there ({home.place})")
            return home


def choose(home: Home) -> Home:
    """Makes a home the one of the request that it was made for, in place of an earlier one."""
    link = homes.link_of(home.id, home.key)
    temporary = temporary_name(link)
    make_directory(link.parent)
    temporary.symlink_to(home.place)
    temporary.rename(link)
    return home


@contextlib.contextmanager
def building(request: Request, say: Say) -> Iterator[Job]:
    """Holds the lock of a request, so that only one of several processes makes the same home; that
    of a dead process is free. Raises RunError at the deadline, and if the disk is full or cannot be
    written."""
    root, folder, what = homes_root(), request.link.parent, request.what
    path, venv = folder / "lock", temporary_name(root / "home")
    lock = FileLock(path, fallback_to_soft=False)
    try:
        make_directory(folder)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(
                f"{what}: waiting for process {path.read_text() or 'unknown'}, "
                "which is making its home"
            )
            lock.acquire(timeout=DEADLINE_S)
        path.write_text(str(os.getpid()))
        clean_leftovers(root, folder)
        yield Job(what, venv, folder / "log", say, time.monotonic() + DEADLINE_S)
    except Timeout:
        raise RunError(
            f"{what}: process {path.read_text()} has been making its home for {DEADLINE_S:.0f} s "
            f"(lock: {path}); see what it does, or end it"
        ) from None
    except OSError as error:
        is_of_homes = Path(str(error.filename)).is_relative_to(root)
        if not is_of_homes and error.errno not in BLAMED:
            raise RunError(f"{what}: {error}") from error  # a source folder, uv, the network
        raise RunError(
            f"{what}: {error.filename or root}: {error.strerror or error}; set RL_ENVIRONMENTS "
            "to a folder on a local disk that can be written, or free some space"
        ) from None
    finally:
        shutil.rmtree(venv, ignore_errors=True)
        lock.release()


def make(request: Request, job: Job, fresh: bool) -> Home:
    """Makes a home from what the package index and the Hub have now, with another Python if the
    packages need one. Raises UvError, NetworkError."""
    began = time.monotonic()
    source = locate(request, job)
    job.say(f"{job.what}: {source.words}: making its home in {homes_root()}")
    try:
        home = fill(request, source, request.python, job, fresh)
    except UvError as error:
        match = OTHER_PYTHON.search(" ".join(error.output.split()))
        if request.python or not match:
            raise
        home = fill(request, source, match[1].strip(" ,"), job, fresh)
    job.say(f"{job.what}: {home.summary}; made in {time.monotonic() - began:.0f} s ({home.place})")
    return home


def locate(request: Request, job: Job) -> Location:
    """Where the environment comes from. Raises RunError and NetworkError."""
    source = request.source
    if source is None or not request.has_package:
        return Location(f"all that need only verifiers ({request.id}) share one home")
    if source.kind == "index":
        requirement = source.text.partition(":")[2]
        return Location(f"{requirement} from the package index", requirement)
    if source.kind == "hub":
        return find(source, request.link.parent, job)
    is_project = (source.path or Path()).joinpath("pyproject.toml").is_file()
    return Location(f"the folder {source.path}", f"-e {source.path}" * is_project)


def fill(request: Request, source: Location, versions: str, job: Job, fresh: bool) -> Home:
    """Makes a home with a Python of these versions. A package that needs the classic API gets a
    verifiers that has it. Raises UvError, NetworkError."""
    lines = [source.requirement] if source.requirement else []
    path = str(request.folder) if request.folder and not lines else ""
    name = package_name(request.source) if request.source and request.has_package else ""
    make_venv(job, versions, path)
    if request.package:  # its text shows what it is before its dependencies are fetched
        refresh = [f"--refresh-package={name}"] * fresh
        install(job, lines, "--no-deps", *only(source.index), *refresh)
        if source.index:
            lines = [f"{name}=={version_of(job.venv, name)}"]
    module, api, older = request.look(job.venv)
    lines += [*WORKER, *request.requirements]
    install_with(job, lines, older)
    if not older and any("99" not in asked for asked in homes.unmet_in(job.venv).values()):
        older = f"{NO_CLASSIC} is newer than its packages ask for"
        install_with(job, lines, older)
    if fresh:  # what is at an address may have changed since uv cached it
        names = [line.partition(" @ ")[0] for line in frozen(job) if " @ " in line]
        install_with(job, lines, older, *[f"--reinstall-package={name}" for name in names])
    reason = homes.unmet(job.venv) or older
    why = f"{api}, verifiers {version_of(job.venv, 'verifiers')}"
    described = Home(
        id=request.id,
        module=module,
        api=api,
        version=version_of(job.venv, name) if name else "",
        why=f"{why} ({reason})" if reason else why,
        index=source.index,
        path=path,
        key=request.key,
    )
    return keep(job, described)


def again(request: Request, recorded: Home, job: Job) -> Home:
    """Makes a home with exactly the packages of a recorded one. Raises RunError."""
    job.say(f"{job.what}: making its home as it was recorded ({recorded.why})")
    make_venv(job, f"=={recorded.python}", recorded.path)
    install(job, recorded.from_owner, "--no-deps", *only(recorded.index))
    install(job, recorded.packages, "--no-deps")
    return keep(job, recorded)


def install_record(record: Home, say: Say) -> Home:
    """The home of a record; from now on it is also the home of the id that it was made for. Raises
    RunError."""
    request = Request(record.id, None if record.id in VERIFIERS else read_id(record.id))
    home = ensure(request, say, recorded=record)
    return choose(msgspec.structs.replace(home, key=record.key))


def make_venv(job: Job, versions: str, path: str) -> None:
    """Makes a virtual environment of a Python of these versions, with nothing but `path`. Raises
    UvError."""
    python, folder = sys.executable, Path(path)
    if platform.python_version() not in SpecifierSet(versions):
        python = versions
        job.say(f"{job.what}: its packages want Python {versions}")
    flags = ("--clear", "--relocatable", "--no-project", "--no-python-downloads")
    job.uv("venv", *flags, "--python", python, str(job.venv))
    site = site_packages(job.venv)
    if path and is_package(folder):
        (site / module_name(folder.name)).symlink_to(folder)
    elif path:
        (site / FOLDER_FILE).write_text(f"{module_place(folder) or folder}\n")


def install(job: Job, lines: list[str], *flags: str) -> None:
    """Installs requirements; `-e FOLDER`: later changes in the folder take effect. Raises
    UvError."""
    file = job.venv / "requirements.txt"
    file.write_text("\n".join(lines))
    job.pip("install", f"--requirements={file}", *flags)


def only(index: str) -> list[str]:
    """Flags that name the index of a package's owner in place of the usual one, for that package
    alone: as an extra index it would take precedence for every name."""
    flags = [f"--index={index}", f"--default-index={index}", "--index-strategy=first-index"]
    return flags if index else []


def install_with(job: Job, lines: list[str], older: str, *flags: str) -> None:
    """Installs requirements and a version of verifiers; `older`: why it must have the classic API.
    If that conflicts with what packages ask for, this version wins. Raises UvError."""
    verifiers = VERIFIERS["classic" if older else "v1"]
    try:
        install(job, [*lines, verifiers], *flags)
    except UvError as error:
        if "No solution found" not in error.output or "verifiers" not in error.output:
            raise
        overrides = job.venv / "overrides.txt"
        overrides.write_text(verifiers)
        install(job, [*lines, verifiers], *flags, f"--overrides={overrides}")


def frozen(job: Job) -> list[str]:
    """The installed packages as requirements: `name==version`, `name @ address`, `-e folder`; a
    repository with its commit."""
    return sorted(job.pip("freeze", "--quiet").splitlines(), key=str.lower)


def keep(job: Job, described: Home) -> Home:
    """Moves a virtual environment to its final place. What is there already is replaced, unless a
    process runs in it."""
    home = msgspec.structs.replace(
        described,
        python=homes.interpreter_fact(job.venv, "version_info"),
        packages=frozen(job),
    )
    if pids := homes.users(home.place):
        in_use = f"processes {pids} run in {home.place}, which has these packages"
        job.say(f"{job.what}: {in_use}; it stays as it is")
        return home
    (job.venv / homes.FILE).write_text(homes.text_of(home.id, home))
    homes.delete(home.place)
    job.venv.rename(home.place)
    return home
