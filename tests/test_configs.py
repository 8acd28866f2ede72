"""Every configuration in the repository is valid, and means what its file name says."""

from pathlib import Path

import pytest

from rl import devices
from rl.cli import build, from_toml, parse_args, to_toml

CONFIGS = sorted(Path("configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_valid_and_resolves_to_itself(path, tmp_path):
    config = build(parse_args(["@", str(path)]))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert from_toml(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("name", "gpus", "trainer", "inference"), [("single_gpu", 1, [0], [0]), ("eight_gpus", 8, [0, 1, 2, 3], [4, 5, 6, 7])]
)
def test_gpus_are_split_as_the_file_says(name, gpus, trainer, inference):
    config = build(parse_args(["@", f"configs/{name}.toml"]))
    split = devices.split(config, devices.Machine(gpus=[str(i) for i in range(gpus)], cores=list(range(16))))
    assert (split.trainer.gpus, split.inference.gpus, split.ranks) == (trainer, inference, len(trainer))
