"""`rl recipe`: lists recipes, copies one to start from, or checks that one still gives its
recorded curve."""

import contextlib
import itertools
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from rl.config.command_line import (
    build,
    fail,
    need_names,
    option_lines,
    options,
    parse_args,
    read_toml,
    take,
)
from rl.launch.children import Children
from rl.run_dir.access_token import VARIABLE
from rl.run_dir.files import write_directory
from rl.system.children import PYTHON, Stopped
from rl.system.errors import ConfigError, RunError
from rl.system.linux import end_with_parent
from rl.system.machine import visible_gpus
from rl.system.terminal import did_you_mean, table

OPTIONS = options("""
to FOLDER: folder of the copy; must not exist yet; default: ./NAME
check: run all stages, and compare the end of the curve with the recorded seeds
short: with --check: two steps of each stage that trains, to see that all of them work
seed SEED: with --check: seed of the stages; default: that of their files
output FOLDER: with --check: new folder to run in; default: outputs/recipes/NAME-1, NAME-2, ...
""")
HELP = f"""usage: rl recipe [NAME] [--to FOLDER]
       rl recipe NAME --check [--short] [--seed SEED] [--output FOLDER]

A recipe is a task with settings, and the curves of one or more seeds: how far a model got. Without
a name, lists all recipes: minutes of one seed on the machine that recipe.toml names, how many seeds
were recorded, and the measure, mostly a reward, before -> after the last stage. Of a recipe that
was `not run` the minutes are estimated (~), and its README says what others published. With a name,
copies the recipe and its environments, and prints the commands that train it; change the copy into
your own.

--check trains one in a new folder and compares the last value of the measure with the recorded
ones. It passes unless it is lower than the worst seed's by more than the seeds differ, or by 0.05
if they differ less (by 0.15 if one or two were recorded). Exit code 0: passed, 1: not. It also
prints the curve as a line of recipe.toml, to record one more seed.

{option_lines(OPTIONS)}
"""
SHORT_STEPS = "2"
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


# Files -------------------------------------------------------------------------------------------


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
    """Returns a recipe, whose file tests/test_configs.py checks. Raises ConfigError if there is
    none of this name."""
    if name not in names():
        raise ConfigError(f"{name}: no such recipe; {did_you_mean(name, names())}")
    return msgspec.convert(read_toml(str(RECIPES / name / "recipe.toml")), Recipe)


def copy(name: str, recipe: Recipe, target: Path) -> None:
    """Copies a recipe and its environments to a new folder, all or nothing. Raises RunError."""
    if target.exists() or target.is_symlink():
        raise RunError(f"{target} exists already; name another folder, or move it away")
    ignore = shutil.ignore_patterns("__pycache__")

    def fill(folder: Path) -> None:
        shutil.copytree(RECIPES / name, folder, ignore=ignore, dirs_exist_ok=True)
        for environment in recipe.environments:
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


# The command ------------------------------------------------------------------------------------


def main(args: list[str], children: Children) -> int:
    values, rest = take("rl recipe", args, OPTIONS, HELP)
    need_names("rl recipe", rest, (0, 1), f"give the name of one recipe, {', '.join(names())}")
    flags = {key for key, value in values.items() if value is not None}
    is_check = "check" in flags
    if flags and (not rest or "to" in flags if is_check else flags != {"to"} or not rest):
        fail(
            "rl recipe",
            "--to is for a copy, --short, --seed and --output are for --check, and each "
            "needs NAME; see rl recipe --help",
        )
    if not rest:
        recipes = {name: read(name) for name in names()}
        rows = [
            [name, recipe.time, str(len(recipe.seeds)), recipe.ends, recipe.title]
            for name, recipe in recipes.items()
        ]
        heads = ["recipe", "minutes", "seeds", "before -> after", "task"]
        print("\n".join(table(heads, rows, left=5)))
        return 0
    name, recipe = rest[0], read(rest[0])
    if is_check:
        if recipe.aim and not values["short"]:
            fail(
                "rl recipe",
                f"{name} was never run, so there is no curve to compare with: add --short to see "
                "whether its stages work; docs/recipes.md says how a curve is recorded",
            )
        return check(name, recipe, values, children)
    folder = Path(values["to"] or name).expanduser()
    copy(name, recipe, folder)
    about = "never run; estimated" if recipe.aim else "about"
    time = f"{about} {recipe.minutes:g} minutes on {recipe.machine}"
    print(f"{folder}: {recipe.title}; {time}. Train it with:\n")
    print("\n".join([f"cd {shlex.quote(str(folder))}", *commands(recipe, program(folder))]))
    return 0


def commands(recipe: Recipe, rl: str) -> list[str]:
    """Returns the lines of a shell that train a recipe; `rl` is how `rl` is called."""
    lines = [f"{rl} {stage}" for stage in recipe.stages]
    if recipe.teacher:
        server = f"{rl.removesuffix('rl')}inference {recipe.teacher} > teacher.log 2>&1 &"
        lines[-1:] = [f"export {VARIABLE}=$(openssl rand -hex 16)", server, lines[-1], "kill $!"]
    return lines


def check(name: str, recipe: Recipe, values: dict[str, Any], children: Children) -> int:
    """Runs all stages in a new folder and prints what they came to. Returns the exit code.
    Raises RunError."""
    parent = Path("outputs") / "recipes"
    numbered = (parent / f"{name}-{i}" for i in itertools.count(1))
    folder = Path(values["output"] or next(p for p in numbered if not p.exists())).expanduser()
    copy(name, recipe, folder)
    flags = [] if values["seed"] is None else ["--seed", str(values["seed"])]
    if values["short"]:
        flags += ["--max_steps", SHORT_STEPS]
    stages = [shlex.split(stage) for stage in recipe.stages]
    with contextlib.chdir(folder):
        settings = itertools.dropwhile(lambda word: not word.startswith(("-", "@")), stages[-1])
        config = build(parse_args([*settings, *flags], os.environ))
        metrics = config.run_dir.metrics.absolute()
        for i, words in enumerate(stages, 1):
            # `export` has no such settings
            command = shlex.join([*words, *(flags if "@" in words else [])])
            with teaching(recipe.teacher if i == len(stages) else "", folder, children):
                print(f"{folder}: rl {command}")
                if code := run_stage(shlex.split(command)):
                    raise RunError(
                        f"{name}: `rl {command}` in {folder} ended with exit code {code}; it says "
                        "why above"
                    )
    points = measured(recipe, metrics)
    last = max(points)
    if values["short"]:
        print(f"{name}: all stages work, and {recipe.measure} is {points[last]:.3f} at step {last}")
        return 0
    lines, passed = verdict(name, recipe, points)
    print("\n".join(lines))
    if curve := recipe.as_seed(points):
        print(f"as a seed of recipe.toml: {config.seed} = {curve}")
    return 0 if passed else 1


@contextlib.contextmanager
def teaching(arguments: str, folder: Path, children: Children) -> Iterator[None]:
    """A recipe's teacher, if it has one, which serves until the block ends. Nothing waits for
    its start here: its run does."""
    if not arguments:
        yield
        return
    # the key by which the run may ask the server
    os.environ.setdefault(VARIABLE, secrets.token_hex(16))
    words = [*PYTHON, "-m", "rl.inference.main", *shlex.split(arguments)]
    teacher = children.start("teacher", words, {}, Path())
    print(f"{folder}: inference {arguments} (log: {teacher.log})")
    try:
        yield
    except RunError as error:
        if teacher.exit_code is None:
            raise
        raise RunError(
            f"{error}; its teacher had ended before, {folder}/{teacher.log} says why"
        ) from None
    finally:
        children.end(teacher)


def run_stage(words: list[str]) -> int:
    """Runs `rl` with these arguments on this terminal. Returns its exit code. A signal that ends
    this process ends it first."""
    with subprocess.Popen(
        [*PYTHON, "-m", "rl.main", *words], preexec_fn=end_with_parent
    ) as process:
        try:
            return process.wait()
        except Stopped:
            # after a Ctrl-C, which the terminal sends it as well, this counts as the same signal
            process.send_signal(signal.SIGTERM)
            raise


def measured(recipe: Recipe, metrics: Path) -> dict[int, float]:
    """Returns a recipe's measure by step, from the metrics.jsonl of its last stage's run. Raises
    RunError."""
    from rl.run_dir.numbers import Numbers  # takes 0.1 s, which `--help` should not

    numbers = Numbers.read(metrics)
    steps, values = numbers.curve(recipe.measure)
    if not len(steps):
        remedy = did_you_mean(recipe.measure, numbers.names)
        raise RunError(f"{metrics} has no {recipe.measure}, the recipe's measure; {remedy}")
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def verdict(name: str, recipe: Recipe, points: dict[int, float]) -> tuple[list[str], bool]:
    """Returns lines that show the curve of a run beside the recorded ones, and whether its end
    passes for that of one more seed."""
    columns = {"this run": points}
    for seed, values in recipe.seeds.items():
        columns[f"seed {seed}"] = dict(zip(recipe.steps, values, strict=True))
    rows = [
        [str(step), *(f"{c[step]:.3f}" if step in c else "-" for c in columns.values())]
        for step in sorted({*recipe.steps, *points})
    ]
    lines, last = table(["step", *columns], rows, left=0), points[max(points)]
    passed, (low, high) = last >= recipe.least, recipe.lasts
    ends = f"ends at {last:.3f}; recorded: {low:.3f} to {high:.3f}; needed: {recipe.least:.3f}"
    return [*lines, f"{name}: {recipe.measure} {ends}: {'passed' if passed else 'FAILED'}"], passed
