"""A home: a virtual environment in the cache with its description, and the record of which home was
made for which request.

<root>/<digest>/              a virtual environment, never changed afterwards; the digest is that of
what was installed in it <root>/<digest>/home.json     a Home <root>/<digest>/names         the
entries of its site-packages, one per line <root>/<digest>/holders/      the leases of its users:
another machine with the same root cannot see their processes <root>/requests/NAME-KEY.json a
Pointer: the newest home that was made for a request <root>/logs/NAME-KEY.log      uv's output
"""

import contextlib
import hashlib
import itertools
import os
import shutil
from pathlib import Path

import msgspec
import psutil

from rl.config.environment_id import homes_root
from rl.homes.needs import Api
from rl.run_dir.files import clean_leftovers, make_directory, remove_directory, write_file
from rl.run_dir.lease import Lease, forget_dead, hold_role
from rl.system.linux import pid_scope

FILE, NAMES, HOLDERS = "home.json", "names", "holders"
SERIAL = itertools.count(1)


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a virtual environment, and what it was made for."""

    digest: str
    id: str
    """The environment id in its normalized form; `classic` or `v1` where only verifiers is
    needed."""
    module: str
    """The module that is the environment; empty if the home was not made for a package."""
    api: Api
    version: str
    """Version of the environment's package; empty without one."""
    why: str
    """Which verifiers it has, and why."""
    python: str
    """Version of its interpreter."""
    packages: list[str]
    """All installed packages, as requirements."""
    index: str = ""
    """Address of the index that has the environment's package; empty: the usual one."""
    path: str = ""
    """Directory on the import path; empty: none."""

    @property
    def place(self) -> Path:
        return homes_root() / self.digest

    @property
    def interpreter(self) -> Path:
        return self.place / "bin" / "python"


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """Which home was made for a request."""

    id: str
    home: str
    made: float
    """Seconds since the epoch."""


def digest(*parts: object) -> str:
    """A short name for some values: equal for equal values, in any process."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def read(name: str) -> tuple[Home | None, str]:
    """(the home with this digest, ""), (None, why it cannot be used), or (None, "") if it does
    not exist."""
    place = homes_root() / name
    if not place.exists():
        return None, ""
    try:
        home = msgspec.json.decode((place / FILE).read_bytes(), type=Home)
    except (OSError, msgspec.DecodeError) as error:
        return None, f"{place / FILE} cannot be read ({error})"
    if not home.interpreter.exists():
        return None, f"its interpreter is gone ({home.interpreter})"
    names = (place / NAMES).read_text().splitlines() if (place / NAMES).exists() else []
    if gone := {*names} - {
        name for folder in place.glob("lib/python3*/site-packages") for name in os.listdir(folder)
    }:
        return None, f"{', '.join(sorted(gone))} is gone from it"
    return home, ""


def home_of(python: str) -> str:
    """The digest of the home that an interpreter is in; empty if it is in none."""
    parts = Path(python).parts
    root = homes_root().parts
    return (
        parts[len(root)] if python and parts[: len(root)] == root and len(parts) > len(root) else ""
    )


def is_of_package(python: str) -> bool:
    """Whether an interpreter belongs to a home that was made for a package rather than for a
    module of the current directory."""
    home, _ = read(home_of(python)) if home_of(python) else (None, "")
    return bool(home and home.module)


def read_pointer(path: Path) -> Pointer | None:
    """The pointer in a file; None if it is missing or cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pointer)
    except (OSError, msgspec.DecodeError):
        return None


def pointers() -> dict[Path, Pointer]:
    """The pointers of all requests for which a home was made, by file."""
    read = {path: read_pointer(path) for path in sorted(homes_root().glob("requests/*.json"))}
    return {path: pointer for path, pointer in read.items() if pointer}


def unreferenced() -> list[str]:
    """The digests of homes that no request points to because a newer one took their place. Runs
    that used them still name them."""
    kept = {pointer.home for pointer in pointers().values()}
    return sorted(
        path.parent.name
        for path in homes_root().glob(f"*/{FILE}")
        if path.parent.name not in kept and path.parent.name[0] != "."
    )


def write_pointer(path: Path, pointer: Pointer) -> None:
    make_directory(path.parent)
    write_file(path, msgspec.json.encode(pointer) + b"\n")


def hold(name: str) -> Lease | None:
    """Keeps every machine from deleting a home until the lease is closed or this process ends.
    Returns None if there is no such home or it cannot be written to."""
    holder = homes_root() / name / HOLDERS / f"{pid_scope()}-{os.getpid()}-{next(SERIAL)}.lock"
    if not (homes_root() / name).is_dir():
        return None
    with contextlib.suppress(OSError):
        return hold_role(holder)
    return None


def users(name: str) -> str:
    """The processes that run in a home or hold it, for messages; empty if there are none. Waits
    up to LEASE_S to find out whether holders on other machines are alive."""
    inside = f"{homes_root() / name}/"
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command and command[0].startswith(inside):
            found.append(str(process.pid))
    holders = forget_dead((homes_root() / name / HOLDERS).glob("*.lock"))
    return ", ".join([*found, *(f"{owner.pid} on {owner.host}" for owner in holders)])


def own_bytes(name: str) -> int:
    """The bytes that deleting a home frees: those of its files that are not links into uv's
    cache."""
    found = 0
    for folder, _, files in os.walk(homes_root() / name):
        states = [os.lstat(os.path.join(folder, file)) for file in files]
        found += sum(state.st_blocks * 512 for state in states if state.st_nlink == 1)
    return found


def clean() -> None:
    """Deletes what killed processes have left: homes that are half made, and those that have
    lost their name to be deleted."""
    clean_leftovers(homes_root())
    for doomed in homes_root().glob(".*.old"):
        shutil.rmtree(doomed, ignore_errors=True)


def delete(name: str) -> None:
    """Deletes a home; it loses its name first, so a half-deleted home is never found."""
    remove_directory(homes_root() / name)
