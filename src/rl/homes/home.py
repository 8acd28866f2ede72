"""A home: a virtual environment in the cache with what was found out about it, and which home was made for which request.

<root>/<digest>/              a virtual environment; the digest is of what was installed in it, and we change nothing in it afterwards
<root>/<digest>/home.json     a Home
<root>/<digest>/names         what lies in its site-packages, a name a line
<root>/requests/NAME-KEY.json a Pointer: the home that was made for a request, the newest one
<root>/logs/NAME-KEY.log      what uv said
"""

import hashlib
import os
from pathlib import Path

import msgspec
import psutil

from rl.config.environment_id import homes_root
from rl.homes.needs import Api
from rl.run_dir.files import make_directory, remove_directory, write_file

FILE, NAMES = "home.json", "names"


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """What a virtual environment holds, and what it was made for."""

    digest: str
    id: str
    """The environment id, in the one way in which it is compared; `classic` or `v1` where only verifiers is wanted."""
    module: str
    """The module that is the environment; empty where it is none of a package."""
    api: Api
    version: str
    """Of the environment's package; empty without one."""
    why: str
    """Which verifiers it has, and why."""
    python: str
    """Version of its interpreter."""
    packages: list[str]
    """All that is installed, as requirements."""
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
    """A short name for some things: equal for equal ones, in any process."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def read(name: str) -> tuple[Home | None, str]:
    """A home by its digest, and why it cannot be used; neither if it is not there."""
    place = homes_root() / name
    if not place.exists():
        return None, ""
    try:
        home = msgspec.json.decode((place / FILE).read_bytes(), type=Home)
    except (OSError, msgspec.DecodeError) as error:
        return None, f"{place / FILE} cannot be read ({error})"
    if not home.interpreter.exists():
        return None, f"its interpreter is gone ({home.interpreter})"
    records = len(list(place.glob("lib/python3*/site-packages/*.dist-info/RECORD")))
    if records != len(home.packages):
        return None, f"{records} of {len(home.packages)} packages are in {place}"
    names = (place / NAMES).read_text().splitlines() if (place / NAMES).exists() else []
    if gone := {*names} - {name for folder in place.glob("lib/python3*/site-packages") for name in os.listdir(folder)}:
        return None, f"{', '.join(sorted(gone))} is gone from it"
    return home, ""


def home_of(python: str) -> str:
    """The digest of the home that an interpreter is in; empty if it is in none."""
    parts = Path(python).parts
    root = homes_root().parts
    return parts[len(root)] if python and parts[: len(root)] == root and len(parts) > len(root) else ""


def is_of_package(python: str) -> bool:
    """Whether an interpreter is that of a home that was made for a package, and for no module of the current directory."""
    home, _ = read(home_of(python)) if home_of(python) else (None, "")
    return bool(home and home.module)


def read_pointer(path: Path) -> Pointer | None:
    """A pointer; None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pointer)
    except (OSError, msgspec.DecodeError):
        return None


def pointers() -> dict[Path, Pointer]:
    """All requests for which a home was made, by their files."""
    read = {path: read_pointer(path) for path in sorted(homes_root().glob("requests/*.json"))}
    return {path: pointer for path, pointer in read.items() if pointer}


def unreferenced() -> list[str]:
    """Homes that no request has any more: a newer one took their place. Runs that were played in them still name them."""
    kept = {pointer.home for pointer in pointers().values()}
    return sorted(
        path.parent.name for path in homes_root().glob(f"*/{FILE}") if path.parent.name not in kept and path.parent.name[0] != "."
    )


def write_pointer(path: Path, pointer: Pointer) -> None:
    make_directory(path.parent)
    write_file(path, msgspec.json.encode(pointer) + b"\n")


def users(name: str) -> list[int]:
    """Processes that run in a home."""
    inside = f"{homes_root() / name}/"
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command and command[0].startswith(inside):
            found.append(process.pid)
    return found


def own_bytes(name: str) -> int:
    """What deleting a home gives back: the bytes of its files that are not links into uv's cache."""
    found = 0
    for folder, _, files in os.walk(homes_root() / name):
        states = [os.lstat(os.path.join(folder, file)) for file in files]
        found += sum(state.st_blocks * 512 for state in states if state.st_nlink == 1)
    return found


def delete(name: str) -> None:
    """Deletes a home; a half-deleted one does not have its name any more."""
    remove_directory(homes_root() / name)
