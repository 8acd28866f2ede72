"""Records of the packages that a run's environments used: `environments/<name>.txt`,
requirements below a header in comments."""

import re
from pathlib import Path

import msgspec
from packaging.utils import canonicalize_name

from rl.config.environment_id import unversioned
from rl.homes.home import Home
from rl.run_dir.files import make_directory, write_file

HEAD = ("id", "module", "api", "version", "why", "python", "index", "path", "digest")
LINE = re.compile(r"# (\w+) = (.*)")


class Record(msgspec.Struct, frozen=True):
    """The home of an environment of a run, and the key of the request that it was made for."""

    key: str
    home: Home
    code: str = ""
    """Digest of the environment's own source files if they are in the user's folders; empty: not
    known."""


def text_of(name: str, record: Record) -> str:
    """The record as text: comments with the other fields, then requirements that uv and pip can
    read."""
    fields = {"key": record.key} | {key: getattr(record.home, key) for key in HEAD}
    own = owned(record.home)
    if record.code:
        fields["code"] = record.code
    head = [f"# {key} = {value}" for key, value in fields.items()]
    if own:  # to uv and pip its name alone would mean another package
        head += [
            "# uv and pip would look elsewhere for the next one: `rl env install` of this "
            "file installs it, too.",
            f"# own = {own}",
        ]
    packages = [line for line in record.home.packages if line != own]
    return (
        "\n".join([f"# Environment {name} was played with these packages.", *head, *packages])
        + "\n"
    )


def owned(home: Home) -> str:
    """The requirement of the environment's own package if it comes from its owner's index; else
    empty."""
    name = unversioned(home.id).rpartition("/")[2]
    found = (line for line in home.packages if canonicalize_name(line.partition("==")[0]) == name)
    return next(found, "") if home.index else ""


def write_record(folder: Path, name: str, record: Record) -> None:
    """Writes the record unless the file already has it."""
    data, path = text_of(name, record).encode(), folder / f"{name}.txt"
    if not path.exists() or path.read_bytes() != data:
        make_directory(folder)
        write_file(path, data)


def read_record(path: Path) -> Record | None:
    """The record in a file; None if there is none, if `rl` did not write it, or if it contains
    several."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = [(match[1], match[2]) for match in map(LINE.fullmatch, lines) if match]
    head = dict(found)
    if len(head) < len(found):
        return None
    packages = sorted(
        [line for line in lines if line and not line.startswith("#")]
        + list(filter(None, [head.get("own")])),
        key=str.lower,
    )
    try:
        home = msgspec.convert(
            {key: head.get(key, "") for key in HEAD} | {"packages": packages}, Home
        )
        return Record(head["key"], home, head.get("code", ""))
    except (msgspec.ValidationError, KeyError):
        return None


def read_records(folder: Path) -> dict[str, Record]:
    """The records in a folder, by environment name."""
    found = {path.stem: read_record(path) for path in sorted(folder.glob("*.txt"))}
    return {name: record for name, record in found.items() if record}


def difference(old: list[str], new: list[str]) -> str:
    """The differences between two lists of packages, in words; empty if there are none."""
    before, now = (dict(map(name_and_version, lines)) for lines in (old, new))
    names = sorted({*before, *now}, key=str.lower)
    changes = [
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changes)


def name_and_version(line: str) -> tuple[str, str]:
    """Splits a line of a record into name and version; a folder has no version."""
    name, _, version = re.sub(r" @ ", "==", line, count=1).partition("==")
    return name, version or "as it lies there"
