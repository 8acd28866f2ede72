"""From files, environment variables and flags to a checked RLConfig, or to one message with every fault in it.

`@ run.toml` fills the whole configuration, `--trainer @ t.toml` one section, `RL__TRAINER__OPTIM__LR=1e-6` and `--trainer.optim.lr 1e-6`
one key. Files merge left to right; environment variables win over files, flags over both. A run-wide key inside a section is that
run-wide key; two spellings of one setting with different values in files, in variables or in flags are a fault.
"""

import json
import re
import sys
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import BaseModel

from rl.config.check import check, warnings_of
from rl.config.environment_id import fetched, id_faults
from rl.config.faults import Spelled, raise_all, setting_text, without_value
from rl.config.fields import field_tree, models_in, tags
from rl.config.help import PROCESS_USAGE, USAGE, print_help
from rl.config.hints import ALIASES
from rl.config.outside import outside_faults
from rl.config.quick import shrink
from rl.config.run import MAX_STEP, RUN_WIDE, SECTIONS, RLConfig
from rl.config.validation import holds_anyway, in_doubt, validate
from rl.run_dir.files import write_file
from rl.run_dir.paths import is_run
from rl.system.errors import ConfigError

SHORT_FLAGS = {f"{section}-{kind}": f"{section}.{kind}" for section in ("trainer", "inference") for kind in ("gpus", "cpus")}
SHORT_FLAGS["strict-parity"] = "trainer.strict_parity"
SHORTHANDS = {
    "model": "model.name",
    "orchestrator.environment": "orchestrator.environment.id",
    "orchestrator.eval": "orchestrator.eval.id",
    "orchestrator.credit": "orchestrator.credit.type",
    "trainer.loss": "trainer.loss.type",
}
"""Sections that may be given as a text: the key in them that it stands for."""
SWITCHES = ("--dry-run", "--schema", "--clean", "--quick", "--view")
A_STEP = re.compile("[0-9]{1,20}")
NUMBERED = re.compile(r"(.+?)\.([0-9]+)\.(.+)")
"""The key of a setting in an element of a list: section, number, the rest."""
OF_RUNS = {"resume", "clean", "quick", "view"}
"""Switches that a command has only if its help names them."""
VARIABLE_PREFIX = "RL__"

MAX_FILE_BYTES = 1 << 24


@dataclass
class CommandLine:
    """What files, environment variables and arguments give, before anything is checked."""

    files: Spelled = field(default_factory=dict)
    variables: Spelled = field(default_factory=dict)
    flags: Spelled = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    resume: int | None = None
    """Step to resume at; -1: the newest; None: no --resume."""
    faults: list[str] = field(default_factory=list)
    """Files that cannot be read, and arguments that are neither a file, a flag nor a switch."""

    def gives(self, key: str) -> bool:
        """Whether a setting is given anywhere, instead of left to its default."""
        return any(
            canonical(name, value) == key for layer in (self.files, self.variables, self.flags) for name, (value, _) in layer.items()
        )


def flatten(table: dict[str, Any], place: str, prefix: str = "") -> Spelled:
    """The settings of nested tables; lists, empty tables and those with a dot in a key of their own are values."""
    flat: Spelled = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and not any("." in name for name in value):
            flat |= flatten(value, place, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value, place
    return flat


def read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: is no configuration: larger than {MAX_FILE_BYTES >> 20} MiB")
        return tomllib.loads(data.decode())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # of bytes that are no UTF-8, of TOML, of a path or a number that cannot be
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as TOML: nested too deep") from None


def parse_value(text: str) -> Any:
    """A flag's value: TOML where it is TOML (1e-6, true, [1, 2], {a = 1}), else the plain string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text


def parse_args(args: list[str], variables: Mapping[str, str] | None = None) -> CommandLine:
    """Splits arguments into files, flags and switches, and takes the settings out of environment variables: RL__TRAINER__OPTIM__LR is
    trainer.optim.lr, its value is written as a flag's.
    """
    line, rest = CommandLine(), list(args)
    for name, text in (variables or {}).items():
        if name.startswith(VARIABLE_PREFIX):
            line.variables |= flatten({name.removeprefix(VARIABLE_PREFIX).lower().replace("__", "."): parse_value(text)}, name)
    while rest:
        try:
            parse_word(line, rest.pop(0), rest)
        except ConfigError as error:
            line.faults.append(str(error))
    return line


def parse_word(line: CommandLine, word: str, rest: list[str]) -> None:
    """Adds what an argument says, with as many of those behind it as belong to it. Raises ConfigError."""
    name, has_value, text = word.removeprefix("--").partition("=")
    if word.startswith("@"):
        read_file(line, word, rest)
    elif word in SWITCHES:
        line.switches.add(name)
    elif word.startswith("--") and name == "resume":
        step = text if has_value else rest.pop(0) if rest and A_STEP.fullmatch(rest[0]) else ""
        if has_value and not A_STEP.fullmatch(step):
            raise ConfigError(f"{word}: give a step, a number from 0, or --resume alone for the newest")
        line.resume = int(step) if step else -1
        if line.resume > MAX_STEP:
            raise ConfigError(f"--resume {line.resume}: there is no such step; the last possible one is {MAX_STEP}")
    elif word in [f"--{section}" for section in SECTIONS] and rest and rest[0].startswith("@"):
        read_file(line, rest.pop(0), rest, section=name)
    elif word.startswith("--") and name:
        key = SHORT_FLAGS.get(name, name.replace("-", "_"))
        value_follows = rest and not rest[0].startswith(("--", "@"))
        value = parse_value(text if has_value else rest.pop(0)) if has_value or value_follows else True
        line.flags |= flatten({key: value}, f"--{name if name.isprintable() else repr(name)}")
    else:
        raise ConfigError(f"{word}: not understood; give files as `@ file.toml` and settings as `--key value`")


def read_file(line: CommandLine, word: str, rest: list[str], section: str = "") -> None:
    """Adds the settings of the file behind `@`, which is in the same word or in the next one, to those of a section or of the run."""
    if word == "@" and not rest:
        raise ConfigError(f"{f'--{section} ' if section else ''}@ needs a file behind it")
    path = word[1:] or rest.pop(0)
    line.files |= flatten(read_toml(path), path, f"{section}.") if section else settings_in(path)


def settings_in(path: str) -> Spelled:
    """The settings in a file; those of a run with the place where it lies now."""
    table = read_toml(path)
    return flatten(table | place_of_run(Path(path), table), path)


def place_of_run(path: Path, table: dict[str, Any]) -> dict[str, str]:
    """Name and output_dir of a run that was moved or renamed since its config.toml was written: a run lives where that lies. Empty for
    any other file."""
    name, output_dir, root = table.get("name"), table.get("output_dir"), path.parent.resolve()
    if path.name != "config.toml" or not isinstance(name, str) or not isinstance(output_dir, str) or not is_run(root):
        return {}
    written = Path(output_dir) / name
    if not written.is_absolute() or (written.exists() and written.samefile(root)):
        return {}
    return {"output_dir": str(root.parent), "name": root.name}


def canonical(key: str, value: Any) -> str:
    """The one name of a setting: run-wide keys leave their section, aliases are resolved, a text for a section is that of its first key."""
    section, _, rest = key.partition(".")
    if section in SECTIONS and rest.split(".")[0] in (*RUN_WIDE, "steps"):
        key = rest
    key = ALIASES.get(key, key)
    return SHORTHANDS.get(key, key) if isinstance(value, str) else key


def fitting(base: Spelled, line: CommandLine) -> Spelled:
    """The settings of a run, for a line that may give a loss or credit another `type`: a config.toml has every key. Of that section only
    what the new type has, too, and what was no default of the old one, stays."""
    tree = field_tree(RLConfig)
    given = {canonical(key, value): value for layer in (line.files, line.variables, line.flags) for key, (value, _) in layer.items()}
    for key, kind in given.items():
        section = key.removesuffix(".type")
        if key in base and key != section and base[key][0] != kind:
            of = {tag: model.model_fields for model in models_in(tree[section].annotation) for tag in tags(model)}
            old, new = of.get(base[key][0], {}), of.get(kind, {})
            of_default = {name for name, info in old.items() if base.get(f"{section}.{name}", (None,))[0] == without_none(info.default)}
            dropped = {f"{section}.{name}" for name in old if name not in new or name in of_default}
            base = {name: value for name, value in base.items() if name not in dropped}
    return base


def merge(line: CommandLine) -> tuple[dict[str, Any], Spelled, dict[str, str]]:
    """One nested table of settings, the same by their canonical keys, and faults by key: two spellings of a setting that differ, naming
    both places, and settings that have no place. Flags win over variables, and those over files."""
    settings: Spelled = {}
    faults: dict[str, str] = {}
    for layer in (line.files, line.variables, line.flags):
        spelled: dict[str, str] = {}
        for key, (value, place) in layer.items():
            name = canonical(key, value)
            other = spelled.setdefault(name, key)
            if other != key and layer[other][0] != value:
                both = f"{setting_text(other, layer[other][0])} ({layer[other][1]}) and {setting_text(key, value)} ({place})"
                faults[name] = f"{both}\n    are one setting with two values; keep one of them"
            settings[name] = value, place
    nested: dict[str, Any] = {}
    for name, (value, place) in settings.items():
        try:
            check_number(name, settings)
            place_value(nested, name.split("."), value)
        except KeyError as error:
            faults[name] = f"{setting_text(name, value)} ({place})\n    {error.args[0]}"
    return nested, settings, faults


def check_number(key: str, settings: Spelled) -> None:
    """Raises KeyError for a key with the number of an element where no list is given."""
    if not (found := NUMBERED.fullmatch(key)):
        return
    section, number, rest = found.groups()
    info = field_tree(RLConfig).get(section)
    if info and typing.get_origin(info.annotation) is list and not isinstance(settings.get(section, ("",))[0], list):
        raise KeyError(f"no list is given that has an element {number}; for one: --{section}.{rest}, for several: [[{section}]] in a file")


def place_value(table: Any, keys: list[str], value: Any) -> None:
    """Sets a dotted key in nested tables. In a list, a number picks the element, and a list of one needs none."""
    first, *rest = keys
    if isinstance(table, list):
        if first.isdigit() and int(first) < len(table):
            return place_value(table[int(first)], rest, value)
        if len(table) == 1:
            return place_value(table[0], keys, value)
        raise KeyError(f"which of the {len(table)} is meant? Put its number before `{first}`: 0 to {len(table) - 1}")
    if not rest:
        if not (value is True and isinstance(table.get(first), dict)):
            table[first] = value
        return None
    if table.get(first) is True or first not in table:
        table[first] = {}
    if not isinstance(table[first], (dict, list)):
        raise KeyError(f"`{first}` is a value, not a table")
    return place_value(table[first], rest, value)


def build(line: CommandLine, optional: Collection[str] = (), *, outside: bool = False) -> RLConfig:
    """The checked configuration. Raises ConfigError with every fault at once; `optional` keys may be missing or not fit the others.

    `outside`: whether the files and functions that it names must be there; environments that are missing are told beside other faults.
    """
    nested, settings, faults = merge(line)
    faults |= without_value(settings)
    config = validate(nested, settings, faults)
    lines = [*line.faults, *faults.values()]
    if config and "quick" in line.switches:
        config = shrink(config)
    if config and not line.faults:  # what could not be read may have had the rest
        doubtful = in_doubt(faults)
        found = chain(check(config), outside_faults(config) if outside else ())
        found = (fault for fault in found if fault[0] not in optional and holds_anyway(fault, doubtful))
        lines += [f"{setting_text(key, value)}\n    {remedy}" for key, value, remedy in found]
    if config and config.sft and outside:
        lines += flags_without_effect(line.flags)
    if config and lines and outside and not config.sft:
        lines += id_faults(config.orchestrator.env_ids)
    raise_all(lines)
    assert config, "settings without a fault make a configuration"
    return config


def flags_without_effect(flags: Spelled) -> list[str]:
    """Faults of flags that supervised fine-tuning does not read. In a file they may stand: it can be that of a run of the same model."""
    faults = []
    for key, (value, place) in flags.items():
        name = canonical(key, value)
        if name.split(".")[0] in ("orchestrator", "inference", "max_lag"):
            twin = f"sft.{name.rpartition('.')[2]}"
            remedy = f"did you mean {twin}?" if twin in field_tree(RLConfig) else "leave it out"
            faults.append(
                f"{setting_text(name, value)} ({place})\n    is of reinforcement learning, and fine-tuning does not read it; {remedy}"
            )
    return faults


def without_none(value: Any) -> Any:
    """TOML has no null: a key that is absent has its default, and every None of ours is a default."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_toml(config: RLConfig) -> str:
    """The resolved configuration; `from_toml(to_toml(c)) == c`."""
    return tomli_w.dumps(without_none(config))


def write_config(path: Path, config: RLConfig) -> None:
    """Writes the resolved configuration, from which a process can be started."""
    write_file(path, to_toml(config).encode())


def from_toml(path: Path) -> RLConfig:
    """A run's resolved configuration from its config.toml."""
    return build(parse_args([f"@{path}"]))


def fail(program: str, message: str) -> NoReturn:
    """Prints a message and ends the program with 2."""
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


def load_config(
    args: list[str],
    program: str = "rl",
    *,
    variables: Mapping[str, str] | None = None,
    usage: str = USAGE,
    given: Spelled | None = None,
    optional: Collection[str] = (),
    base: Path | None = None,
) -> tuple[RLConfig, CommandLine]:
    """The configuration of a command. Ends the program for --help, --schema, --dry-run, and with code 2 for any fault.

    `variables` is the environment for a command that makes a configuration; a process of a run reads its config.toml alone. `given` are
    settings that the command's own flags stand for; `optional` is as in `build`; `base` is a run's config.toml, below all files.
    """
    try:
        for word, topic in zip(args, [*args, ""][1:], strict=True):
            if word in ("-h", "--help"):
                print_help(program, usage, "" if topic.startswith(("-", "@")) else topic)
                raise SystemExit(0)
        line = parse_args(args, variables)
        for switch in OF_RUNS & {*line.switches, "" if line.resume is None else "resume"}:
            if f"--{switch}" not in usage:
                why = ": a process goes on where its run is, and `rl` alone resumes or deletes one" if usage is PROCESS_USAGE else ""
                line.faults.append(f"--{switch}: `{program}` has no such switch; leave it out{why}")
        line.files = (fitting(settings_in(str(base)), line) if base else {}) | line.files
        line.flags = (given or {}) | line.flags
        if "schema" in line.switches:
            print(json.dumps(RLConfig.model_json_schema(), indent=2))
            raise SystemExit(0)
        config = build(line, optional, outside=variables is not None)
    except ConfigError as error:
        fail(program, str(error))
    for warning in warnings_of(config):
        print(f"{program}: warning: {warning}", file=sys.stderr)
    if "dry-run" in line.switches:
        ids = config.orchestrator.env_ids
        for text in id_faults(ids) or fetched(ids):
            print(f"{program}: {text}", file=sys.stderr)
        print(to_toml(config), end="")
        raise SystemExit(0)
    return config, line
