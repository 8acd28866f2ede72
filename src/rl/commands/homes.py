"""`rl env install | list | remove | freeze`: manages the homes of environments, and shows the
packages that a run used."""

import re
import time
from pathlib import Path

from rl.commands.options import usage
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.environment_id import fetched, homes_root, module_name, read_id
from rl.config.options import Option, take
from rl.diagnosis.disk import size
from rl.homes.home import Pointer, clean, delete, own_bytes, pointers, read, unreferenced, users
from rl.homes.make import ensure, install_record, summary
from rl.homes.records import read_record, read_records, text_of
from rl.homes.request import Request
from rl.system.errors import RunError
from rl.system.terminal import say

KIND = Option("kind", "classic|v1", "the API to use for a package that has both")
REQUIRE = Option(
    "requirements", "A,B", "further packages, as in orchestrator.environment.requirements"
)
DRY = Option("dry-run", "", "print what would be installed, without installing it")
OPTIONS: dict[str, tuple[Option, ...]] = {
    "install": (KIND, REQUIRE, DRY),
    "list": (),
    "remove": (),
    "freeze": (),
}
EARLIER = "earlier"
VERBS = {
    "install": "rl env install ID|FILE.txt   makes an environment's home: owner/name@1.0 of the "
    "Environments Hub, pypi:name, ./folder; or\n"
    "                             remakes it with the newest packages. FILE.txt: with "
    "exactly the packages that a run used",
    "list": "rl env list                  lists the existing homes",
    "remove": "rl env remove ID|NAME|DIGEST deletes homes; `earlier`: those that newer ones have "
    "replaced",
    "freeze": "rl env freeze RUN [NAME]     prints the packages that an environment of a run used",
}


def main(verb: str, args: list[str]) -> int:
    """Runs one of VERBS. Raises RunError."""
    options = OPTIONS[verb]
    values, rest = take(f"rl env {verb}", args, options, usage(f"usage: {VERBS[verb]}", options))
    most = {"list": 0, "freeze": 2}.get(verb, 1)
    if not min(most, 1) <= len(rest) <= most or any(word.startswith(("-", "@")) for word in rest):
        fail(f"rl env {verb}", f"usage: {VERBS[verb].splitlines()[0].split('   ')[0]}")
    if verb == "list":
        return show()
    if verb == "remove":
        return remove(rest[0])
    if verb == "freeze":
        return freeze(rest[0], "".join(rest[1:]))
    if values["dry_run"]:
        print(
            "\n".join(fetched([rest[0]]))
            or f"{rest[0]}: {read_id(rest[0]).text} would get a home in {homes_root()}, unless "
            "it exists"
        )
        return 0
    return install(rest[0], values["kind"], several(values["requirements"] or ""))


def several(text: str) -> tuple[str, ...]:
    """Splits comma-separated requirements. Versions may contain commas: `sympy>=1.13,<2, nltk`
    has two requirements."""
    parts = re.split(r",(?![^\[]*\])(?!\s*[=<>!~])", text)
    return tuple(part.strip() for part in parts if part.strip())


def install(env_id: str, kind: str | None, requirements: tuple[str, ...]) -> int:
    """Makes a home and prints a summary of it."""
    path = Path(env_id)
    if path.suffix == ".txt" and path.is_file():
        record = read_record(path)
        if not record:
            raise RunError(
                f"{path}: not an environment record; a run has one file per environment in "
                "environments/"
            )
        home = install_record(record, say)
    else:
        request = Request(env_id, read_id(env_id), kind, requirements)  # type: ignore[arg-type]
        home = ensure(request, say, fresh=True)
    print(f"{summary(home)} ({len(home.packages)} packages in {home.place})")
    return 0


def show() -> int:
    """Prints the homes, one line for each id that a home was made for."""
    for pointer in pointers().values():
        home, damage = read(pointer.home)
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(pointer.made))
        text = summary(home) if home else f"{pointer.id}: {damage or 'deleted'}"
        print(f"{made}  {text}  {homes_root() / pointer.home} ({size(own_bytes(pointer.home))})")
    for name in unreferenced():
        home, damage = read(name)
        print(
            f"{'earlier':<16}  {summary(home) if home else damage}  {homes_root() / name} "
            f"({size(own_bytes(name))})"
        )
    return 0


def meant(name: str) -> dict[Path, Pointer]:
    """Returns the pointers that an id, a digest or a name matches. Raises RunError if there are
    none or the name is ambiguous."""
    there = pointers()
    text = str(Path(name).expanduser().resolve()) if name.startswith((".", "/", "~")) else name
    found = {path: pointer for path, pointer in there.items() if text in (pointer.id, pointer.home)}
    if not found and "/" not in name:
        found = {
            path: pointer
            for path, pointer in there.items()
            if path.name.startswith(f"{module_name(name).lower()}-")
        }
        if len(ids := sorted({pointer.id for pointer in found.values()})) > 1:
            raise RunError(
                f"{name} is ambiguous: {' or '.join(ids)}; give the full id, or the digest"
            )
    if not found:
        known = ", ".join(sorted({pointer.id for pointer in there.values()})) or "none"
        raise RunError(f"{name}: no such home in {homes_root()}; existing homes: {known}")
    return found


def remove(name: str) -> int:
    """Deletes the matching pointers, and the homes that no other pointer refers to. Raises
    RunError for a home in use."""
    old = unreferenced()
    if name in (EARLIER, *old):
        for one in old if name == EARLIER else [name]:
            if processes := users(one):
                raise RunError(f"{one}: in use by processes {processes}; end them first")
            delete(one)
            print(f"removed {one}")
        return 0
    doomed = meant(name)
    kept = {pointer.home for path, pointer in pointers().items() if path not in doomed}
    for path, pointer in doomed.items():
        if pointer.home not in kept and (processes := users(pointer.home)):
            raise RunError(
                f"{pointer.id}: processes {processes} use {homes_root() / pointer.home}; end "
                "them first"
            )
        path.unlink(missing_ok=True)
        if pointer.home not in kept:
            delete(pointer.home)
        print(f"removed {pointer.id}")
    clean()
    return 0


def freeze(run: str, name: str) -> int:
    """Prints the record of a run's environment as requirements for uv and pip. Without a name,
    the run must have only one. Raises RunError if there is no such record, or several."""
    folder = named_run(run).absolute() / "environments"
    records = read_records(folder)
    if not records:
        raise RunError(
            f"{run}: {folder} has no records: its environments use `python`, or run elsewhere"
        )
    if name not in records and (name or len(records) > 1):
        raise RunError(
            f"{run}: which environment? rl env freeze {run} NAME, one of {', '.join(records)}"
        )
    name = name or next(iter(records))
    print(text_of(name, records[name]), end="")
    return 0
