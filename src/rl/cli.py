"""From the command line and TOML files to a checked RLConfig, or to one message with every fault in it.

`@ run.toml` fills the whole configuration, `--trainer @ t.toml` one section, `--trainer.optim.lr 1e-6` one key. Files merge left to
right, flags win. A run-wide key inside a section is that run-wide key; two spellings of one setting with different values are a fault.
"""

import difflib
import re
import reprlib
import sys
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import BaseModel, ValidationError

from rl.cli_help import USAGE, accepts_switch, field_tree, models_in, print_help, tags, type_name
from rl.config import RUN_WIDE, SECTIONS, RLConfig, check, warn_about
from rl.credentials import hidden, is_secret_key
from rl.quick import made_quick

ALIASES = {"steps": "max_steps", "learning_rate": "trainer.optim.lr", "trainer.learning_rate": "trainer.optim.lr"}
SHORT_FLAGS = {f"{section}-{kind}": f"{section}.{kind}" for section in ("trainer", "inference") for kind in ("gpus", "cpus")}
SHORT_FLAGS["strict-parity"] = "trainer.strict_parity"

MAX_FILE_BYTES = 1 << 24
MAX_STEP = 999_999
"""Files of a step have six digits in their names."""
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 200
SHORT.maxdict = SHORT.maxlist = 12

Spelled = dict[str, tuple[Any, str]]
"""Dotted key as the user spelled it -> (value, where it stands)."""


class ConfigError(Exception):
    """The configuration cannot be used; the message lists every fault with its remedy."""


@dataclass
class CommandLine:
    """What the arguments say, before anything is checked."""

    files: Spelled = field(default_factory=dict)
    flags: Spelled = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    resume: int | None = None
    """Step to resume at; -1: the newest; None: no --resume."""


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted keys; lists, empty tables and those with a dot in a key of their own are values."""
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and not any("." in name for name in value):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
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


def parse_args(args: list[str]) -> CommandLine:
    """Splits arguments into files, flags and switches. Raises ConfigError for what is none of them."""
    line, rest = CommandLine(), list(args)

    def load(path: str, section: str = "") -> None:
        prefix = f"{section}." if section else ""
        line.files |= {key: (value, path) for key, value in flatten(read_toml(path), prefix).items()}

    def value_follows() -> bool:
        return bool(rest) and not rest[0].startswith(("--", "@"))

    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            if word == "@" and not rest:
                raise ConfigError("@ needs a file behind it")
            load(word[1:] or rest.pop(0))
        elif word in ("-h", "--help", "--dry-run", "--schema", "--clean", "--quick"):
            line.switches.add(word.lstrip("-")[:1] if word == "-h" else word[2:])
        elif word == "--resume":
            line.resume = int(rest.pop(0)) if rest and re.fullmatch("[0-9]{1,20}", rest[0]) else -1
            if line.resume > MAX_STEP:
                raise ConfigError(f"--resume {line.resume}: there is no such step; the last possible one is {MAX_STEP}")
        elif word.startswith("--") and word[2:3] not in ("", "="):
            name, has_value, text = word[2:].partition("=")
            if name in SECTIONS and not has_value and rest and rest[0].startswith("@"):
                at = rest.pop(0)
                if at == "@" and not rest:
                    raise ConfigError(f"--{name} @ needs a file behind it")
                load(at[1:] or rest.pop(0), name)
                continue
            key = SHORT_FLAGS.get(name, name.replace("-", "_"))
            value = parse_value(text) if has_value else parse_value(rest.pop(0)) if value_follows() else True
            for leaf, leaf_value in flatten({key: value}).items():
                line.flags[leaf] = (leaf_value, f"--{name if name.isprintable() else repr(name)}")
        else:
            raise ConfigError(f"{word}: not understood; give files as `@ file.toml` and settings as `--key value`")
    return line


def canonical(key: str) -> str:
    """The one name of a setting: run-wide keys leave their section, aliases are resolved."""
    section, _, rest = key.partition(".")
    if section in SECTIONS and rest.split(".")[0] in (*RUN_WIDE, "steps"):
        key = rest
    return ALIASES.get(key, key)


def merge(line: CommandLine) -> tuple[dict[str, Any], dict[str, str]]:
    """One nested table of settings, and for every key where it stands. Flags win over files.

    Raises ConfigError naming both places when two spellings of one setting differ.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    faults = []
    for layer in (line.files, line.flags):
        spelled: dict[str, str] = {}
        for key, (value, place) in layer.items():
            name = canonical(key)
            other = spelled.get(name)
            if other is not None and layer[other][0] != value:
                faults.append(f"{said(other, layer[other][0])} ({layer[other][1]}) and {said(key, value)} ({place})\n"
                              "    are one setting with two values; keep one of them")  # fmt: skip
            spelled[name] = key
            values[name], places[name] = value, place
    nested: dict[str, Any] = {}
    for name, value in values.items():
        try:
            place_value(nested, name.split("."), value)
        except KeyError as error:
            faults.append(f"{said(name, value)} ({places[name]})\n    {error.args[0]}")
    if faults:
        raise ConfigError(report(faults))
    return nested, places


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


def did_you_mean(key: str) -> str:
    """What an unknown key was probably meant to be."""
    known = list(field_tree(RLConfig)) + list(ALIASES)
    plain = ".".join(part for part in key.split(".") if not part.isdigit())
    last = plain.split(".")[-1]
    same_leaf = sorted((name for name in known if name.split(".")[-1] == last), key=lambda name: name.count("."))  # the general first
    close = same_leaf or difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    if not close:
        leaves = {name.split(".")[-1]: name for name in reversed(known)}
        close = [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=1, cutoff=0.7)]
    return f"did you mean {' or '.join(close[:2])}?" if close else "see --help for all keys"


def without_tags(parts: list[str]) -> str:
    """The key of a place that pydantic names: in a union it puts the class's `type` among the keys."""
    tree, kept = field_tree(RLConfig), list[str]()
    for part in parts:
        info = tree.get(".".join(name for name in kept if not name.isdigit()))
        if not (info and any(part in tags(model) for model in models_in(info.annotation))):
            kept.append(part)
    return ".".join(kept)


def fault_lines(error: ValidationError, places: dict[str, str], known: set[str]) -> list[str]:
    """Pydantic's findings in the user's terms: key, value, place, remedy. Without those about `known` keys."""
    lines = []
    for finding in error.errors():
        key = without_tags([str(part) for part in finding["loc"]])
        if finding["type"] == "union_tag_invalid":
            kinds = finding["ctx"]["expected_tags"].replace("'", "")
            lines.append(f"{key}.type = {finding['ctx']['tag']!r}\n    give one of {kinds}")
            continue
        if any(f"{key}.".startswith(f"{name}.") for name in known):
            continue
        named = [place for name, place in places.items() if name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.")]
        where = f" ({named[0]})" if named else ""
        if finding["type"] == "extra_forbidden":
            secret = is_secret_key(key) and "secrets are read from environment variables: WANDB_API_KEY, HF_TOKEN"
            remedy = f"unknown key; {secret or did_you_mean(key)}"
        elif finding["type"] == "missing":
            lines.append(f"{key}{where}\n    is missing; set it")
            continue
        else:
            remedy = finding["msg"].removeprefix("Value error, ")
        lines.append(f"{said(key, finding['input'])}{where}\n    {remedy}")
    return lines


def switch_faults(line: CommandLine) -> dict[str, str]:
    """Keys that are true or false but want another type: pydantic would take `--seed` without a value for 1."""
    tree = field_tree(RLConfig)
    faults = {}
    for key, (value, place) in {**line.files, **line.flags}.items():
        info = tree.get(".".join(part for part in canonical(key).split(".") if not part.isdigit()))
        if isinstance(value, bool) and info and not accepts_switch(info.annotation):
            faults[canonical(key)] = f"{key} ({place})\n    needs a value: {type_name(info.annotation)}"
    return faults


def said(key: str, value: Any) -> str:
    """`key = value` for a fault: in one line, not too long, and without secrets."""
    return f"{key if key.isprintable() else repr(key)} = {SHORT.repr(hidden(key, value))}"


def report(faults: list[str]) -> str:
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    return "\n".join([f"{count} in the configuration", *(f"  {fault}" for fault in faults)])


def build(line: CommandLine, optional: Collection[str] = ()) -> RLConfig:
    """The checked configuration. Raises ConfigError with every fault at once; `optional` keys may be missing or not fit the others."""
    nested, places = merge(line)
    switches = switch_faults(line)
    faults = list(switches.values())
    try:
        config = RLConfig.model_validate(nested)
    except ValidationError as error:
        faults += fault_lines(error, places, known=set(switches))
    if faults:
        raise ConfigError(report(faults))
    config = made_quick(config) if "quick" in line.switches else config
    between = [f"{said(key, value)}\n    {remedy}" for key, value, remedy in check(config) if key not in optional]
    if between:
        raise ConfigError(report(between))
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
    return build(parse_args([f"@{path}"]))


def fail(program: str, message: str) -> NoReturn:
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


def load_config(
    args: list[str], program: str = "rl", *, usage: str = USAGE, given: Spelled | None = None, optional: Collection[str] = ()
) -> tuple[RLConfig, CommandLine]:
    """The configuration of a command. Ends the program for --help, --schema, --dry-run, and with code 2 for any fault.

    `given` are settings that the command's own flags stand for; `optional` is as in `build`.
    """
    try:
        if {"-h", "--help"} & set(args):
            print_help(program, RLConfig, usage)
            raise SystemExit(0)
        line = parse_args(args)
        line.flags = (given or {}) | line.flags
        if "schema" in line.switches:
            import json

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
