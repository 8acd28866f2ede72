"""Command lines as texts, and the configurations and faults that they make."""

import pytest

from rl.config.command_line import build, parse_args
from rl.config.run import RLConfig
from rl.system.errors import ConfigError


def flags(*args: object) -> list[str]:
    """The words of these arguments; one that begins with a flag may hold several."""
    return [
        word for arg in map(str, args) for word in (arg.split() if arg.startswith("--") else [arg])
    ]


def made(*args: object, **variables: str) -> RLConfig:
    """The configuration of a command line."""
    return build(parse_args(flags(*args), variables))


def faults(*args: object, **variables: str) -> str:
    """What is said of a command line with faults."""
    with pytest.raises(ConfigError) as error:
        made(*args, **variables)
    return str(error.value)
