"""recipe.toml: what is in it, and a copy of a recipe with its environments."""

import pytest

from rl.commands import recipe
from rl.commands.recipe import CLONE, ENVIRONMENTS, RECIPES, copy, program, read
from rl.system.errors import RunError

SOUND = """
title = "Sums"
environments = ["adding"]
stages = ["sft @ sft.toml", "@ run.toml"]
measure = "eval/adding/reward_mean"
minutes = 1.5
machine = "two cores"
[curves]
steps = [0, 10, 20]
1 = [0.1, 0.8, 0.9]
2 = [0.2, 0.6, 1]
"""
CURVES = SOUND[SOUND.index("[curves]") :]
NOT_RUN = SOUND.replace(CURVES, 'aim = "0.4 -> 0.7 (https://example.com)"\n')


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The folder of two recipes, `sums` and `words`, beside their environment."""
    for name in ("sums", "words"):
        folder = tmp_path / "recipes" / name
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "recipe.toml").write_text(SOUND)
        (folder / "run.toml").write_text('name = "last"\n')
    (tmp_path / "environments" / "adding" / "__pycache__").mkdir(parents=True)
    (tmp_path / "environments" / "adding" / "adding.py").write_text("")
    monkeypatch.setattr(recipe, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(recipe, "ENVIRONMENTS", tmp_path / "environments")
    return tmp_path / "recipes"


def test_a_recipe_that_was_never_run_has_an_aim_in_place_of_curves(recipes):
    (recipes / "sums" / "recipe.toml").write_text(NOT_RUN)
    recipe = read("sums")
    assert (recipe.aim, recipe.curves) == ("0.4 -> 0.7 (https://example.com)", {})
    assert (recipe.time, recipe.ends) == ("~1.5", "not run")


@pytest.mark.parametrize(
    ("lasts", "least"),
    [([0.9], 0.75), ([0.9, 0.92], 0.75), ([0.9, 0.92, 0.91], 0.85), ([0.9, 0.6, 0.8], 0.3)],
)
def test_a_run_may_end_below_the_worst_seed_by_as_much_as_the_seeds_differ_and_by_a_least_distance(
    recipes, lasts, least
):
    text = SOUND.partition("1 = ")[0] + "".join(
        f"{seed} = [0, 0, {last}]\n" for seed, last in enumerate(lasts, 1)
    )
    (recipes / "sums" / "recipe.toml").write_text(text)
    assert read("sums").least == pytest.approx(least)


def test_a_copy_has_the_recipe_and_its_environments_and_replaces_nothing(recipes, tmp_path):
    target = tmp_path / "deep" / "mine"
    copy("sums", read("sums"), target)
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert files == {"recipe.toml", "run.toml", "environments/adding/adding.py"} and not list(
        target.rglob("__pycache__")
    )
    with pytest.raises(RunError, match="mine exists already; name another folder, or move it away"):
        copy("sums", read("sums"), target)


def test_rl_is_run_by_uv_in_a_clone_and_as_it_is_from_a_wheel(tmp_path, monkeypatch):
    assert (RECIPES, ENVIRONMENTS) == (CLONE / "configs" / "recipes", CLONE / "environments")
    assert (
        program(CLONE / "sums") == "uv run rl"
        and program(tmp_path / "sums") == f"uv run --project {CLONE} rl"
    )
    monkeypatch.setattr(recipe, "IS_INSTALLED", True)
    assert program(tmp_path / "sums") == "rl"
