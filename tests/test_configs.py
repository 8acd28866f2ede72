"""Every configuration in the repository is valid, and means what its file name says."""

import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.command_line import build, from_toml, parse_args, to_toml
from rl.config.plan import Plan, plan
from rl.launch import devices
from rl.system.machine import Machine

CLUSTERS = ("slurm", "kubernetes", "ray")
CONFIGS = [path for path in sorted(Path("configs").glob("*.toml")) if path.stem not in CLUSTERS]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_prints_a_configuration_that_resolves_to_itself(path, tmp_path):
    rl = Path(sys.executable).parent / "rl"
    done = subprocess.run([rl, "@", path, "--dry-run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.toml").write_text(done.stdout)
    config = from_toml(tmp_path / "config.toml")
    assert config == build(parse_args(["@", str(path)])) and to_toml(config) == done.stdout


@pytest.mark.parametrize("path", sorted(Path("configs/why_not").glob("*.toml")), ids=lambda path: path.stem)
def test_a_run_that_fails_on_purpose_is_the_small_quickstart_with_one_mistake(path):
    base, config = (build(parse_args(["@", "configs/why_not/base.toml", "@", str(one)])) for one in (path.with_stem("base"), path))
    changed = [key for key in ("model", "orchestrator", "trainer") if getattr(config, key) != getattr(base, key)]
    assert config.name == path.stem and len(changed) == (path.stem != "base")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_divided_as_its_file_says(name):
    config = build(parse_args(["@", f"configs/{name}.toml"]))
    assert config.cluster and config.cluster.engine == name and plan(config) == Plan(trainers=2, servers=2)


@pytest.mark.parametrize(
    ("name", "gpus", "trainer", "inference"), [("single_gpu", 1, [0], [0]), ("eight_gpus", 8, [0, 1, 2, 3], [4, 5, 6, 7])]
)
def test_gpus_are_split_as_the_file_says(name, gpus, trainer, inference):
    config = build(parse_args(["@", f"configs/{name}.toml"]))
    split = devices.split(config, Machine(gpus=[str(i) for i in range(gpus)], cores=list(range(16))))
    assert (split.trainer.gpus, split.inference.gpus, split.ranks) == (trainer, inference, len(trainer))
