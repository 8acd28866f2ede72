"""Recipes: what a recipe.toml says, where recipes lie, and how one is copied."""

import math
import os
import shlex
import shutil
from pathlib import Path
from statistics import fmean

import msgspec

from rl.config.command_line import read_toml
from rl.run_dir.files import write_directory
from rl.system.errors import ConfigError, RunError
from rl.system.machine import visible_gpus
from rl.system.terminal import did_you_mean

PACKAGE = Path(__file__).parents[1]
CLONE = PACKAGE.parents[1]
IS_INSTALLED = (PACKAGE / "recipes").is_dir()
"""Whether this is a wheel's package, which has the recipes and their environments in it."""
RECIPES, ENVIRONMENTS = (
    (PACKAGE / "recipes", PACKAGE / "environments")
    if IS_INSTALLED
    else (CLONE / "configs" / "recipes", CLONE / "environments")
)
ENOUGH_SEEDS = 3
LEAST_WIDENING, OF_FEW_SEEDS = 0.05, 0.15
"""How far below the worst recorded seed a run may end at least: seeds do not show all that may
happen, and one or two show little of it."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recipe.toml."""

    title: str
    """One line for the list of recipes."""
    environments: list[str]
    """Folders of environments/ that it needs."""
    stages: list[str]
    """Arguments of `rl`, one command after the other, run in the recipe's folder."""
    measure: str
    """Metric of the last stage's run that the curves show; more is better."""
    minutes: float
    """How long one seed takes on `machine`; an estimate if it was never run."""
    machine: str
    teacher: str = ""
    """Arguments of `inference`: a server that the last stage learns from, which may serve what a
    stage before it has trained."""
    curves: dict[str, list[float]] = {}
    """`steps`, and under the number of each seed the measure at these steps."""
    aim: str = ""
    """In place of `curves` for a recipe that was never run: what others reached, and where they
    published it."""

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec reports with the place."""
        if not self.stages or "@" not in self.stages[-1].split():
            raise ValueError(
                '`stages` needs commands, the last with the file of a run: ["@ run.toml"]'
            )
        if bool(self.aim) == bool(self.curves):
            raise ValueError(
                "needs either [curves], the measure by step, or, if it was never run, `aim`, "
                "what others published"
            )
        if self.aim:
            return
        if not (steps := self.curves.get("steps")) or not self.seeds:
            raise ValueError(
                "`curves` needs `steps` and at least one seed: steps = [0, 10], 1 = [0.2, 0.9]"
            )
        for seed, values in self.curves.items():
            if seed != "steps" and not seed.isdecimal():
                raise ValueError(f"`curves.{seed}` is neither `steps` nor the number of a seed")
            if len(values) != len(steps) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"`curves.{seed}` needs one finite number for each of the {len(steps)} steps"
                )

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in self.curves["steps"]]

    @property
    def seeds(self) -> dict[str, list[float]]:
        """The measure at each step, by seed."""
        return {seed: values for seed, values in self.curves.items() if seed != "steps"}

    @property
    def time(self) -> str:
        """`minutes` for a table, marked if they are an estimate."""
        return f"{'~' * bool(self.aim)}{self.minutes:g}"

    @property
    def ends(self) -> str:
        """The means over the seeds of the first and of the last values, for a table."""
        if self.aim:
            return "not run"
        return " -> ".join(
            f"{fmean(values[i] for values in self.seeds.values()):.2f}" for i in (0, -1)
        )

    @property
    def lasts(self) -> tuple[float, float]:
        """The lowest and the highest of the seeds' last values."""
        lasts = [values[-1] for values in self.seeds.values()]
        return min(lasts), max(lasts)

    @property
    def least(self) -> float:
        """The last value that a run must reach to pass for one more seed."""
        low, high = self.lasts
        return low - max(
            LEAST_WIDENING if len(self.seeds) >= ENOUGH_SEEDS else OF_FEW_SEEDS, high - low
        )

    def as_seed(self, points: dict[int, float]) -> list[float]:
        """The measure at each recorded step from a run's measure by step; empty if the run did
        not measure one. A run that ended early, because it had solved its task, keeps its last
        value."""
        end = max(points)
        if any(step not in points for step in self.steps if step < end):
            return []
        return [round(points.get(step, points[end]), 3) for step in self.steps]


def names() -> list[str]:
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.toml"))


def read(name: str) -> Recipe:
    """Returns a recipe. Raises ConfigError if there is none of this name, or for a fault in its
    file."""
    if name not in names():
        raise ConfigError(f"{name}: no such recipe; {did_you_mean(name, names())}")
    path = RECIPES / name / "recipe.toml"
    try:
        return msgspec.convert(read_toml(str(path)), Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def copy(name: str, recipe: Recipe, target: Path) -> None:
    """Copies a recipe and its environments to a new folder, all or nothing. Raises RunError."""
    if target.exists() or target.is_symlink():
        raise RunError(f"{target} exists already; name another folder, or move it away")
    ignore = shutil.ignore_patterns("__pycache__")

    def fill(folder: Path) -> None:
        shutil.copytree(RECIPES / name, folder, ignore=ignore, dirs_exist_ok=True)
        for environment in recipe.environments:
            if not (ENVIRONMENTS / environment).is_dir():
                raise RunError(
                    f"{RECIPES / name / 'recipe.toml'}: environments: there is no "
                    f"{ENVIRONMENTS / environment}; correct the name"
                )
            shutil.copytree(
                ENVIRONMENTS / environment, folder / "environments" / environment, ignore=ignore
            )

    try:
        write_directory(target, fill, new=True)
    except OSError as error:
        raise RunError(f"{target} cannot be made: {error}") from error


def program(folder: Path) -> str:
    """Returns how `rl` is called in a folder: by uv in a clone, whose project uv finds above the
    folder or has to be told."""
    if IS_INSTALLED:
        return "rl"
    words = ["uv", "run"]
    # without them uv puts vLLM's build for CPUs in the place of the one for GPUs
    if visible_gpus(dict(os.environ)):
        words += ["--no-group", "cpu", "--group", "gpu"]
    if CLONE not in folder.resolve().parents:
        words += ["--project", str(CLONE)]
    return shlex.join([*words, "rl"])
