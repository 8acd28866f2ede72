"""From files, environment variables and flags to a checked RLConfig, or to one message with every fault in it.

`@ run.toml` fills the whole configuration, `--trainer @ t.toml` one section, `RL__TRAINER__OPTIM__LR=1e-6` and `--trainer.optim.lr 1e-6`
one key. Files merge left to right; environment variables win over files, flags over both. A run-wide key inside a section is that
run-wide key; two spellings of one setting with different values in files, in variables or in flags are a fault.
"""

import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import BaseModel, ValidationError

from rl.config.check import check, check_functions, warn_about
from rl.config.faults import ALIASES, Spelled, fault_lines, raise_all, setting_text, without_value
from rl.config.help import USAGE, print_help
from rl.config.quick import shrink
from rl.config.run import MAX_STEP, RUN_WIDE, SECTIONS, RLConfig
from rl.system.errors import ConfigError

SHORT_FLAGS = {f"{section}-{kind}": f"{section}.{kind}" for section in ("trainer", "inference") for kind in ("gpus", "cpus")}
SHORT_FLAGS["strict-parity"] = "trainer.strict_parity"
SWITCHES = ("--dry-run", "--schema", "--clean", "--quick")
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

    Raises ConfigError for a file that cannot be read, and for an argument that is neither a file, a flag nor a switch.
    """
    line, rest = CommandLine(), list(args)
    for name, text in (variables or {}).items():
        if name.startswith(VARIABLE_PREFIX):
            line.variables |= flatten({name.removeprefix(VARIABLE_PREFIX).lower().replace("__", "."): parse_value(text)}, name)
    while rest:
        word = rest.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        if word.startswith("@"):
            read_file(line, word, rest)
        elif word in SWITCHES:
            line.switches.add(name)
        elif word == "--resume":
            line.resume = int(rest.pop(0)) if rest and re.fullmatch("[0-9]{1,20}", rest[0]) else -1
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
    return line


def read_file(line: CommandLine, word: str, rest: list[str], section: str = "") -> None:
    """Adds the settings of the file behind `@`, which is in the same word or in the next one, to those of a section or of the run."""
    if word == "@" and not rest:
        raise ConfigError(f"{f'--{section} ' if section else ''}@ needs a file behind it")
    path = word[1:] or rest.pop(0)
    line.files |= flatten(read_toml(path), path, f"{section}." if section else "")


def canonical(key: str) -> str:
    """The one name of a setting: run-wide keys leave their section, aliases are resolved."""
    section, _, rest = key.partition(".")
    if section in SECTIONS and rest.split(".")[0] in (*RUN_WIDE, "steps"):
        key = rest
    return ALIASES.get(key, key)


def merge(line: CommandLine) -> tuple[dict[str, Any], Spelled]:
    """One nested table of settings, and the same by their canonical keys. Flags win over variables, and those over files.

    Raises ConfigError naming both places when two spellings of one setting differ.
    """
    settings: Spelled = {}
    faults = []
    for layer in (line.files, line.variables, line.flags):
        spelled: dict[str, str] = {}
        for key, (value, place) in layer.items():
            name = canonical(key)
            other = spelled.setdefault(name, key)
            if other != key and layer[other][0] != value:
                faults.append(f"{setting_text(other, layer[other][0])} ({layer[other][1]}) and {setting_text(key, value)} ({place})\n"
                              "    are one setting with two values; keep one of them")  # fmt: skip
            settings[name] = value, place
    nested: dict[str, Any] = {}
    for name, (value, place) in settings.items():
        try:
            place_value(nested, name.split("."), value)
        except KeyError as error:
            faults.append(f"{setting_text(name, value)} ({place})\n    {error.args[0]}")
    raise_all(faults)
    return nested, settings


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


def build(line: CommandLine, optional: Collection[str] = (), *, stored: bool = False) -> RLConfig:
    """The checked configuration. Raises ConfigError with every fault at once; `optional` keys may be missing or not fit the others.

    Of a `stored` one the user's functions are not checked: their files may have changed since, and only a process that calls them minds.
    """
    nested, settings = merge(line)
    empty = without_value(settings)
    faults = list(empty.values())
    try:
        config = RLConfig.model_validate(nested)
    except ValidationError as error:
        faults += fault_lines(error, settings, known=empty)
    raise_all(faults)
    config = shrink(config) if "quick" in line.switches else config
    found = [*check(config), *([] if stored else check_functions(config))]
    raise_all([f"{setting_text(key, value)}\n    {remedy}" for key, value, remedy in found if key not in optional])
    return config


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


def from_toml(path: Path) -> RLConfig:
    """A run's resolved configuration from its config.toml."""
    return build(parse_args([f"@{path}"]), stored=True)


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
) -> tuple[RLConfig, CommandLine]:
    """The configuration of a command. Ends the program for --help, --schema, --dry-run, and with code 2 for any fault.

    `variables` is the environment for a command that makes a configuration; a process of a run reads its config.toml alone. `given` are
    settings that the command's own flags stand for; `optional` is as in `build`.
    """
    try:
        for word, topic in zip(args, [*args, ""][1:], strict=True):
            if word in ("-h", "--help"):
                print_help(program, usage, "" if topic.startswith(("-", "@")) else topic)
                raise SystemExit(0)
        line = parse_args(args, variables)
        line.flags = (given or {}) | line.flags
        if "schema" in line.switches:
            print(json.dumps(RLConfig.model_json_schema(), indent=2))
            raise SystemExit(0)
        config = build(line, optional)
    except ConfigError as error:
        fail(program, str(error))
    warn_about(config)
    if "dry-run" in line.switches:
        print(to_toml(config), end="")
        raise SystemExit(0)
    return config, line
