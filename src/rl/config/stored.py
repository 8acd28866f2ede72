"""The configuration that a run directory holds, and where the run lies now: it may have been moved or renamed since."""

from pathlib import Path

from rl.config.command_line import from_toml, read_toml
from rl.config.run import RLConfig
from rl.run_dir.paths import RunDir
from rl.system.errors import ConfigError, RunError


def stored_config(root: Path) -> RLConfig:
    """The configuration that a run was last started with, and where it lies now. Raises RunError."""
    path = root / "config.toml"
    try:
        return from_toml(path)
    except ConfigError as error:
        raise RunError(f"{path} was not written by this version of rl:\n{error}") from None


def as_written(root: Path) -> RLConfig:
    """The same, and where it lay then. Raises RunError."""
    config, table = stored_config(root), read_toml(str(root / "config.toml"))
    return config.model_copy(update={key: table[key] for key in ("name", "output_dir") if key in table})


def run_dir_of(root: Path, config: RLConfig) -> RunDir:
    """A run's directory where it lies now. Versions outside of it bear the name that the run had when it was last started."""
    if not config.trainer.weights.dir:
        return RunDir(root, root / "weights")
    named_so = config.run_dir.weights_dir
    return RunDir(root, named_so if named_so.exists() else as_written(root).run_dir.weights_dir)
