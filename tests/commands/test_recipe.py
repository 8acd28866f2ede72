"""`rl recipe`: what is in recipe.toml, the list, a copy, and what a check says of runs that are
written here; the proof trains."""

import shlex
import signal
from pathlib import Path

import pytest

from rl.commands import recipe
from rl.commands.recipe import CLONE, ENVIRONMENTS, RECIPES, program, read, run_stage
from rl.run_dir.metrics import MetricsLog
from tests.commands.driver import called, start, words
from tests.waiting import until

MEASURE = "eval/adding/reward_mean"
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
RECIPE = SOUND.replace('"sft @ sft.toml", ', '"sft @ sft.toml", "export outputs/warm --to warm", ')


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A recipe of three stages and its environment, in a place of their own."""
    folder = tmp_path / "recipes" / "sums"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "__pycache__" / "x.pyc").touch()
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "run.toml").write_text(
        'name = "last"\nmax_steps = 20\n[orchestrator.environment]\nid = "adding"\n'
    )
    (tmp_path / "environments" / "adding").mkdir(parents=True)
    (tmp_path / "environments" / "adding" / "adding.py").touch()
    monkeypatch.setattr(recipe, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(recipe, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def stages(recipes, monkeypatch):
    """The stages that a check has run, in place of which a run of these evaluations is written."""
    ran, values = [], {0: 0.25, 20: 0.95}

    def run(words):
        ran.append((Path.cwd().name, shlex.join(words)))
        log = MetricsLog(Path("outputs/last/metrics.jsonl"), "eval")
        for step, value in values.items():
            log.write(step, {MEASURE: value})
        return 0

    monkeypatch.setattr(recipe, "run_stage", run)
    return ran, values


def test_the_list(recipes, capsys):
    other = recipes.with_name("longer-name")
    other.mkdir()
    (other / "recipe.toml").write_text(RECIPE.replace("1.5", "12").replace("Sums", "Other sums"))
    assert called(capsys, "recipe") == (
        0,
        """\
recipe       minutes  seeds  before -> after  task
longer-name  12       2      0.15 -> 0.95     Other sums
sums         1.5      2      0.15 -> 0.95     Sums
""",
        "",
    )


def test_a_recipe_that_was_never_run_says_so(recipes, stages, capsys):
    (recipes / "recipe.toml").write_text(NOT_RUN)
    assert called(capsys, "recipe")[1].endswith("sums    ~1.5     0      not run          Sums\n")
    assert called(capsys, "recipe sums --to x")[1].startswith(
        "x: Sums; never run; estimated 1.5 minutes on two cores. Train"
    )
    remedy = (
        "add --short to see whether its stages work; docs/recipes.md says how a curve is recorded"
    )
    said = f"rl recipe: sums was never run, so there is no curve to compare with: {remedy}\n"
    assert called(capsys, "recipe", "sums", "--check") == (2, "", said)
    assert not Path("outputs").exists()
    code, out, err = called(capsys, "recipe sums --check --short")
    assert (code, err) == (0, "")
    assert out.endswith(f"sums: all stages work, and {MEASURE} is 0.950 at step 20\n")


def test_a_copy_and_how_it_is_trained(recipes, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "IS_INSTALLED", True)
    assert called(capsys, "recipe", "sums", "--to", "my sums") == (
        0,
        """\
my sums: Sums; about 1.5 minutes on two cores. Train it with:

cd 'my sums'
rl sft @ sft.toml
rl export outputs/warm --to warm
rl @ run.toml
""",
        "",
    )
    files = {path.as_posix() for path in Path("my sums").rglob("*") if path.is_file()}
    names = ("recipe.toml", "run.toml", "environments/adding/adding.py")
    assert files == {f"my sums/{name}" for name in names}
    assert called(capsys, "recipe", "sums")[0] == 0 and Path("sums").is_dir()
    assert called(capsys, "recipe", "sums") == (
        1,
        "",
        "rl recipe: sums exists already; name another folder, or move it away\n",
    )
    code, _, said = called(capsys, "recipe sums --to /proc/x/y")
    assert code == 1 and said.startswith("rl recipe: /proc/x/y cannot be made: ")


@pytest.mark.parametrize(
    "args",
    [
        ["sums", "x"],
        ["sums", "--short"],
        words("sums --check --to x"),
        ["sums", "--to", ""],
    ],
)
def test_arguments_that_say_nothing(recipes, capsys, args):
    code, out, err = called(capsys, "recipe", *args)
    assert (code, out) == (2, "") and err.startswith("rl recipe: ") and not Path("x").exists()


def test_an_unknown_name(recipes, capsys):
    assert called(capsys, "recipe", "sumz") == (
        2,
        "",
        "rl recipe: sumz: no such recipe; did you mean sums?\n",
    )


def test_a_check_runs_the_stages_and_shows_the_curve_beside_the_recorded_ones(stages, capsys):
    assert called(capsys, "recipe sums --check --seed 7") == (
        0,
        """\
outputs/recipes/sums-1: rl sft @ sft.toml --seed 7
outputs/recipes/sums-1: rl export outputs/warm --to warm
outputs/recipes/sums-1: rl @ run.toml --seed 7
step  this run  seed 1  seed 2
   0     0.250   0.100   0.200
  10         -   0.800   0.600
  20     0.950   0.900   1.000
sums: eval/adding/reward_mean ends at 0.950; recorded: 0.900 to 1.000; needed: 0.750: passed
""",
        "",
    )
    assert stages[0] == [
        ("sums-1", "sft @ sft.toml --seed 7"),
        ("sums-1", "export outputs/warm --to warm"),
        ("sums-1", "@ run.toml --seed 7"),
    ]


@pytest.mark.parametrize(("last", "code"), [(0.74, 1), (0.76, 0), (1.5, 0)])
def test_the_end_of_the_curve_decides(stages, capsys, last, code):
    """Two seeds that differ by 0.1 widen their band by 0.15."""
    stages[1].update({10: 0.0, 20: last})
    assert called(capsys, "recipe", "sums", "--check")[0] == code
    assert called(capsys, "recipe sums --check --output again")[0] == code
    assert {folder for folder, _ in stages[0]} == {"sums-1", "again"}, (
        "a check has a folder of its own"
    )


def test_a_check_prints_its_curve_as_one_more_seed(stages, capsys):
    """A run that ends early has solved its task."""
    stages[1].update({10: 0.5555, 20: 0.9})
    assert called(capsys, "recipe", "sums", "--check")[1].endswith(
        "as a seed of recipe.toml: 0 = [0.25, 0.555, 0.9]\n"
    )
    stages[1].pop(20)
    stages[1].update({8: 0.9, 10: 0.95})
    for seed in ("7", "0"):
        said = called(capsys, "recipe sums --check --seed", seed)[1].splitlines()
        assert said[-1] == f"as a seed of recipe.toml: {seed} = [0.25, 0.95, 0.95]"


def test_a_short_check_wants_stages_that_work_and_the_measure(stages, capsys):
    stages[1].clear()
    code, out, err = called(capsys, "recipe sums --check --short")
    metrics = Path("outputs/recipes/sums-1/outputs/last/metrics.jsonl").absolute()
    assert (code, err) == (
        1,
        f"rl recipe: {metrics} has no {MEASURE}, the recipe's measure; there are none\n",
    )
    stages[1].update({0: 0.0, 2: 0.125})
    code, out, err = called(capsys, "recipe sums --check --short")
    assert (code, err) == (0, "")
    assert out.endswith(f"sums: all stages work, and {MEASURE} is 0.125 at step 2\n")
    assert stages[0][-3:] == [
        ("sums-2", "sft @ sft.toml --max_steps 2"),
        ("sums-2", "export outputs/warm --to warm"),
        ("sums-2", "@ run.toml --max_steps 2"),
    ]


def test_a_stage_that_fails_ends_the_check(recipes, capsys, monkeypatch):
    monkeypatch.setattr(recipe, "run_stage", lambda words: 3)
    code, out, err = called(capsys, "recipe", "sums", "--check")
    assert (code, len(out.splitlines())) == (1, 1)
    assert (
        err
        == "rl recipe: sums: `rl sft @ sft.toml` in outputs/recipes/sums-1 ended with exit code "
        "3; it says why above\n"
    )


def test_a_teacher_serves_while_the_last_stage_runs(recipes, capsys, monkeypatch):
    """A program that waits stands for the server."""
    (recipes / "recipe.toml").write_text(
        RECIPE.replace(
            "minutes", 'teacher = "@ outputs/warm/config.toml --inference.port 8917"\nminutes'
        )
    )
    monkeypatch.setenv("RL_TOKEN", "0123456789abcdef")
    monkeypatch.setattr(recipe, "IS_INSTALLED", True)
    lines = called(capsys, "recipe sums --to x")[1].splitlines()
    assert lines[-4:] == [
        "export RL_TOKEN=$(openssl rand -hex 16)",
        "inference @ outputs/warm/config.toml --inference.port 8917 > teacher.log 2>&1 &",
        "rl @ run.toml",
        "kill $!",
    ]
    server = recipes.with_name("server")
    server.write_text('#!/bin/sh\necho "$RL_TOKEN $*"\nexec sleep 600\n')
    server.chmod(0o755)
    monkeypatch.setattr(recipe, "PYTHON", (str(server),))
    seen = []

    def run(words):
        if words[0] == "@":
            until(lambda: Path("teacher-1.log").read_text(), 60)
        seen.append((words[0], Path("teacher-1.log").exists()))
        return int(words[0] == "@")

    monkeypatch.setattr(recipe, "run_stage", run)
    assert called(capsys, "recipe", "sums", "--check")[0] == 1, "it ends also when the stage fails"
    assert seen == [("sft", False), ("export", False), ("@", True)]
    said = (
        "0123456789abcdef -m rl.inference.main @ outputs/warm/config.toml --inference.port 8917\n"
    )
    assert Path("outputs/recipes/sums-1/teacher-1.log").read_text() == said


def test_a_stage_is_rl(capfd):
    assert run_stage(["no-such-command"]) == 2
    assert capfd.readouterr().err.startswith("rl: no-such-command: no such command")


def test_a_signal_ends_the_stage_first(recipes, tmp_path):
    """A program that needs a moment to end stands for `rl`, which then has written how it is
    resumed."""
    stage = tmp_path / "stage"
    stage.write_text(
        "#!/bin/sh\ntrap 'echo > ended; exit 143' TERM\necho > began\nwhile :; do sleep 0.1; done\n"
    )
    stage.chmod(0o755)
    code = f"""
import sys; from pathlib import Path; from rl.commands import recipe; from rl.main import main
recipe.RECIPES, recipe.ENVIRONMENTS = Path({str(recipes.parent)!r}), Path({str(tmp_path / "environments")!r})
recipe.PYTHON = ({str(stage)!r},)
sys.exit(main())
"""
    process = start(tmp_path, "recipe", "sums", "--check", code=code)
    folder = tmp_path / "outputs" / "recipes" / "sums-1"
    until((folder / "began").exists, 120)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and (folder / "ended").exists()


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
    (recipes / "recipe.toml").write_text(text)
    assert read("sums").least == pytest.approx(least)


def test_rl_is_run_by_uv_in_a_clone_and_as_it_is_from_a_wheel(tmp_path, monkeypatch):
    assert (RECIPES, ENVIRONMENTS) == (CLONE / "configs" / "recipes", CLONE / "environments")
    assert program(CLONE / "sums") == "uv run rl"
    assert program(tmp_path / "sums") == f"uv run --project {CLONE} rl"
    monkeypatch.setattr(recipe, "IS_INSTALLED", True)
    assert program(tmp_path / "sums") == "rl"


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_recipe_works(tmp_path):
    """A real one of one stage, from its copy to the measure."""
    process = start(
        tmp_path,
        "recipe sums --check --short --seed 1",
        PYTHONPATH="",
        HF_HUB_OFFLINE="1",
    )
    out, err = process.communicate(timeout=1180)
    assert process.returncode == 0, out + err
    assert (
        "sums: all stages work, and eval/single-digit-addition/reward_mean is 0."
        in out.splitlines()[-1]
    )
    assert (
        tmp_path / "outputs" / "recipes" / "sums-1" / "outputs" / "sums" / "weights" / "000002"
    ).is_dir()
