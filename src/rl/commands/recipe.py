"""`rl recipe`: lists recipes, copies one to start from, or checks that one still gives its
recorded curve."""

import contextlib
import itertools
import os
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.commands.recipe_file import Recipe, copy, names, program, read
from rl.config.command_line import build, fail, parse_args
from rl.config.options import option_lines, options, take
from rl.launch.children import Children
from rl.run_dir.access_token import VARIABLE
from rl.system.children import PYTHON, STOP_DEADLINE_S, Stopped, inherited
from rl.system.errors import RunError
from rl.system.linux import end_with_parent
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


def main(args: list[str], _children: Children) -> int:
    values, rest = take("rl recipe", args, OPTIONS, HELP)
    if len(rest) > 1 or any(word.startswith(("-", "@")) for word in rest):
        known = ", ".join(names())
        text = f"{' '.join(rest)}: not understood; give the name of one recipe, {known}"
        fail("rl recipe", text)
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
        return check(name, recipe, values)
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


def check(name: str, recipe: Recipe, values: dict[str, Any]) -> int:
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
            with teaching(recipe.teacher if i == len(stages) else "", folder):
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
def teaching(arguments: str, folder: Path) -> Iterator[None]:
    """A recipe's teacher, if it has one, which serves until the block ends. Nothing waits for
    its start here: its run does."""
    if not arguments:
        yield
        return
    # the key by which the run may ask the server
    os.environ.setdefault(VARIABLE, secrets.token_hex(16))
    print(f"{folder}: inference {arguments} (log: teacher.log)")
    words = [*PYTHON, "-m", "rl.inference.main", *shlex.split(arguments)]
    with (
        open("teacher.log", "wb") as log,
        subprocess.Popen(
            words, env=inherited(), stdout=log, stderr=log, preexec_fn=end_with_parent
        ) as process,
    ):
        try:
            yield
        except RunError as error:
            if process.poll() is None:
                raise
            raise RunError(
                f"{error}; its teacher had ended before, {folder}/teacher.log says why"
            ) from None
        finally:
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_DEADLINE_S)
            finally:
                process.kill()


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
