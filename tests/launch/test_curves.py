"""The final report of a synthetic run."""

import math
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from rl.launch.curves import (
    draw_curves,
    drawn_parts,
    final_report,
    inference_idle,
    report_lines,
    reward_parts,
    trend,
)
from rl.run_dir.metrics import Merger, MetricsLog, cut_metrics, read_metrics
from rl.run_dir.numbers import Numbers
from rl.run_dir.paths import BranchOrigin, RunDir


def synthetic(root, steps=8):
    """A run: reward grows by 0.1 per step, a quarter of the time is waiting, inference idles in
    30% of long and 0% of short batches."""
    run_dir = RunDir(root, root / "weights")
    orchestrator, trainer, evals = (
        MetricsLog(run_dir.metrics, source) for source in ("orchestrator", "trainer", "eval")
    )
    evals.write(0, {"eval/e/reward_mean": 0.05})
    for step in range(1, steps + 1):
        long = step % 2 == 0
        orchestrator.write(
            step,
            {
                "reward/mean": step / 10,
                "time/batch": 15.0 if long else 5.0,
                "perf/inference_idle_fraction": 0.3 if long else 0.0,
            },
        )
        trainer.write(
            step,
            {
                "loss/mean": 0.1,
                "entropy/mean": 2.0,
                "mismatch_kl/mean": 2e-4,
                "time/step": 10.0,
                "time/wait_for_batch": 2.5,
            },
        )
    evals.write(steps, {"eval/e/reward_mean": 0.7})
    Merger(run_dir.metrics).merge()
    return run_dir


def test_several_environments_are_told_apart():
    run_dir = RunDir(Path("x"), Path("x"))
    lines = {
        (step, "orchestrator"): {
            "reward/mean": 0.5,
            "reward/a/mean": step / 10,
            "reward/a/exact": 1.0,
        }
        for step in range(1, 9)
    }
    assert not [line for line in report_lines(Numbers.of(lines), run_dir) if line.endswith("   a")]
    for step in (2, 4, 6, 8):
        lines[step, "orchestrator"]["reward/b/mean"] = 1.0 - step / 10
    assert trend([0.25]) == "0.250"
    assert trend([]) == ""
    assert trend([0.1, 0.2, 0.3]) == "0.100 -> 0.300"
    ended = report_lines(
        Numbers.of(
            {(0, "eval"): {"eval/e/reward_mean": 0.25}, (1, "orchestrator"): {"reward/mean": 0.125}}
        ),
        run_dir,
    )
    assert ended[1:3] == [
        "reward    0.125   (of rollouts that no step was trained on)",
        "eval      0.250   (e, version 0)",
    ]
    assert report_lines(Numbers.of(lines), run_dir)[2:4] == [
        "          0.200 -> 0.700   a",
        "          0.700 -> 0.300   b",
    ]


def test_another_mix_of_environments_is_no_change_of_the_reward():
    """Regression: the headline said 0.963 -> 0.612 of a run in which no environment had changed."""
    run_dir, lines = RunDir(Path("x"), Path("x")), {}
    for step in range(1, 9):
        hard = (step - 1) / 8
        lines[step, "orchestrator"] = {
            "reward/mean": 1.0 * (1 - hard) + 0.5 * hard,
            "reward/easy/mean": 1.0,
            "reward/hard/mean": 0.5,
        }
    del lines[1, "orchestrator"]["reward/hard/mean"]
    text = (
        "reward    0.750 -> 0.750   (of rollouts that no step was trained on, environments at "
        "equal shares)"
    )
    assert report_lines(Numbers.of(lines), run_dir)[1] == text
    only = {
        (1, "orchestrator"): {"reward/mean": 0.25, "reward/a/mean": 0.25, "reward/b/mean": math.nan}
    }
    assert [column.tolist() for column in Numbers.of(only).reward()] == [[1], [0.25]]


def test_the_report_says_what_failed_and_of_which_environment_nothing_was_trained():
    run_dir = RunDir(Path("x"), Path("x"))
    line = {
        "reward/mean": 0.5,
        "reward/dropped/mean": 1.0,
        "rollouts/dropped/finished": 8,
        "rollouts/dropped/trained": 0,
    }
    line |= {
        "rollouts/dropped/failed_reward": 2,
        "rollouts/all/finished": 4,
        "rollouts/all/trained": 0,
        "rollouts/all/failed_worker": 4,
    }
    lines = {(step, "orchestrator"): dict(line) for step in (1, 2)}
    for count, name in ((0, "late"), (8, "good")):
        for each in lines.values():
            each |= {f"rollouts/{name}/finished": count, f"rollouts/{name}/trained": count}
    lines[2, "orchestrator"]["env/late/quarantined"] = 1
    assert report_lines(Numbers.of(lines), run_dir)[2:6] == [
        "          -   all: no rollout was trained on, 8 of 8 rollouts failed (worker 8)",
        "          1.000 -> 1.000   dropped: no rollout was trained on, 4 of 16 rollouts "
        "failed (reward 4)",
        "          -   good",
        "          -   late: no rollout was finished, it is lost",
    ]
    alone = {
        (1, "orchestrator"): {
            "reward/e/mean": 0.5,
            "rollouts/e/finished": 8,
            "rollouts/e/trained": 4,
            "rollouts/e/failed_reward": 1,
        }
    }
    assert (
        report_lines(Numbers.of(alone), run_dir)[1]
        == "          0.500   e: 1 of 8 rollouts failed (reward 1)"
    )


def test_golden_report(tmp_path):
    run_dir = synthetic(tmp_path)
    run_dir.weights(8).mkdir(parents=True)
    said: list[str] = []
    final_report(Numbers.read(run_dir.metrics), run_dir, "r", said.append)
    assert said == [
        "8 steps in 80 s; trainer waited for batches 25%, inference was idle 22% of the time",
        "reward    0.200 -> 0.700   (mean of the first and of the last steps)",
        "eval      0.050 -> 0.700   (e, version 0 and version 8)",
        "mismatch  2.0e-04   (mean KL between inference and trainer on tokens of the trained "
        "version)",
        f"weights   {tmp_path}/weights/000008",
        f"curves    {tmp_path}/curves.png",
        f"metrics   {tmp_path}/metrics.jsonl",
        f"logs      {tmp_path}/logs",
        f"all of it {tmp_path}",
    ]
    # weighted by length: 4 x 15 s x 0.3 of 80 s
    assert round(inference_idle(Numbers.read(run_dir.metrics)), 9) == 0.225
    picture = run_dir.curves.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 30_000


def test_the_time_of_a_run_counts_what_a_resume_trained_once_more_and_a_branch_its_own_steps(
    tmp_path, monkeypatch
):
    """Steps 7 and 8 were lost with the trainer, but their time was spent and counts."""
    monkeypatch.setattr("rl.run_dir.files.PIECE_BYTES", 100)  # long runs are not read at once
    run_dir = synthetic(tmp_path)

    def first_line():
        for step in (7, 8):
            MetricsLog(run_dir.metrics, "trainer").write(
                step, {"time/step": 5.0, "time/wait_for_batch": 5.0}
            )
        Merger(run_dir.metrics).merge()
        return report_lines(Numbers.read(run_dir.metrics), run_dir)[0]

    # 8 x 10 s + 2 x 5 s; 20 s + 10 s of them
    assert first_line().startswith("8 steps in 90 s; trainer waited for batches 33%, ")
    run_dir.origin.write_bytes(msgspec.json.encode(BranchOrigin("outputs/x", 6, 0.0, [])))
    cut_metrics(run_dir.metrics, 0)
    assert first_line().startswith("2 steps in 10 s; ")


def test_the_report_names_the_parts_of_a_reward_that_fell():
    run_dir = RunDir(Path("x"), Path("x"))
    parts = {
        "reward/e/brief": (0.27, 0.12),
        "reward/e/exact": (0.1, 0.9),
        "reward/e/form": (0.5, 0.45),
        "reward/e/mean": (0.4, 0.3),
    }
    values = {name: [first] * 4 + [last] * 4 for name, (first, last) in parts.items()}
    lines = {
        (i + 1, "orchestrator"): {name: value[i] for name, value in values.items()}
        for i in range(8)
    }
    assert report_lines(Numbers.of(lines), run_dir)[1:2] == [
        "fell      0.270 -> 0.120   (brief of e)"
    ]
    # too few to tell
    assert not any(
        line.startswith("fell")
        for line in report_lines(Numbers.of(dict(list(lines.items())[2:6])), run_dir)
    )


def test_values_that_are_missing_or_not_finite_are_left_out(tmp_path):
    run_dir, said = RunDir(tmp_path, tmp_path / "weights"), list[str]()
    final_report(Numbers(), run_dir, "r", said.append)
    assert said == [] and not run_dir.curves.exists()
    lines = {
        (0, "orchestrator"): {"perf/inference_idle_fraction": 0.69, "time/batch": 20.0},
        (0, "eval"): {"eval/e/reward_mean": 1.0},
    }
    assert report_lines(Numbers.of(lines), run_dir)[0] == "no step was trained"
    stopped = report_lines(Numbers.of({(1, "orchestrator"): {"reward/mean": 0.061}}), run_dir)
    assert stopped[:2] == [
        "no step was trained",
        "reward    0.061   (of rollouts that no step was trained on)",
    ]
    MetricsLog(run_dir.metrics, "trainer").write(1, {"loss/mean": float("nan"), "time/step": 1.0})
    Merger(run_dir.metrics).merge()
    final_report(Numbers.read(run_dir.metrics), run_dir, "r", said.append)
    assert said[0] == "1 step in 1 s" and run_dir.curves.exists()


def test_a_picture_that_cannot_be_written_is_a_remark(tmp_path):
    run_dir = synthetic(tmp_path)
    run_dir.curves.mkdir()
    said: list[str] = []
    final_report(Numbers.read(run_dir.metrics), run_dir, "r", said.append)
    assert said[0] == f"no curves: {run_dir.curves}: Is a directory"
    assert said[1].startswith("8 steps")


def test_an_evaluation_has_its_interval_and_the_panels_what_rl_turns_on(tmp_path, monkeypatch):
    """Checks what is passed to matplotlib for metrics of two steps."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    lines = read_metrics(synthetic(tmp_path, steps=2).metrics)
    lines[0, "eval"]["eval/e/reward_mean_stderr"] = 0.1
    for step in (1, 2):
        lines[step, "orchestrator"] |= {
            "rollouts/zero_advantage": step / 4,
            "rollouts/truncated": 0.5,
            "lag/max": 2.0,
            "lag/mean": 1.0,
        }
    draw_curves(Numbers.of(lines), tmp_path / "curves.png", "r")
    panels = {panel.get_title(): panel for panel in drawn[0].axes}
    assert [title.split(",")[0] for title in panels] == [
        "reward",
        "share of the rollouts",
        "tokens a rollout",
        "entropy",
        "lag",
        "mismatch KL of the trained version",
        "gradient norm",
        "rollouts a step",
        "seconds a step",
    ]
    (bars,) = (container for container in panels["reward"].containers if container.has_yerr)
    ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    assert ends == [pytest.approx([0.05 - 0.196, 0.05 + 0.196]), [0.7, 0.7]]
    shares = {
        line.get_label(): line.get_ydata().tolist()
        for line in panels["share of the rollouts"].get_lines()
    }
    assert shares == {"without signal": [0.25, 0.5], "truncated": [0.5, 0.5], "failed": []}


def test_parts_of_a_reward_are_drawn_beside_it_where_they_have_its_scale():
    steps = {1: (0.2, 0.4, 1.0), 2: (0.6, 0.3, 1.0)}
    names = ("reward/e/form", "reward/e/answer", "reward/e/num_turns")
    lines = {
        (step, "orchestrator"): dict(zip(names, values, strict=True)) | {"reward/mean": 0.5}
        for step, values in steps.items()
    }
    assert reward_parts(Numbers.of(lines)) == [
        "reward/e/answer",
        "reward/e/form",
        "reward/e/num_turns",
    ]
    lines[1, "orchestrator"]["reward/e/never"] = float("nan")  # ended the report with a traceback
    assert drawn_parts(Numbers.of(lines)) == {
        "reward/e/answer": ([1, 2], [0.4, 0.3]),
        "reward/e/form": ([1, 2], [0.2, 0.6]),
    }
    alone = {at: {"reward/e/form": line["reward/e/form"]} for at, line in lines.items()}
    assert drawn_parts(Numbers.of(alone)) == {}  # it is the reward itself
