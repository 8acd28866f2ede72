"""`rl env install | list | remove | freeze`: the homes of environments, and what a run's were played with."""

import re
import time
from pathlib import Path

from rl.commands.arena import say
from rl.commands.options import usage
from rl.commands.policy_spec import named_run
from rl.config.command_line import fail
from rl.config.environment_id import fetched, homes_root, module_name, read_id
from rl.config.options import Option, take
from rl.diagnosis.disk import size
from rl.homes.home import Pointer, delete, own_bytes, pointers, read, unreferenced, users
from rl.homes.make import Request, ensure, install_record, summary
from rl.homes.records import read_record, read_records, text_of
from rl.launch.children import Children
from rl.run_dir.files import clean_leftovers
from rl.system.errors import RunError

KIND = Option("kind", "classic|v1", "the API by which a package is played that has both")
REQUIRE = Option("requirements", "A,B", "further packages, as in orchestrator.environment.requirements")
DRY = Option("dry-run", "", "say what would be installed, and install nothing")
TO = Option("to", "FILE", "write it to a file")
OPTIONS: dict[str, tuple[Option, ...]] = {"install": (KIND, REQUIRE, DRY), "list": (), "remove": (), "freeze": (TO,)}
EARLIER = "earlier"
VERBS = {
    "install": "rl env install ID|FILE.txt   makes an environment's home: owner/name@1.0 of the Environments Hub, pypi:name, ./folder; or\n"
    "                             again, with the newest packages. FILE.txt: exactly what a run was played with",
    "list": "rl env list                  shows the homes that are there",
    "remove": "rl env remove ID|NAME|DIGEST deletes them; `earlier`: those that a newer one took the place of",
    "freeze": "rl env freeze RUN [NAME]     prints what an environment of a run was played with",
}


def main(verb: str, args: list[str], children: Children) -> int:
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
        return freeze(rest[0], "".join(rest[1:]), values["to"])
    if values["dry_run"]:
        print("\n".join(fetched([rest[0]])) or f"{rest[0]}: {read_id(rest[0]).text} would get a home in {homes_root()}, unless it is there")
        return 0
    return install(rest[0], values["kind"], several(values["requirements"] or ""))


def several(text: str) -> tuple[str, ...]:
    """The requirements in a text that commas separate: `sympy>=1.13,<2, nltk` has two, for a version has commas of its own."""
    parts = re.split(r",(?![^\[]*\])(?!\s*[=<>!~])", text)
    return tuple(part.strip() for part in parts if part.strip())


def install(env_id: str, kind: str | None, requirements: tuple[str, ...]) -> int:
    """Makes a home and says what is in it."""
    path = Path(env_id)
    if path.suffix == ".txt" and path.is_file():
        record = read_record(path)
        if not record:
            raise RunError(f"{path}: no record of one environment; a run has some in environments/, each in a file")
        home = install_record(record, say)
    else:
        home = ensure(Request(env_id, read_id(env_id), kind, requirements), say, fresh=True)  # type: ignore[arg-type]
    print(f"{summary(home)} ({len(home.packages)} packages in {home.place})")
    return 0


def show() -> int:
    """Prints the homes, a line for each id that one was made for."""
    for pointer in pointers().values():
        home, damage = read(pointer.home)
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(pointer.made))
        text = summary(home) if home else f"{pointer.id}: {damage or 'deleted'}"
        print(f"{made}  {text}  {homes_root() / pointer.home} ({size(own_bytes(pointer.home))})")
    for name in unreferenced():
        home, damage = read(name)
        print(f"{'earlier':<16}  {summary(home) if home else damage}  {homes_root() / name} ({size(own_bytes(name))})")
    return 0


def meant(name: str) -> dict[Path, Pointer]:
    """The pointers that an id, a digest or a name means. Raises RunError if there is none."""
    there = pointers()
    text = str(Path(name).expanduser().resolve()) if name.startswith((".", "/", "~")) else name
    found = {path: pointer for path, pointer in there.items() if text in (pointer.id, pointer.home)}
    if not found and "/" not in name:
        found = {path: pointer for path, pointer in there.items() if path.name.startswith(f"{module_name(name).lower()}-")}
        if len(ids := sorted({pointer.id for pointer in found.values()})) > 1:
            raise RunError(f"{name} may be {' or '.join(ids)}; give the whole id, or the digest")
    if not found:
        known = ", ".join(sorted({pointer.id for pointer in there.values()})) or "none"
        raise RunError(f"{name}: there is no such home in {homes_root()}; there are {known}")
    return found


def remove(name: str) -> int:
    """Deletes the pointers that are meant, and the homes that no other one points at. Raises RunError for one that is in use."""
    old = unreferenced()
    if name in (EARLIER, *old):
        for one in old if name == EARLIER else [name]:
            if pids := users(one):
                raise RunError(f"{one}: processes {', '.join(map(str, pids))} run in it; end them first")
            delete(one)
            print(f"removed {one}")
        return 0
    doomed = meant(name)
    kept = {pointer.home for path, pointer in pointers().items() if path not in doomed}
    for path, pointer in doomed.items():
        if pointer.home not in kept and (pids := users(pointer.home)):
            raise RunError(f"{pointer.id}: processes {', '.join(map(str, pids))} run in {homes_root() / pointer.home}; end them first")
        path.unlink(missing_ok=True)
        if pointer.home not in kept:
            delete(pointer.home)
        print(f"removed {pointer.id}")
    clean_leftovers(homes_root())
    return 0


def freeze(run: str, name: str, target: str | None) -> int:
    """Prints the record of a run's environment, without a name of the only one, as uv and pip read requirements. Raises RunError for one
    that is not there, and for several."""
    folder = named_run(run).absolute() / "environments"
    records = read_records(folder)
    if not records:
        raise RunError(f"{run}: {folder} has no record: its environments are played with `python`, elsewhere, or by an older version of rl")
    if name not in records and (name or len(records) > 1):
        raise RunError(f"{run}: which environment? rl env freeze {run} NAME, one of {', '.join(records)}")
    name = name or next(iter(records))
    text = text_of(name, records[name])
    if target:
        Path(target).expanduser().write_text(text)
        print(f"written to {target}")
    else:
        print(text, end="")
    return 0
