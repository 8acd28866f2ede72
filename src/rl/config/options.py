"""Flags of a subcommand that are not configuration keys, and their help."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rl.config.command_line import fail
from rl.config.help import fit
from rl.system.errors import ConfigError

WIDTH = 27
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
        f"  {f'--{option.name} {option.value}'.strip():<{WIDTH}} {option.help}"
        for option in options
    )
