"""`python -m rl.inference.check CONFIG` checks `[inference.vllm]` with vLLM's own parser; exit
code 1 with a line per fault."""

import sys
from pathlib import Path

from rl.config.command_line import from_toml
from rl.inference.main import prepare, runs_on_cpu
from rl.system.errors import ConfigError


def main() -> None:
    """Runs the check, without a model or a server."""
    config = from_toml(Path(sys.argv[1]))
    prepare(runs_on_cpu(config), None)  # before anything imports vLLM
    from rl.inference.engine_args import parse_engine_args

    try:
        parse_engine_args(config.inference.vllm)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
