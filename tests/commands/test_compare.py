"""`rl compare`: what it prints of two runs that are written here."""

from pathlib import Path

import numpy as np
import pytest

from rl.commands.compare import means, stretches
from rl.config.command_line import to_toml
from rl.records.comparison import texts
from rl.run_dir.metrics import MetricsLog
from tests.commands.driver import called
from tests.flags import made


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs x and y of four and of two steps, with other learning rates."""
    monkeypatch.chdir(tmp_path)
    for name, lr, steps in (("x", "1e-6", 4), ("y", "2e-6", 2)):
        line = (
            f"--orchestrator.environment.id e --name {name} --max_steps 4 --trainer.optim.lr {lr}"
        )
        lora = " --trainer.lora --trainer.gpus 0" if name == "y" else ""
        config = made(line + lora)
        config.run_dir.root.mkdir(parents=True)
        config.run_dir.config.write_text(to_toml(config))
        logs = {
            source: MetricsLog(config.run_dir.metrics, source)
            for source in ("orchestrator", "trainer", "eval")
        }
        for step in range(1, steps + 1):
            logs["orchestrator"].write(step, {"reward/mean": step / 4, "rollouts/errored": 0.0})
            logs["trainer"].write(
                step,
                {
                    "loss/mean": 0.1,
                    "entropy/mean": 2.0 if name == "x" else float("nan"),
                    "time/step": 2.0,
                },
            )
        logs["orchestrator"].write(steps, {"tokens/sampled": 70_000, "tokens/dropped_stale": 7})
        if name == "y":
            logs["trainer"].write(steps, {"tokens/trained": 5})
            MetricsLog(config.run_dir.metrics, "rl").write(steps, {"cost/machine_s": 12.345})
        for version in (0, steps):
            logs["eval"].write(
                version,
                {"eval/e/reward_mean": 0.25 + version / 10, "eval/e/reward_mean_stderr": 0.03},
            )


def test_settings_curves_and_evaluations_side_by_side(runs, capsys):
    assert called(capsys, "compare", "x", "outputs/y") == (
        0,
        """\
A  outputs/x: 4 of 4 steps
B  outputs/y: 2 of 4 steps

settings that differ  A      B
trainer.optim.lr      1e-06  2e-06
trainer.gpus          -      0
trainer.lora.rank     -      16
trainer.lora.alpha    -      32.0
trainer.lora.targets  -      all-linear
both have seed 0: it decides the order of tasks and the draws of evaluations; training rollouts are sampled without a seed, so the runs \
differ from their first batch on, even with equal settings

steps               1    2     3  4
reward/mean   A  0.25  0.5  0.75  1  ▁▃▆█
              B  0.25  0.5     -  -  ▁▃
entropy/mean  A     2    2     2  2  ▁▁▁▁
              B     -    -     -  -
time/step     A     2    2     2  2  ▁▁▁▁
              B     2    2     -  -  ▁▁

evaluation  version              A              B   B - A
e                 0  0.250 ± 0.030  0.250 ± 0.030  +0.000
                  2              -  0.450 ± 0.030
                  4  0.650 ± 0.030              -

what it cost              A      B
tokens/sampled        70000  70000
tokens/dropped_stale      7      7
tokens/trained            -      5
cost/machine_s            -   12.3

""",
        "",
    )


@pytest.mark.parametrize("width", [50, 80, 110])
def test_nothing_is_wider_than_the_terminal(runs, capsys, monkeypatch, width):
    """Of a run with steps enough for every stretch, a long value, and metrics with long names."""
    for name in ("x", "y"):
        logs = {
            source: MetricsLog(Path("outputs", name, "metrics.jsonl"), source)
            for source in ("orchestrator", "trainer")
        }
        for step in range(1, 25):
            logs["orchestrator"].write(
                step, {"reward/mean": step / 7, "rollouts/zero_advantage": 0.123456}
            )
            logs["trainer"].write(step, {"time/step": 123.456})
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = called(capsys, "compare", "x", "y")
    assert code == 0 and max(map(len, out.splitlines())) <= width
    heads = next(line for line in out.splitlines() if line.startswith("steps"))
    assert len(heads.split()) == {50: 3, 80: 5, 110: 7}[width]
    assert "even with equal settings" in " ".join(out.split()), "it was cut at the terminal's edge"


def test_a_run_with_itself_and_what_is_no_run(runs, capsys):
    assert (
        "\nno setting differs\nboth have seed 0: it decides the order of tasks"
        in called(capsys, "compare", "x", "x")[1]
    )
    assert called(capsys, "compare", "x", "z")[::2] == (
        2,
        "rl compare: outputs/z: no such run or model folder; outputs contains the runs x, y\n",
    )
    assert (
        called(capsys, "compare", "x")[0]
        == called(capsys, "compare", "x", "y", "z")[0]
        == called(capsys, "compare", "x", "@y")[0]
        == 2
    )


def test_steps_are_cut_into_stretches_of_nearly_equal_length():
    assert stretches(20, 6) == [(1, 3), (4, 7), (8, 10), (11, 13), (14, 17), (18, 20)]
    assert stretches(2, 6) == [(1, 1), (2, 2)] and stretches(1, 1) == [(1, 1)]
    assert means((np.array([1, 2, 5]), np.array([1.0, 2.0, 4.0])), [(1, 2), (3, 4), (5, 9)]) == [
        1.5,
        None,
        4.0,
    ]


def test_a_computed_number_is_shown_without_its_rounding_errors_unless_they_differ():
    assert texts([9.999999999999999e-06, 3 * 1e-6, None]) == ["1e-05", "3e-06", None]
    assert texts([1e-6, 9.999999e-07]) == ["1e-06", "9.999999e-07"]
    assert texts([32.0, 0.1 + 0.2]) == ["32.0", "0.3"]
    assert texts([True, ["a", 1e-7], "9.999999999999999e-06"]) == [
        "True",
        "['a', 1e-07]",
        "9.999999999999999e-06",
    ]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"mean": 0.5, "e/mean": 0.5, "e/exact": 0.25, "e/form": 0.75}, "mean e/exact e/form"),
        ({"mean": 0.9, "e/mean": 1.0, "f/mean": 0.5}, "e/mean f/mean"),
    ],
)
def test_parts_follow_the_reward_and_environments_are_not_mixed(runs, capsys, values, names):
    for name in ("x", "y"):
        log = MetricsLog(Path("outputs", name, "metrics.jsonl"), "orchestrator")
        log.write(1, {f"reward/{key}": value for key, value in values.items()})
    out = called(capsys, "compare", "x", "y")[1].splitlines()
    heads = [line.split()[0] for line in out if line.startswith("reward/")]
    assert heads == [f"reward/{key}" for key in names.split()]
