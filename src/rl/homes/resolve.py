"""Finds the homes of a configuration's environments, and the interpreters that their workers are
started with."""

import re
from pathlib import Path

import msgspec
from packaging.specifiers import SpecifierSet

from rl.config.environment_id import id_faults, read_id
from rl.config.orchestrator import EnvSource
from rl.config.run import RLConfig
from rl.homes.home import Home, difference, digest, read, read_records, text_of
from rl.homes.make import ensure
from rl.homes.needs import VERIFIERS
from rl.homes.request import Request, files_of
from rl.homes.uv import Say
from rl.run_dir.files import write_file
from rl.system.errors import RunError

SCRIPT = re.compile(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$")
"""PEP 723: the block of a script that names its dependencies."""
Homes = dict[str, Home]
"""By the name of an environment's workers."""


class Script(msgspec.Struct):
    """What the block of a script can say."""

    dependencies: list[str] = []
    python: str = msgspec.field(name="requires-python", default="")


def workers(config: RLConfig) -> list[tuple[str, EnvSource]]:
    """Every environment with the name of its workers. An evaluation is played by those of a
    training environment with the same source, else by its own."""
    settings = config.orchestrator
    named: list[tuple[str, EnvSource]] = [(env.label, env) for env in settings.environment]
    for entry in settings.eval:
        same = (env.label for env in settings.environment if env.source == entry.source)
        named.append((next(same, f"eval-{entry.label}"), entry))
    return named


def entries(config: RLConfig) -> dict[str, EnvSource]:
    """The environments that have their own workers, by the name of those workers."""
    return dict(workers(config)) | {env.label: env for env in config.orchestrator.environment}


def needs_home(entry: EnvSource) -> bool:
    """Whether an environment is played in a home, i.e. has neither its own interpreter nor a server
    elsewhere."""
    return not entry.python and not entry.head_server


def request_of(entry: EnvSource, record: Home | None = None) -> Request:
    """The needs of an entry's environment; if its id is ambiguous or unknown by now, those of the
    recorded package. Raises RunError."""
    if not entry.id:
        dependencies, python = script_needs(entry.reward)
        return Request(entry.label, None, None, (*entry.requirements, *dependencies), python)
    try:
        source = read_id(entry.id)
    except RunError:
        if record is None or record.id in VERIFIERS:
            raise
        source = read_id(record.id)
    return Request(entry.label, source, entry.kind, tuple(entry.requirements))


def reward_file(reward: str | None) -> Path | None:
    """The file of a reward function; None if it is in a module."""
    path = Path((reward or "").rpartition(":")[0]).expanduser()
    return path if path.suffix == ".py" and path.is_file() else None


def script_needs(reward: str | None) -> tuple[list[str], str]:
    """The dependencies and the Python versions that the file of a reward function declares by PEP
    723. Raises RunError."""
    path = reward_file(reward)
    blocks = SCRIPT.findall(path.read_text(errors="replace")) if path else []
    if not blocks:
        return [], ""
    try:
        if len(blocks) > 1:
            raise ValueError("give one block")
        script = msgspec.toml.decode(re.sub("(?m)^# ?", "", blocks[0]), type=Script)
        SpecifierSet(script.python)
    except (ValueError, msgspec.DecodeError) as error:
        raise RunError(
            f"{path}: its block `# /// script` cannot be read: {error}; see PEP 723"
        ) from None
    return script.dependencies, script.python


def homes_of(config: RLConfig, say: Say, *, recorded: bool) -> Homes:
    """The homes of all environments that are played in one; missing ones are made. Raises RunError.

    recorded: the configuration is from an earlier run; its packages are used again, or a warning
    says what differs.
    """
    records = read_records(config.run_dir.environments) if recorded else {}
    faults = id_faults(config.orchestrator.env_ids)
    if faults and not records:  # else a record may know what an id meant
        raise RunError("\n".join(faults))
    homes: Homes = {}
    for name, entry in entries(config).items():
        if needs_home(entry):
            record = records.get(name)
            request = request_of(entry, record)
            # In a lone evaluation, the environment that a run trained on has another name. All rows
            # have one key, so the name decides between them.
            for other in [*records.values(), record]:
                record = other if other and other.key == request.key else record
            code = code_of(request, entry)
            if record and record.code and record.code != code:
                say(
                    f"warning: the code of environment {name} has changed since this run was last "
                    "played; rewards may not be comparable"
                )
            home = settled(request, record, say)
            homes[name] = msgspec.structs.replace(home, key=request.key, code=code)
    return homes


def code_of(request: Request, entry: EnvSource) -> str:
    """A digest of the source files of an environment and of its reward function; empty if it is an
    installed package."""
    path = reward_file(entry.reward)
    files = [path] if path else []
    files += [] if request.package else files_of(request.file(Path()))
    return digest([(file.name, file.read_bytes()) for file in files]) if files else ""


def unmade(config: RLConfig) -> list[str]:
    """A sentence for each environment whose home does not exist yet; makes none. Raises RunError
    for an unknown id."""
    lines = []
    for entry in filter(needs_home, entries(config).values()):
        request = request_of(entry)
        if not read(request.link):
            needs: dict[str, str] = {**VERIFIERS}
            package = f"{request.id}; `rl env install {entry.id}` makes it now"
            lines.append(
                f"{request.what}: its home does not exist yet; a start makes it, "
                f"with {needs.get(request.id, package)}"
            )
    return lines


def settled(request: Request, record: Home | None, say: Say) -> Home:
    """The home for a request: that of the record if it was made for the same request and is
    available. Raises RunError."""
    if record and record.key == request.key:
        try:
            return ensure(request, say, recorded=record)
        except RunError as error:
            say(
                f"{error}\n{request.what}: its home cannot be made as it was recorded; "
                "it gets a new one"
            )
    home = ensure(request, say)
    if record and (changes := difference(record.packages, home.packages)):
        say(f"warning: {request.what} is played with different packages than before: {changes}")
    return home


def record(config: RLConfig, homes: Homes) -> None:
    """Writes the records of the environments' homes into the run directory."""
    for name, home in homes.items():
        data = text_of(name, home).encode()
        write_file(config.run_dir.environments / f"{name}.txt", data)


def in_homes(config: RLConfig, homes: Homes) -> RLConfig:
    """A copy of the configuration in which each environment with a home has the home's interpreter,
    and its module as its id."""
    config = config.model_copy(deep=True)
    for name, entry in workers(config):
        if home := homes.get(name):
            entry.name, entry.python = entry.label, str(home.interpreter)
            if entry.id:
                entry.id = home.module or read_id(entry.id).text
    return config
