"""Flags that several subcommands have, and the configuration of a command with flags of its own."""

import os
from collections.abc import Collection, Iterable
from typing import Any

from rl.commands.policy_spec import Source, split_run
from rl.config.base import MAX_RUN_NAME
from rl.config.command_line import CommandLine, load_config
from rl.config.faults import Spelled
from rl.config.help import SETTINGS
from rl.config.options import Option, option_lines, take
from rl.config.run import RLConfig

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


def name_of_play(config: RLConfig, line: CommandLine, labels: Iterable[str], source: Source, policy: str | None) -> str:
    """The name of what a command plays: the run's where one is given, or else environments and policy. The default name has the
    configuration's model, which `policy` may not be."""
    return config.name if line.gives("name") or not policy else f"{'+'.join(labels)}-{source.slug}"[:MAX_RUN_NAME]


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
