"""A process that runs a run on Ray, with stand-ins for `rl node`: `python -m
tests.cluster.ray_driver CONFIG`."""

import sys
from pathlib import Path

from rl.cluster.ray import run
from rl.config.command_line import from_toml
from rl.launch.children import Children

STAND_IN = Path(__file__).with_name("stand_in.py")


def main() -> int:
    children = Children()
    children.stop_on_signals()
    config = from_toml(Path(sys.argv[1]))
    return run(config, config.run_dir, children, (str(STAND_IN),))


if __name__ == "__main__":
    sys.exit(main())
