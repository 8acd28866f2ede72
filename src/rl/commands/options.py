"""The flags that a subcommand has beside the configuration's keys."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rl.cli import CommandLine, ConfigError, Spelled, fail, load_config
from rl.cli_help import SETTINGS
from rl.commands.policy import split_run
from rl.config import RLConfig

WIDTH = 27


@dataclass(frozen=True)
class Option:
    """A flag of a command. No key of the configuration has its name."""

    name: str
    value: str
    """What stands behind it in the help: N for a number from 1, empty for a switch."""
    help: str

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


POLICY = Option("policy", "SPEC", "whom to play; default: the model of the configuration")
ENDPOINT = (
    Option("endpoint-model", "NAME", "the model to ask an endpoint for; default: the only one that it has. Also SPEC = URL#NAME"),
    Option("api-key-var", "VAR", "environment variable with the endpoint's key; default: OPENAI_API_KEY"),
)
CONCURRENCY = Option("concurrency", "N", "rollouts that are played at once; default: 64")
POLICY_SPECS = """
SPEC is one of
  name or folder              a model on the Hugging Face hub, or a folder in its format
  outputs/x                   the newest weights of a run; its configuration is used where no other is given
  outputs/x@12, outputs/x@best   its version 12 (0: the base model); the version that was best in its evaluations, with several
                              of them outputs/x@best:EVAL
  https://host/v1             any OpenAI-compatible endpoint
"""


def take(program: str, args: list[str], options: tuple[Option, ...]) -> tuple[dict[str, Any], list[str]]:
    """Splits off a command's own flags: (their values by key, the other arguments). Ends the program with 2 for a fault."""
    by_name = {option.name: option for option in options}
    values: dict[str, Any] = {option.key: None for option in options}
    rest, left = [], list(args)
    try:
        while left:
            word = left.pop(0)
            name, has_value, text = word[2:].partition("=")
            option = by_name.get(name.replace("_", "-")) if word.startswith("--") else None
            if option is None:
                rest.append(word)
            elif not option.value:
                values[option.key] = True
            elif has_value or (left and not left[0].startswith("--")):
                values[option.key] = parse(option, text if has_value else left.pop(0))
            else:
                raise ConfigError(f"--{option.name} needs a value: {option.value}")
    except ConfigError as error:
        fail(program, str(error))
    return values, rest


def parse(option: Option, text: str) -> Any:
    if option.value != "N":
        return text
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"--{option.name} {text}: needs a number from 1")
    return int(text)


def usage(head: str, options: tuple[Option, ...], tail: str = "") -> str:
    """The help of a command above the configuration's keys."""
    own = "\n".join(f"  {f'--{option.name} {option.value}'.strip():<{WIDTH}} {option.help}" for option in options)
    return f"{head}\n\n{own}\n{tail}\n{SETTINGS}"


def load(
    program: str, args: list[str], options: tuple[Option, ...], text: str, *, given: Spelled | None = None, optional: Collection[str] = ()
) -> tuple[RLConfig, CommandLine, dict[str, Any]]:
    """The configuration of a command, and its own flags. A run that is named as the policy lends its configuration if no file is given."""
    values, rest = take(program, args, options)
    run = split_run(values["policy"]) if values.get("policy") else None
    if run and not any(word.startswith("@") for word in rest):
        rest = ["@", str(run[0] / "config.toml"), *rest]
    config, line = load_config(rest, program, usage=text, given=given, optional=optional)
    config.sft = None  # a run of supervised fine-tuning lends its model; here something plays
    return config, line, values
