"""Finds the homes of a configuration's environments, and the interpreters that their workers are
started with."""

import re
import tomllib
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet

from rl.config.environment_id import Source, id_faults, read_id
from rl.config.orchestrator import EnvSource
from rl.config.run import RLConfig
from rl.homes.entry import find_module
from rl.homes.home import digest, read, read_pointer
from rl.homes.make import ensure
from rl.homes.needs import VERIFIERS
from rl.homes.probe import files_of
from rl.homes.records import Record, difference, read_records, write_record
from rl.homes.request import Request
from rl.homes.uv import Say
from rl.system.errors import RunError

SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""PEP 723: the block of a script that names its dependencies."""
Homes = dict[str, Record]
"""Records by the name of an environment's workers."""


def entries(config: RLConfig) -> dict[str, EnvSource]:
    """The environments that have their own workers, by the name of those workers."""
    settings = config.orchestrator
    found: dict[str, EnvSource] = {env.label: env for env in settings.environment}
    sources = [env.source for env in settings.environment]
    return found | {
        f"eval-{entry.label}": entry for entry in settings.eval if entry.source not in sources
    }


def needs_home(entry: EnvSource) -> bool:
    """Whether an environment is played in a home, i.e. has neither its own interpreter nor a
    server elsewhere."""
    return not entry.python and not entry.head_server


def request_of(entry: EnvSource, record: Record | None = None) -> Request:
    """The needs of an entry's environment; if its id is ambiguous or unknown by now, those of
    the recorded package. Raises RunError."""
    if entry.id:
        return Request(
            entry.label, source_of(entry.id, record), entry.kind, tuple(entry.requirements)
        )
    dependencies, python = script_needs(entry.reward)
    return Request(entry.label, None, None, (*entry.requirements, *dependencies), python)


def source_of(env_id: str, record: Record | None) -> Source:
    """The package that an id means; if the id cannot be resolved, the recorded package. Raises
    RunError."""
    try:
        return read_id(env_id)
    except RunError:
        if record is None or record.home.id in VERIFIERS:
            raise
        return read_id(record.home.id)


def script_needs(reward: str | None) -> tuple[tuple[str, ...], str]:
    """The dependencies and the Python versions that the file of a reward function declares by
    PEP 723. Raises RunError."""
    path = Path((reward or "").rpartition(":")[0]).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return (), ""
    blocks = list(SCRIPT.finditer(path.read_text(errors="replace")))
    if not blocks:
        return (), ""
    content = "".join(
        line[2:] if line.startswith("# ") else line[1:]
        for line in blocks[0]["content"].splitlines(keepends=True)
    )
    try:
        table = tomllib.loads(content)
        dependencies, python = table.get("dependencies", []), table.get("requires-python", "")
        if (
            len(blocks) > 1
            or not isinstance(dependencies, list)
            or not all(isinstance(one, str) for one in (*dependencies, python))
        ):
            raise ValueError(
                "give one block, with a list of texts as dependencies, and a text as "
                "requires-python"
            )
        SpecifierSet(python)
    except ValueError as error:
        raise RunError(
            f"{path}: its block `# /// script` cannot be read: {error}; see PEP 723"
        ) from None
    return tuple(dependencies), python


def homes_of(config: RLConfig, say: Say, *, recorded: bool) -> Homes:
    """The homes of all environments that are played in one; missing ones are made. Raises RunError.

    recorded: the configuration is from an earlier run; its packages are used again, or a warning
    says what differs.
    """
    records = read_records(config.run_dir.environments) if recorded else {}
    # else a record may know what an id meant
    if not records and (faults := id_faults(config.orchestrator.env_ids)):
        raise RunError("\n".join(faults))
    found: Homes = {}
    for name, entry in entries(config).items():
        if needs_home(entry):
            request = request_of(entry, records.get(name))
            # By key first: in a lone evaluation, the environment that a run trained on has another
            # name.
            # all rows have one key
            same = {other: one for other, one in records.items() if one.key == request.key}
            record = same.get(name) or next(iter(same.values()), records.get(name))
            code = code_of(request, entry)
            if record and record.code and record.code != code:
                say(
                    f"warning: the code of environment {name} has changed since this run was "
                    "last played; rewards may not be comparable"
                )
            found[name] = msgspec.structs.replace(settled(request, record, say), code=code)
    return found


def code_of(request: Request, entry: EnvSource) -> str:
    """A digest of the source files of an environment and of its reward function; empty if it is
    an installed package."""
    path = Path((entry.reward or "").rpartition(":")[0]).expanduser()
    files = [path] if path.suffix == ".py" and path.is_file() else []
    if request.source and request.source.kind in ("folder", "module"):
        files += files_of(find_module(request.source, Path())[1])
    return digest([(file.name, file.read_bytes()) for file in files]) if files else ""


def unmade(config: RLConfig) -> list[str]:
    """A sentence for each environment whose home does not exist yet; makes none. Raises RunError
    for an unknown id."""
    lines = []
    for entry in entries(config).values():
        request = request_of(entry) if needs_home(entry) else None
        pointer = read_pointer(request.pointer) if request else None
        if request and not (pointer and read(pointer.home)[0]):
            command = (
                f"; `rl env install {entry.id}` makes it now"
                if entry.id and request.has_package
                else ""
            )
            what = request.id if request.has_package else VERIFIERS[request.known_api or "classic"]
            lines.append(
                f"environment {entry.label}: its home does not exist yet; a start makes it, "
                f"with {what}{command}"
            )
    return lines


def settled(request: Request, record: Record | None, say: Say) -> Record:
    """The home for a request: that of the record if it was made for the same request and is
    available. Raises RunError."""
    if record and record.key == request.key:
        try:
            return Record(request.key, ensure(request, say, recorded=record.home))
        except RunError as error:
            say(
                f"{error}\nenvironment {request.label}: its home cannot be made as it was "
                "recorded; it gets a new one"
            )
    home = ensure(request, say)
    if record and (changes := difference(record.home.packages, home.packages)):
        say(
            f"warning: environment {request.label} is played with different packages than "
            f"before: {changes}"
        )
    return Record(request.key, home)


def record(config: RLConfig, homes: Homes) -> None:
    """Writes the records of the environments' homes into the run directory."""
    for name, one in homes.items():
        write_record(config.run_dir.environments, name, one)


def in_homes(config: RLConfig, homes: Homes) -> RLConfig:
    """A copy of the configuration in which each environment with a home has the home's
    interpreter, and its module as its id."""
    config = config.model_copy(deep=True)
    settings = config.orchestrator
    by_source = [
        (entry.source, homes[name]) for name, entry in entries(config).items() if name in homes
    ]
    for entry in [*settings.environment, *settings.eval]:
        if one := next((record for source, record in by_source if source == entry.source), None):
            entry.name, entry.python = entry.label, str(one.home.interpreter)
            if entry.id:
                entry.id = one.home.module or read_id(entry.id).text
    return config
