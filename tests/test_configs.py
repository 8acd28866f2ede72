"""Every configuration in the repository is valid, and means what its file name says."""

import math
import os
import re
import shlex
import subprocess
import sys
from itertools import dropwhile
from pathlib import Path

import pytest
from PIL import Image
from recipe_curves import HEAD, drawn_from, table

from rl.cluster.submit import dry_run
from rl.commands.collect import OPTIONS
from rl.commands.recipe import RECIPES, commands, copy, names, read
from rl.config.command_line import build, from_toml, load_config_or_exit, parse_args, take, to_toml
from rl.config.environment_id import read_id
from rl.config.plan import Plan, plan
from rl.launch import devices
from rl.system.machine import Machine

CLUSTERS = ("slurm", "kubernetes", "ray")
CONFIGS = [path for path in sorted(Path("configs").glob("*.toml")) if path.stem not in CLUSTERS]
SETTINGS_OF_RECIPES = [
    path for path in sorted(RECIPES.glob("*/*.toml")) if path.name != "recipe.toml"
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_prints_a_configuration_that_resolves_to_itself(path, tmp_path):
    rl = Path(sys.executable).parent / "rl"
    # it says that a model is not here, and asks nobody
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [rl, "@", path, "--dry-run"], env=offline, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "config.toml").write_text(done.stdout)
    config = from_toml(tmp_path / "config.toml")
    assert config == build(parse_args(["@", str(path)])) and to_toml(config) == done.stdout


@pytest.mark.parametrize(
    "path", sorted(Path("configs/why_not").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_run_that_fails_on_purpose_is_the_small_quickstart_with_one_mistake(path):
    base, config = (
        build(parse_args(["@", "configs/why_not/base.toml", "@", str(one)]))
        for one in (path.with_stem("base"), path)
    )
    sections = ("model", "orchestrator", "trainer")
    changed = sum(getattr(config, key) != getattr(base, key) for key in sections)
    assert config.name == path.stem and changed == (path.stem != "base")


@pytest.mark.parametrize(
    "path", SETTINGS_OF_RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_file_of_a_copied_recipe_is_valid(path, tmp_path, monkeypatch, capsys):
    name = path.parent.name
    copy(name, read(name), tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    words = ["@", path.name, "--dry-run"]
    monkeypatch.setattr("rl.cluster.submit.resolve_model", lambda *_, **__: "")
    with pytest.raises(SystemExit) as end:
        load_config_or_exit(words, variables={}, dry_run=dry_run)
    out, err = capsys.readouterr()
    assert end.value.code == 0 and build(parse_args(words)).name in out
    # the stage before makes them
    absent = (
        "sft.dataset = rollouts.jsonl: not on this machine; only the start looks for it elsewhere"
    )
    assert err in ("", f"rl: {absent}\n")


@pytest.mark.parametrize(
    ("name", "engine", "divided"),
    [
        *((name, name, Plan(2, 2)) for name in CLUSTERS),
        ("recipes/gsm8k/qwen3_30b_a3b", "slurm", Plan(1, 1)),
    ],
)
def test_a_cluster_is_divided_as_its_file_says(name, engine, divided):
    config = build(parse_args(["@", f"configs/{name}.toml"]))
    assert config.cluster and config.cluster.engine == engine and plan(config) == divided


@pytest.mark.parametrize(
    ("name", "gpus", "trainer", "inference"),
    [
        ("single_gpu", 1, [0], [0]),
        ("eight_gpus", 8, [0, 1, 2, 3], [4, 5, 6, 7]),
        ("recipes/gsm8k/run", 1, [0], [0]),
        ("recipes/gsm8k/qwen3_4b", 8, [0, 1, 2, 3], [4, 5, 6, 7]),
    ],
)
def test_gpus_are_split_as_the_file_says(name, gpus, trainer, inference):
    config = build(parse_args(["@", f"configs/{name}.toml"]))
    split = devices.split(config, Machine(gpus=[*map(str, range(gpus))], cores=[*range(16)]))
    assert (split.trainer.gpus, split.inference.gpus) == (trainer, inference)
    assert split.ranks == len(trainer)


@pytest.mark.parametrize("name", names())
def test_what_recipe_toml_says_goes_together(name):
    recipe = read(name)
    assert "@" in recipe.stages[-1].split(), "the last stage needs the file of a run"
    assert bool(recipe.aim) != bool(recipe.curves), "either [curves] or, if it was never run, aim"
    assert recipe.aim or (recipe.seeds and recipe.steps)
    for seed, values in recipe.curves.items():
        assert seed == "steps" or seed.isdecimal()
        assert len(values) == len(recipe.curves["steps"]) and all(map(math.isfinite, values))


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_whole(name, tmp_path, monkeypatch):
    """Its copy has the configurations of all stages, which `--check --short` can cut, and finds
    their environments."""
    recipe = read(name)
    copy(name, recipe, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    for words in map(shlex.split, recipe.stages):
        if "@" in words:
            settings = [*dropwhile(lambda word: not word.startswith(("-", "@")), words)]
            if words[0] == "collect":
                settings = take("rl collect", settings, OPTIONS)[1]
            config = build(parse_args([*settings, "--seed", "1", "--max_steps", "2"]))
            assert not (config.sft and config.sft.epochs), (
                "max_steps, which --short cuts, does not end this stage"
            )
            for env_id in config.orchestrator.env_ids:
                read_id(env_id)
    labels = {"eval": [entry.label for entry in config.orchestrator.eval]}
    source, label, _ = recipe.measure.split("/")
    assert label in labels.get(source, [label]), "the last stage does not measure it"
    text = Path("README.md").read_text()
    assert set(re.findall(r"https://[^\s)]+", recipe.aim)) <= set(
        re.findall(r"https://[^\s)]+", text)
    ), "the README names no source of the aim"
    for command in (f"rl recipe {name}", *commands(recipe, "rl")):
        assert re.search(rf"{re.escape(command)}(?!\w)", text), (
            f"the README does not show {command}"
        )


@pytest.mark.parametrize("name", [name for name in names() if read(name).curves])
def test_the_picture_of_a_recipe_shows_its_curves(name):
    with Image.open(RECIPES / name / "curve.png") as picture:
        assert picture.text["Description"] == drawn_from(read(name)), (
            f"uv run scripts/recipe_curves.py {name}"
        )


def test_the_page_of_recipes_has_all_of_them():
    assert f"\n{HEAD}{table()}\n" in Path("docs/recipes.md").read_text(), (
        "uv run scripts/recipe_curves.py"
    )
