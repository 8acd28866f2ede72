"""Turns files, environment variables and flags into a checked RLConfig, or into one message with
every fault.

`@ run.toml` fills the whole configuration, `--trainer @ t.toml` one section,
`RL__TRAINER__OPTIM__LR=1e-6` and `--trainer.optim.lr 1e-6` one key. Files merge left to right;
environment variables override files, and flags override both. A run-wide key inside a section sets
the run-wide key. Two spellings of one setting with different values within the files, the variables
or the flags are a fault.

A command's own flags, which are no configuration keys, are Options, which `take` splits off.
"""

import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w
from pydantic import ValidationError

from rl.config.check import check, exposure, value_of, warnings_of
from rl.config.environment_id import fetched, id_faults
from rl.config.faults import Spelled, fault_lines, misread, raise_all, setting_text, without_numbers
from rl.config.fields import field_tree, models_in, tags, takes_text_alone, without_none
from rl.config.help import PROCESS_USAGE, READS, USAGE, fit, print_help
from rl.config.outside import hub_data, outside_faults
from rl.config.run import ALIASES, MAX_STEP, RUN_WIDE, SECTIONS, RLConfig, shrink
from rl.run_dir.files import write_file
from rl.run_dir.paths import is_run
from rl.system.errors import ConfigError
from rl.system.terminal import nearest

SHORT_FLAGS = {
    f"{section}-{kind}": f"{section}.{kind}"
    for section in ("trainer", "inference")
    for kind in ("gpus", "cpus")
} | {"strict-parity": "trainer.strict_parity"}
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

    def settings(self) -> Spelled:
        """Returns what is given anywhere by canonical keys; later layers win."""
        return {key: value for layer in self.layers({}) for key, value in layer.items()}


def flatten(table: dict[str, Any], origin: str, prefix: str = "") -> Spelled:
    """Flattens nested tables into dotted keys; lists, empty tables and tables with a dot in a
    key are kept as values."""
    flat: Spelled = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and not any("." in name for name in value):
            flat |= flatten(value, origin, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value, origin
    return flat


def read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: not a configuration file: larger than 16 MiB")
        # Editors of Windows begin a file with a mark of its encoding.
        encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        return tomllib.loads(data.decode(encoding))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: is a folder; give a TOML file, such as {path.rstrip('/')}/run.toml"
        ) from None
    # ValueError: invalid UTF-8, TOML, path or number
    except (OSError, ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{path}: not readable as TOML: {why}; write it as TOML: [section] on one line, "
            "key = value on the next"
        ) from None


def takes_text(key: str, value: Any) -> bool:
    """Returns whether a setting, as spelled in a flag, accepts only texts."""
    info = field_tree(RLConfig).get(without_numbers(canonical(key, value)))
    return bool(info) and takes_text_alone(info.annotation)


def parse_value(key: str, text: str) -> Any:
    """Parses the value of a flag or variable as TOML (1e-6, true, [1, 2], {a = 1}); any other
    text is a plain string. Settings of type str keep numbers as text: `--name 1.10` is "1.10",
    and `--name 1e3` is "1e3"."""
    value = parse_toml(text)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if is_number and takes_text(key, value) else value


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
        ends = "--" if takes_text(key, "") and rest[:1] != ["@"] else ("--", "@")
        if not has_value and rest and not rest[0].startswith(ends):
            has_value, text = "=", rest.pop(0)
        near = nearest(word, (*SWITCHES, "--resume"), cutoff=0.8)
        if near and not has_value and without_numbers(key) not in field_tree(RLConfig):
            raise ConfigError(f"{word}: there is no such flag; did you mean {near}?")
        value = parse_value(key, text) if has_value else True
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
    for key, (value, origin) in layer.items():
        name = canonical(key, value)
        earlier = spelled.setdefault(name, key)
        if earlier != key and layer[earlier][0] != value:
            faults[name] = (
                f"{setting_text(earlier, layer[earlier][0])} ({layer[earlier][1]}) and "
                f"{setting_text(key, value)} ({origin})\n    set the same setting to two values; "
                "keep one of them"
            )
        settings[name] = value, origin
    return settings


def without_replaced_types(base: Spelled, line: CommandLine) -> Spelled:
    """Returns the settings of a run, adapted to a command line that may change the `type` of a
    loss or credit. A config.toml has every key, so of such a section only keys that the new type
    has as well and that differ from the old type's default are kept."""
    for key, (kind, _) in line.settings().items():
        section = key.removesuffix(".type")
        if key in base and key != section and base[key][0] != kind:
            fields = {
                tag: model.model_fields
                for model in models_in(field_tree(RLConfig)[section].annotation)
                for tag in tags(model)
            }
            old, new = fields.get(base[key][0], {}), fields.get(kind, {})
            base = {
                name: (value, origin)
                for name, (value, origin) in base.items()
                if not (info := old.get(name.removeprefix(f"{section}.")))
                or (name.rpartition(".")[2] in new and value != without_none(info.default))
            }
    return base


def build(line: CommandLine, optional: Collection[str] = (), *, outside: bool = False) -> RLConfig:
    """Returns the checked configuration. Raises ConfigError with all faults of single settings,
    or if there are none, with those between settings; `optional` keys may be missing or conflict
    with others.

    `outside`: whether the files and functions that it names must exist.
    """
    from rl.config.sources import load

    faults: dict[str, str] = {}
    layers = line.layers(faults)
    for layer in layers:
        faults |= misread(layer)
    try:
        config = load(layers, faults)
    except ValidationError as error:
        for finding in error.errors():
            if finding["type"] != "default_factory_not_called":  # it needs the faulty ones
                faults = faults | fault_lines(finding, line.settings()) | faults
    raise_all([*line.faults, *faults.values()])
    if "quick" in line.switches:
        config = shrink(config)
    raise_all(
        [
            f"{setting_text(key, value)}\n    {remedy}"
            for key, value, remedy in (*check(config), *(outside_faults(config) if outside else ()))
            if key not in optional
        ]
    )
    return config


def flags_without_effect(config: RLConfig, flags: Spelled) -> Iterator[str]:
    """Yields warnings of flags that fine-tuning, or a run of recorded rollouts, does not read. In
    files, which may be shared with other runs, nobody minds them."""
    program = config.kind.program
    for key, (value, origin) in () if program == "rl" else flags.items():
        name = canonical(key, value)
        # of the rollouts with its name
        is_read = name in READS[program] or (
            config.kind == "recorded"
            and name.startswith("orchestrator.environment")
            and any(env.credit for env in config.orchestrator.environment)
        )
        if name.split(".")[0] in ("orchestrator", "inference", "max_lag") and not is_read:
            twin = f"{config.kind}.{name.rpartition('.')[2]}"
            remedy = f"did you mean {twin}?" if twin in field_tree(RLConfig) else "leave it out"
            text = setting_text(name, value)
            yield f"{text} ({origin}) is not read by `{program}`; {remedy}"


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
    what --dry-run prints, by default the configuration. `plays`: whether environments are played,
    also with the settings of a run that plays none.
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
        config = build(line, optional, outside=variables is not None)
    except ConfigError as error:
        fail(program, str(error))
    unread = () if plays or variables is None else flags_without_effect(config, line.flags)
    effects = [
        f"{setting_text(key, value_of(config, key))} {effect}"
        for key, effect in warnings_of(config)
    ]
    for warning in (*effects, *exposure(config), *unread):
        print(f"{program}: warning: {warning}", file=sys.stderr)
    if "dry-run" in line.switches:
        ids = config.orchestrator.env_ids
        for text in (*(id_faults(ids) or fetched(ids)), *hub_data(config)):
            print(f"{program}: {text}", file=sys.stderr)
        print((dry_run or to_toml)(config), end="")
        raise SystemExit(0)
    return config, line


FLAG_WIDTH = 27
LEAST = {"N": 1, "SEED": 0}
"""The least value of each kind of integer."""


@dataclass(frozen=True)
class Option:
    """A flag of a command, whose name is not a configuration key."""

    name: str
    value: str
    """Kind of value: N is an integer from 1, SEED one from 0, JSON an object, A|B one of these
    words, any other name a text; empty for a switch."""
    help: str

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


def options(table: str) -> tuple[Option, ...]:
    """Reads flags from lines `name VALUE: help`; a line that begins with spaces continues the one
    before. See Option for VALUE."""
    flags = []
    for entry in re.split(r"\n(?! )", table.strip()):
        head, _, text = " ".join(entry.split()).partition(": ")
        name, _, value = head.partition(" ")
        flags.append(Option(name, value, text))
    return tuple(flags)


def take(
    program: str, args: list[str], options: tuple[Option, ...], text: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Splits off a command's own flags. Returns (their values by key, the other arguments).
    Exits with code 2 on a fault; on --help prints `text`, if given, and exits."""
    if text and {"-h", "--help"} & set(args):
        print(fit(text))
        raise SystemExit(0)
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {option.key: None for option in options}
    rest, left = [], list(args)
    try:
        while left:
            word = left.pop(0)
            name, has_value, inline = word[2:].partition("=")
            option = by_name.get(name.replace("_", "-")) if word.startswith("--") else None
            if option is None:
                rest.append(word)
            elif not option.value:
                values[option.key] = True
            elif has_value or (left and not left[0].startswith("--")):
                values[option.key] = parse(option, inline if has_value else left.pop(0))
            else:
                raise ConfigError(f"--{option.name} needs a value: {option.value}")
    except ConfigError as error:
        fail(program, str(error))
    return values, rest


def need_names(program: str, words: list[str], numbers: Collection[int], which: str) -> list[str]:
    """Returns the words that are left of a command line if they are names, as many as `numbers`
    allow, and neither flags nor files. Exits with code 2 otherwise, and says `which`."""
    if len(words) not in numbers or any(word.startswith(("-", "@")) for word in words):
        fail(program, which)
    return words


def parse(option: Option, text: str) -> Any:
    """Parses the value of a flag. Raises ConfigError if the text is invalid."""
    choices, fault = option.value.split("|"), f"--{option.name} {text}"
    if not text:
        raise ConfigError(f"--{option.name} is empty: it needs a value, {option.value}")
    if option.value in LEAST:
        if not (text.isascii() and text.isdigit()) or int(text) < LEAST[option.value]:
            raise ConfigError(f"{fault}: needs an integer of at least {LEAST[option.value]}")
        return int(text)
    if option.value == "JSON":
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{fault}: not JSON ({error}); give '{{\"key\": value}}'") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{fault}: give an object, '{{\"key\": value}}'")
        return value
    if len(choices) > 1 and text not in choices:
        raise ConfigError(f"{fault}: give {' or '.join(choices)}")
    return text


def option_lines(options: tuple[Option, ...]) -> str:
    """Returns the help of a command's own flags, one line each."""
    return "\n".join(
        f"  {f'--{option.name} {option.value}'.strip():<{FLAG_WIDTH}} {option.help}"
        for option in options
    )
