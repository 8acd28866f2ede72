"""Reads the configuration in a run directory, which may have been moved or renamed since the run
was started."""

import shlex
import sys
from pathlib import Path

from rl.config.command_line import from_toml, read_toml
from rl.config.run import RLConfig
from rl.run_dir.paths import RunDir, is_model
from rl.system.errors import ConfigError, RunError


def stored_config(root: Path) -> RLConfig:
    """Returns the configuration that a run was last started with, with its current location.
    Raises RunError."""
    path = root / "config.toml"
    try:
        config = from_toml(path)
    except ConfigError as error:
        raise RunError(f"{path} was not written by this version of rl:\n{error}") from None
    truncates = config.truncates(sys.maxsize, replayed=True)
    if truncates and "max_kept" not in read_toml(str(path)).get("trainer", {}):
        config.trainer.max_kept = 0  # older versions of rl trained so
    return config


def as_written(root: Path) -> RLConfig:
    """Returns the same configuration with the location at that start. Raises RunError."""
    config, table = stored_config(root), read_toml(str(root / "config.toml"))
    return config.model_copy(
        update={key: table[key] for key in ("name", "output_dir") if key in table}
    )


def server_of(root: Path) -> Path:
    """Returns the directory of the `rl serve` that a directory belongs to: its own, or that of a
    client's model below `models`."""
    return root.parents[1] if is_model(root) else root


def rl_dir_of(run_dir: RunDir, config: RLConfig) -> RunDir:
    """Returns the directory of the `rl` that runs a run's processes: its own, or for a client's
    model that of its server."""
    server = server_of(run_dir.root) if config.serve else run_dir.root
    return run_dir if server == run_dir.root else RunDir(server, server / "weights")


def continued_by(root: Path, config: RLConfig) -> str:
    """Returns the command that continues a run; clients go on with their models when their
    server runs."""
    if config.serve:
        return f"rl serve @ {shlex.quote(str(server_of(root) / 'config.toml'))}"
    return f"rl @ {shlex.quote(str(root / 'config.toml'))} --resume"


def run_dir_of(root: Path, config: RLConfig) -> RunDir:
    """Returns a run's current directory. Versions outside of it are under the name that the run
    had when it was last started."""
    if not config.trainer.weights.dir:
        return RunDir(root, root / "weights")
    named_so = config.run_dir.weights_dir
    return RunDir(root, named_so if named_so.exists() else as_written(root).run_dir.weights_dir)
