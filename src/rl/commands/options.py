"""The flags that a subcommand has beside the configuration's keys."""

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from rl.commands.policy_spec import Source, split_run
from rl.config.base import MAX_RUN_NAME
from rl.config.command_line import CommandLine, fail, load_config
from rl.config.faults import Spelled
from rl.config.help import SETTINGS, fit
from rl.config.run import RLConfig
from rl.system.errors import ConfigError

WIDTH = 27


@dataclass(frozen=True)
class Option:
    """A flag of a command. No key of the configuration has its name."""

    name: str
    value: str
    """What follows it: N is a number from 1, JSON an object, A|B one of these words, any other name text; empty for a switch."""
    help: str

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


POLICY = Option("policy", "SPEC", "what to play; default: the model of the configuration")
ENDPOINT = (
    Option("endpoint-model", "NAME", "the model to ask an endpoint for; default: the only one that it has. Also SPEC = URL#NAME"),
    Option("api-key-var", "VAR", "environment variable with the endpoint's key; default, over https: OPENAI_API_KEY"),
)
CONCURRENCY = Option("concurrency", "N", "rollouts that are played at once; default: 64")
POLICY_SPECS = """
SPEC is one of
  name or folder              a model on the Hugging Face hub, or a folder in its format
  outputs/x                   the newest weights of a run; its configuration is used where no other is given
  outputs/x@12                its version 12 (0: the base model)
  outputs/x@best              the version that was best in its evaluations; with several of them outputs/x@best:EVAL
  https://host/v1             any OpenAI-compatible endpoint
"""


def take(program: str, args: list[str], options: tuple[Option, ...], text: str = "") -> tuple[dict[str, Any], list[str]]:
    """Splits off a command's own flags: (their values by key, the other arguments). Ends the program with 2 for a fault, and for --help
    after printing `text`, if there is any."""
    if text and {"-h", "--help"} & set(args):
        print(fit(text))
        raise SystemExit(0)
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {option.key: None for option in options}
    rest, left = [], list(args)
    try:
        while left:
            word = left.pop(0)
            name, has_value, given = word[2:].partition("=")
            option = by_name.get(name.replace("_", "-")) if word.startswith("--") else None
            if option is None:
                rest.append(word)
            elif not option.value:
                values[option.key] = True
            elif has_value or (left and not left[0].startswith("--")):
                values[option.key] = parse(option, given if has_value else left.pop(0))
            else:
                raise ConfigError(f"--{option.name} needs a value: {option.value}")
    except ConfigError as error:
        fail(program, str(error))
    return values, rest


def parse(option: Option, text: str) -> Any:
    """The value of a flag. Raises ConfigError for text that cannot be one."""
    choices, fault = option.value.split("|"), f"--{option.name} {text}"
    if option.value == "N":
        if not (text.isascii() and text.isdigit()) or int(text) < 1:
            raise ConfigError(f"{fault}: needs a number from 1")
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


def name_of_play(config: RLConfig, line: CommandLine, labels: Iterable[str], source: Source, policy: str | None) -> str:
    """The name of what a command plays: the run's where one is given, or else environments and policy. The default name has the
    configuration's model, which `policy` may not be."""
    return config.name if line.gives("name") or not policy else f"{'+'.join(labels)}-{source.slug}"[:MAX_RUN_NAME]


def option_lines(options: tuple[Option, ...]) -> str:
    """The help of a command's own flags, a line for each."""
    return "\n".join(f"  {f'--{option.name} {option.value}'.strip():<{WIDTH}} {option.help}" for option in options)


def usage(head: str, options: tuple[Option, ...], tail: str = "") -> str:
    """The help of a command above the configuration's keys."""
    return f"{head}\n\n{option_lines(options)}\n{tail}\n{SETTINGS}"


def load(
    program: str, args: list[str], options: tuple[Option, ...], text: str, *, given: Spelled | None = None, optional: Collection[str] = ()
) -> tuple[RLConfig, CommandLine, dict[str, Any]]:
    """The configuration of a command, and its own flags. Without a file, that of the run which is named as the policy is used."""
    values, rest = take(program, args, options)
    run = split_run(values["policy"]) if values.get("policy") else None
    if run and not any(word.startswith("@") for word in rest):
        rest = ["@", str(run[0] / "config.toml"), *rest]
    config, line = load_config(rest, program, variables=os.environ, usage=text, given=given, optional=optional)
    config.sft = None  # of a run of supervised fine-tuning only the model is used: here something plays
    return config, line, values
