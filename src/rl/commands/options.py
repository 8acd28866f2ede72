"""Flags shared by several subcommands, and loading the configuration of a command with its own
flags."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rl.cluster.submit import tell_model
from rl.commands.policy_spec import PolicySource, is_url, named_run, split_run
from rl.config.base import MAX_RUN_NAME
from rl.config.command_line import (
    CommandLine,
    Option,
    fail,
    load_config_or_exit,
    need_names,
    option_lines,
    options,
    take,
    to_toml,
)
from rl.config.faults import Spelled
from rl.config.help import SETTINGS
from rl.config.run import RLConfig
from rl.config.stored import run_dir_of, stored_config
from rl.run_dir.paths import RunDir
from rl.system.errors import ConfigError, RunError
from rl.system.linux import bind

(POLICY,) = options("""
policy SPEC: policy to play; default: the model of the configuration
""")
ENDPOINT = options("""
endpoint-model NAME: model to request from an endpoint; default: its only one. Also SPEC =
    URL#NAME
api-key-var VAR: environment variable with the endpoint's key; default, over https:
    OPENAI_API_KEY
""")
(CONCURRENCY,) = options("""
concurrency N: rollouts to play at once; default: 64
""")
POLICY_SPECS = """
SPEC is one of
  name or folder              a model on the Hugging Face hub, or a folder in its format
  outputs/x                   the newest weights of a run; its configuration is used if no other is
                              given
  outputs/x@12                version 12 of that run (0: the base model)
  outputs/x@best              the best version in its evaluations; if they differ, use
                              outputs/x@best:EVAL
  https://host/v1             any OpenAI-compatible endpoint
"""


def name_of_play(
    config: RLConfig,
    line: CommandLine,
    labels: Iterable[str],
    source: PolicySource,
    policy: str | None,
) -> str:
    """Returns the name of what a command plays: the configured name if given or without a
    policy, otherwise environments and policy. The default name contains the configuration's
    model, which `policy` may not be."""
    return (
        config.name
        if "name" in line.settings() or not policy
        else f"{'+'.join(labels)}-{source.slug}"[:MAX_RUN_NAME]
    )


def usage(head: str, options: tuple[Option, ...], tail: str = "") -> str:
    """Returns the part of a command's help above the configuration keys."""
    return f"{head}\n\n{option_lines(options)}\n{tail}\n{SETTINGS}"


def load(
    program: str,
    args: list[str],
    options: tuple[Option, ...],
    text: str,
    *,
    preset: Spelled | None = None,
    optional: Collection[str] = (),
) -> tuple[RLConfig, CommandLine, dict[str, Any]]:
    """Loads a command's configuration and its own flags. Without a file, uses the configuration
    of the run given as policy."""
    values, rest = take(program, args, options)
    policy = values.get("policy") or ""
    run = split_run(policy)
    if run and not any(word.startswith("@") for word in rest):
        rest = ["@", str(run[0] / "config.toml"), *rest]

    def dry_run(config: RLConfig) -> str:
        config.sft = config.recorded = None
        if not is_url(policy) and values.get("rollouts", True):
            config.model.name = ("" if run else policy) or config.model.name
            if config.starts_inference:
                bind(config.inference.host, config.inference.port, "inference.port").close()
            tell_model(config)
        return to_toml(config)

    config, line = load_config_or_exit(
        rest,
        program,
        variables=os.environ,
        usage=text,
        given=preset,
        optional=optional,
        dry_run=dry_run,
        plays=True,
    )
    # these commands play the model, also of a run that has none played
    config.sft = config.recorded = None
    return config, line, values


def check_writable(flag: str, path: Path) -> None:
    """Raises RunError unless a file or folder can be made there."""
    parent = next(filter(Path.exists, path.absolute().parents))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise RunError(f"{flag} {path}: {parent} is not a folder that can be written; give another")


def runs_given(
    program: str, args: list[str], options: tuple[Option, ...], text: str, count: int = 1
) -> tuple[dict[str, Any], list[Path]]:
    """Splits off a command's own flags. Returns their values by key, and the directories of the
    `count` runs that the other arguments name. Exits with code 2 on a fault."""
    values, rest = take(program, args, options, text)
    which = (
        "which run? Give only its directory" if count == 1 else "which runs? Give two, by directory"
    )
    need_names(
        program, rest, (count,), f"{which} or name, {program} outputs/NAME; {program} --help"
    )
    try:
        return values, [named_run(word) for word in rest]
    except ConfigError as error:
        fail(program, str(error))


def open_run(root: Path) -> tuple[RunDir, RLConfig]:
    """Returns a run's files, and its configuration. Raises RunError."""
    config = stored_config(root)
    return run_dir_of(root, config), config
