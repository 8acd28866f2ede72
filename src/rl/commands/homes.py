"""`rl env install | list | remove | freeze`: manages the homes of environments, and shows the
packages that a run used."""

import re
import time
from pathlib import Path

from rl.commands.options import usage
from rl.commands.policy_spec import named_run
from rl.config.command_line import Option, need_names, options, take
from rl.config.environment_id import fetched, homes_root, module_name, read_id, requirement_fault
from rl.homes.home import delete, read, read_record, read_records, text_of
from rl.homes.make import ensure, install_record
from rl.homes.request import Request
from rl.system.errors import RunError
from rl.system.terminal import did_you_mean, say, size

OPTIONS: dict[str, tuple[Option, ...]] = dict.fromkeys(("list", "remove", "freeze"), ())
OPTIONS["install"] = options("""
kind classic|v1: the API to use for a package that has both
requirements A,B: further packages, as in orchestrator.environment.requirements
dry-run: print what would be installed, without installing it
""")
EARLIER = "earlier"
VERBS = {
    "install": "rl env install ID|FILE.txt   makes an environment's home: owner/name@1.0 of the "
    "Environments Hub, pypi:name, ./folder; or\n"
    "                             remakes it with the newest packages. FILE.txt: with "
    "exactly the packages that a run used",
    "list": "rl env list                  lists the existing homes",
    "remove": "rl env remove ID|NAME|FOLDER deletes homes; `earlier`: those that newer ones have "
    "replaced",
    "freeze": "rl env freeze RUN [NAME]     prints the packages that an environment of a run used",
}


def main(verb: str, args: list[str]) -> int:
    """Runs one of VERBS. Raises RunError."""
    flags = OPTIONS[verb]
    values, rest = take(f"rl env {verb}", args, flags, usage(f"usage: {VERBS[verb]}", flags))
    numbers = {"list": (0,), "freeze": (1, 2)}.get(verb, (1,))
    need_names(
        f"rl env {verb}", rest, numbers, f"usage: {VERBS[verb].splitlines()[0].split('   ')[0]}"
    )
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
    has two requirements. Raises RunError for one that is not valid."""
    texts = re.split(r",(?![^\[]*\])(?!\s*[=<>!~])", text)
    requirements = tuple(part.strip() for part in texts if part.strip())
    for fault in filter(None, map(requirement_fault, requirements)):
        raise RunError(f"--requirements: {fault}")
    return requirements


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
    print(f"{home.summary} ({len(home.packages)} packages in {home.place})")
    return 0


def links() -> list[Path]:
    """The links to the newest homes, one for each request."""
    return sorted(homes_root().glob("requests/*/home"))


def earlier() -> list[Path]:
    """The homes to which no link leads because a newer one took their place. Runs that used them
    still name them."""
    newest = {link.resolve() for link in links()}
    folders = {path.parent.resolve() for path in homes_root().glob("[!.]*/pyvenv.cfg")}
    return sorted(folders - newest)


def show() -> int:
    """Prints the homes, one line for each id that a home was made for."""
    for link in links():
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(link.lstat().st_mtime))
        print(line_of(date, link.resolve()))
    for folder in earlier():
        print(line_of(EARLIER, folder))
    return 0


def line_of(date: str, folder: Path) -> str:
    """Describes a home; its size is that of its files."""
    home = read(folder)
    text = home.summary if home else "damaged, or made by another version of rl"
    num_bytes = sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
    return f"{date:<16}  {text}  {folder} ({size(num_bytes)})"


def meant(name: str) -> list[Path]:
    """Returns the links that an id, a folder's name or a name matches. Raises RunError if there are
    none or the name is ambiguous."""
    ids = {link: home.id if (home := read(link)) else link.parent.name for link in links()}
    is_path = name.startswith((".", "/", "~"))
    text = str(Path(name).expanduser().resolve()) if is_path else name
    if matches := [link for link in ids if text in (ids[link], link.resolve().name)]:
        return matches
    start = f"{module_name(name).lower()}-"
    matches = [link for link in ids if "/" not in name and link.parent.name.startswith(start)]
    meanings = sorted({ids[link] for link in matches})
    if len(meanings) > 1:
        raise RunError(
            f"{name} is ambiguous: {' or '.join(meanings)}; give the full id, or the folder"
        )
    if not matches:
        remedy = did_you_mean(name, sorted(set(ids.values())))
        raise RunError(f"{name}: no such home in {homes_root()}; {remedy}")
    return matches


def remove(name: str) -> int:
    """Deletes the matching links, and the homes to which no other link leads. Raises RunError for a
    home in use."""
    old = earlier()
    if name == EARLIER or name in [folder.name for folder in old]:
        for folder in old:
            if name in (EARLIER, folder.name):
                delete(folder)
                print(f"removed {folder.name}")
        return 0
    doomed = meant(name)
    kept = {link.resolve() for link in links() if link not in doomed}
    for link in doomed:
        home, folder = read(link), link.resolve()
        if folder not in kept:
            delete(folder)
        link.unlink(missing_ok=True)
        print(f"removed {home.id if home else folder.name}")
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
