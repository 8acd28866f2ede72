"""Turns files, environment variables and flags into a checked RLConfig, or into one message with
every fault.

`@ run.toml` fills the whole configuration, `--trainer @ t.toml` one section,
`RL__TRAINER__OPTIM__LR=1e-6` and `--trainer.optim.lr 1e-6` one key. Files merge left to right;
environment variables override files, and flags override both. A run-wide key inside a section sets
the run-wide key. Two spellings of one setting with different values within the files, the variables
or the flags are a fault.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import BaseModel

from rl.config.check import check, warnings_of
from rl.config.environment_id import fetched, id_faults
from rl.config.faults import Spelled, raise_all, setting_text, too_large, without_value
from rl.config.fields import field_tree, models_in, tags, takes_text_alone
from rl.config.help import PROCESS_USAGE, READS, USAGE, print_help
from rl.config.hints import without_numbers
from rl.config.outside import outside_faults
from rl.config.quick import shrink
from rl.config.run import ALIASES, MAX_STEP, RUN_WIDE, SECTIONS, RLConfig
from rl.config.validation import holds_anyway, in_doubt, validate
from rl.run_dir.files import write_file
from rl.run_dir.paths import is_run
from rl.system.errors import ConfigError

SHORT_FLAGS = {
    f"{section}-{kind}": f"{section}.{kind}"
    for section in ("trainer", "inference")
    for kind in ("gpus", "cpus")
}
SHORT_FLAGS["strict-parity"] = "trainer.strict_parity"
SHORTHANDS = {
    "model": "model.name",
    "orchestrator.environment": "orchestrator.environment.id",
    "orchestrator.eval": "orchestrator.eval.id",
    "orchestrator.credit": "orchestrator.credit.type",
    "trainer.loss": "trainer.loss.type",
}
"""Section -> the key that is meant when the section is given as plain text."""
SWITCHES = ("--dry-run", "--schema", "--clean", "--quick", "--view")
A_STEP = re.compile("[0-9]{1,20}")
OF_RUNS = {"resume", "clean", "quick", "view"}
"""Switches that a command accepts only if its help names them."""
VARIABLE_PREFIX = "RL__"

MAX_FILE_BYTES = 1 << 24


@dataclass
class CommandLine:
    """The settings of files, environment variables and arguments, unchecked, by the keys as
    written."""

    files: Spelled = field(default_factory=dict)
    variables: Spelled = field(default_factory=dict)
    flags: Spelled = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    resume: int | None = None
    """Step to resume at; -1: the newest checkpoint; None: no --resume."""
    faults: list[str] = field(default_factory=list)
    """Unreadable files, and arguments that are neither a file, a flag nor a switch."""

    def layers(self, faults: dict[str, str]) -> list[Spelled]:
        """Returns files, variables and flags by canonical keys. Adds a fault for two spellings
        of a setting with different values."""
        return [
            by_canonical_key(layer, faults) for layer in (self.files, self.variables, self.flags)
        ]

    def gives(self, key: str) -> bool:
        """Returns whether a setting is given anywhere."""
        return any(key in layer for layer in self.layers({}))


def flatten(table: dict[str, Any], place: str, prefix: str = "") -> Spelled:
    """Flattens nested tables into dotted keys; lists, empty tables and tables with a dot in a
    key are kept as values."""
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
            raise ConfigError(
                f"{path}: not a configuration file: larger than {MAX_FILE_BYTES >> 20} MiB"
            )
        # Editors of Windows begin a file with a mark of its encoding.
        return tomllib.loads(
            data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        )
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: is a folder; give a TOML file, such as {path.rstrip('/')}/run.toml"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, TOML, path or number
        other = path.endswith((".yaml", ".yml", ".json"))
        remedy = (
            "; write it as TOML: [section] on one line, key = value on the next" if other else ""
        )
        raise ConfigError(f"{path}: not readable as TOML: {error}{remedy}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not readable as TOML: nested too deeply") from None


def parse_value(key: str, text: str) -> Any:
    """Parses the value of a flag or variable as TOML (1e-6, true, [1, 2], {a = 1}); any other
    text is a plain string. Settings of type str keep numbers as text: `--name 1.10` is "1.10",
    and `--name 1e3` is "1e3"."""
    value = parse_toml(text)
    field = field_tree(RLConfig).get(without_numbers(canonical(key, value)))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if field and is_number and takes_text_alone(field.annotation) else value


def parse_toml(text: str) -> Any:
    """Parses a TOML value; returns text that is not valid TOML unchanged."""
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text


def parse_args(args: list[str], variables: Mapping[str, str] | None = None) -> CommandLine:
    """Splits arguments into files, flags and switches, and reads settings from environment
    variables.

    RL__TRAINER__OPTIM__LR is trainer.optim.lr; its value is parsed like a flag's."""
    line, rest = CommandLine(), list(args)
    for name, text in (variables or {}).items():
        if name.startswith(VARIABLE_PREFIX):
            key = name.removeprefix(VARIABLE_PREFIX).lower().replace("__", ".")
            line.variables |= flatten({key: parse_value(key, text)}, name)
    while rest:
        try:
            parse_word(line, rest.pop(0), rest)
        except ConfigError as error:
            line.faults.append(str(error))
    return line


def parse_word(line: CommandLine, word: str, rest: list[str]) -> None:
    """Adds an argument to `line`, and removes the arguments that belong to it from `rest`.
    Raises ConfigError."""
    name, has_value, text = word.removeprefix("--").partition("=")
    if word.startswith("@"):
        read_file(line, word, rest)
    elif word in SWITCHES:
        line.switches.add(name)
    elif word.startswith("--") and name == "resume":
        step = text if has_value else rest.pop(0) if rest and A_STEP.fullmatch(rest[0]) else ""
        if has_value and not A_STEP.fullmatch(step):
            raise ConfigError(
                f"{word}: give a step (0 or more), or --resume alone for the newest checkpoint"
            )
        line.resume = int(step) if step else -1
        if line.resume > MAX_STEP:
            raise ConfigError(
                f"--resume {line.resume}: no such step; the highest possible step is {MAX_STEP}"
            )
    elif word in [f"--{section}" for section in SECTIONS] and rest and rest[0].startswith("@"):
        read_file(line, rest.pop(0), rest, section=name)
    elif word.startswith("--") and name:
        key = SHORT_FLAGS.get(name, name.replace("-", "_"))
        field = field_tree(RLConfig).get(without_numbers(canonical(key, "")))
        is_text = field and takes_text_alone(field.annotation) and rest[:1] != ["@"]
        value_follows = rest and not rest[0].startswith("--" if is_text else ("--", "@"))
        is_switch = not (field or has_value or value_follows)
        if is_switch and (near := get_close_matches(word, (*SWITCHES, "--resume"), cutoff=0.8)):
            raise ConfigError(f"{word}: there is no such flag; did you mean {near[0]}?")
        value = (
            parse_value(key, text if has_value else rest.pop(0))
            if has_value or value_follows
            else True
        )
        line.flags |= flatten({key: value}, f"--{name if name.isprintable() else repr(name)}")
    else:
        raise ConfigError(
            f"{word}: not understood; give files as `@ file.toml` and settings as `--key value`"
        )


def read_file(line: CommandLine, word: str, rest: list[str], section: str = "") -> None:
    """Adds the settings of the file after `@`, in the same or the next argument, to those of a
    section or of the run."""
    if word == "@" and not rest:
        raise ConfigError(f"{f'--{section} ' if section else ''}@ needs a file name after it")
    path = word[1:] or rest.pop(0)
    line.files |= flatten(read_toml(path), path, f"{section}.") if section else settings_in(path)


def settings_in(path: str) -> Spelled:
    """Returns the settings in a file; for a run's config.toml, with the run's current location."""
    table = read_toml(path)
    return flatten(table | place_of_run(Path(path), table), path)


def place_of_run(path: Path, table: dict[str, Any]) -> dict[str, str]:
    """Returns name and output_dir of a run that was moved or renamed after its config.toml was
    written, taken from where that file is now; empty for any other file."""
    name, output_dir, root = table.get("name"), table.get("output_dir"), path.parent.resolve()
    if (
        path.name != "config.toml"
        or not isinstance(name, str)
        or not isinstance(output_dir, str)
        or not is_run(root)
    ):
        return {}
    written = Path(output_dir) / name
    if not written.is_absolute() or (written.exists() and written.samefile(root)):
        return {}
    return {"output_dir": str(root.parent), "name": root.name}


def canonical(key: str, value: Any) -> str:
    """Returns the one name of a setting: run-wide keys without a section, aliases resolved, and
    SHORTHANDS where a section is text."""
    section, _, rest = key.partition(".")
    if section in SECTIONS and rest.split(".")[0] in (*RUN_WIDE, "steps"):
        key = rest
    key = ALIASES.get(key, key)
    return SHORTHANDS.get(key, key) if isinstance(value, str) else key


def by_canonical_key(layer: Spelled, faults: dict[str, str]) -> Spelled:
    """Returns a layer by canonical keys. Adds a fault that names both places for two spellings
    of a setting with different values."""
    settings: Spelled = {}
    spelled: dict[str, str] = {}
    for key, (value, place) in layer.items():
        name = canonical(key, value)
        other = spelled.setdefault(name, key)
        if other != key and layer[other][0] != value:
            both = (
                f"{setting_text(other, layer[other][0])} ({layer[other][1]}) and "
                f"{setting_text(key, value)} ({place})"
            )
            faults[name] = f"{both}\n    set the same setting to two values; keep one of them"
        settings[name] = value, place
    return settings


def without_replaced_types(base: Spelled, line: CommandLine) -> Spelled:
    """Returns the settings of a run, adapted to a command line that may change the `type` of a
    loss or credit. A config.toml has every key, so of such a section only keys that the new type
    has as well and that differ from the old type's default are kept."""
    tree = field_tree(RLConfig)
    given = {key: value for layer in line.layers({}) for key, (value, _) in layer.items()}
    for key, kind in given.items():
        section = key.removesuffix(".type")
        if key in base and key != section and base[key][0] != kind:
            of = {
                tag: model.model_fields
                for model in models_in(tree[section].annotation)
                for tag in tags(model)
            }
            old, new = of.get(base[key][0], {}), of.get(kind, {})
            of_default = {
                name
                for name, info in old.items()
                if base.get(f"{section}.{name}", (None,))[0] == without_none(info.default)
            }
            dropped = {f"{section}.{name}" for name in old if name not in new or name in of_default}
            base = {name: value for name, value in base.items() if name not in dropped}
    return base


def build(
    line: CommandLine, optional: Collection[str] = (), *, outside: bool = False, plays: bool = False
) -> RLConfig:
    """Returns the checked configuration. Raises ConfigError with all faults; `optional` keys may be
    missing or conflict with others.

    `outside`: whether the files and functions that it names must exist; missing environments are
    reported only with other faults. `plays`: whether environments are played, also with the
    settings of a run that plays none.
    """
    faults: dict[str, str] = {}
    layers = line.layers(faults)
    for layer in layers:
        faults |= without_value(layer) | too_large(layer)
    config = validate(layers, faults)
    lines = [*line.faults, *faults.values()]
    if config and "quick" in line.switches:
        config = shrink(config)
    if config and not line.faults:  # an unreadable file may hold settings that the checks need
        doubtful = in_doubt(faults)
        found = chain(check(config), outside_faults(config) if outside else ())
        found = (
            fault for fault in found if fault[0] not in optional and holds_anyway(fault, doubtful)
        )
        lines += [f"{setting_text(key, value)}\n    {remedy}" for key, value, remedy in found]
    if config and outside and not (plays or config.plays):
        lines += flags_without_effect(config, line.flags)
    if config and lines and outside and config.plays:
        lines += id_faults(config.orchestrator.env_ids)
    raise_all(lines)
    assert config, "settings without a fault make a configuration"
    return config


def flags_without_effect(config: RLConfig, flags: Spelled) -> list[str]:
    """Returns faults of flags that fine-tuning, or a run of recorded rollouts, does not read.
    They are allowed in files, which may be shared with other runs."""
    kind, program, why = "sft", "rl sft", "applies only to reinforcement learning"
    if config.recorded:
        kind, program, why = "recorded", "rl train", "is not read by a run of recorded rollouts"
    # of the rollouts with its name
    has_credit = config.recorded and any(env.credit for env in config.orchestrator.environment)
    faults = []
    for key, (value, place) in flags.items():
        name = canonical(key, value)
        is_read = name in READS[program] or (
            has_credit and name.startswith("orchestrator.environment")
        )
        if name.split(".")[0] in ("orchestrator", "inference", "max_lag") and not is_read:
            twin = f"{kind}.{name.rpartition('.')[2]}"
            remedy = f"did you mean {twin}?" if twin in field_tree(RLConfig) else "leave it out"
            faults.append(f"{setting_text(name, value)} ({place})\n    {why}; {remedy}")
    return faults


def without_none(value: Any) -> Any:
    """Removes None values: TOML has no null, and every None in the configuration is a default."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def to_toml(config: RLConfig) -> str:
    """Returns the resolved configuration as TOML; `from_toml` reads back an equal one."""
    return tomli_w.dumps(without_none(config))


def write_config(path: Path, config: RLConfig) -> None:
    """Writes the resolved configuration, which a process can be started from."""
    write_file(path, to_toml(config).encode())


def from_toml(path: Path) -> RLConfig:
    """Reads a run's resolved configuration from its config.toml."""
    return build(parse_args([f"@{path}"]))


def fail(program: str, message: str) -> NoReturn:
    """Prints a message to stderr and exits with code 2."""
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


def load_config_or_exit(
    args: list[str],
    program: str = "rl",
    *,
    variables: Mapping[str, str] | None = None,
    usage: str = USAGE,
    given: Spelled | None = None,
    optional: Collection[str] = (),
    base: Path | None = None,
    dry_run: Callable[[RLConfig], str] | None = None,
    plays: bool = False,
) -> tuple[RLConfig, CommandLine]:
    """Loads the configuration of a command. Exits after --help, --schema or --dry-run, and with
    code 2 on any fault.

    `variables` is the environment for a command that creates a configuration; a process of a run
    reads only its config.toml. `given` are settings implied by the command's own flags; `optional`
    is as in `build`; `base` is a run's config.toml, which all files override. `dry_run` returns
    what --dry-run prints, by default the configuration; `plays` is as in `build`.
    """
    try:
        for word, topic in zip(args, [*args, ""][1:], strict=True):
            if word in ("-h", "--help"):
                print_help(program, usage, "" if topic.startswith(("-", "@")) else topic)
                raise SystemExit(0)
        line = parse_args(args, variables)
        for switch in OF_RUNS & {*line.switches, "" if line.resume is None else "resume"}:
            if f"--{switch}" not in usage:
                why = (
                    ": a process continues its run; only `rl` resumes or deletes a run"
                    if usage is PROCESS_USAGE
                    else ""
                )
                line.faults.append(f"--{switch}: `{program}` has no such switch; leave it out{why}")
        line.files = (
            without_replaced_types(settings_in(str(base)), line) if base else {}
        ) | line.files
        line.flags = (given or {}) | line.flags
        if "schema" in line.switches:
            print(json.dumps(RLConfig.model_json_schema(), indent=2))
            raise SystemExit(0)
        config = build(line, optional, outside=variables is not None, plays=plays)
    except ConfigError as error:
        fail(program, str(error))
    for warning in warnings_of(config):
        print(f"{program}: warning: {warning}", file=sys.stderr)
    if "dry-run" in line.switches:
        ids = config.orchestrator.env_ids
        for text in id_faults(ids) or fetched(ids):
            print(f"{program}: {text}", file=sys.stderr)
        print((dry_run or to_toml)(config), end="")
        raise SystemExit(0)
    return config, line
