"""The final report of a run: its numbers at the start and the end, where the time went, where its files are, and curves.png."""

import functools
import io
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from rl.diagnosis.environments import is_count, played_in
from rl.run_dir.files import write_file
from rl.run_dir.metrics import Curve, Lines, MetricsReader, curve, environment_rewards
from rl.run_dir.origin import first_step
from rl.run_dir.paths import RunDir

ENDS = 3
"""Steps at the start and at the end over which a reward is averaged: one batch alone is noisy."""
FALLEN, MOST_FALLEN = 0.2, 3
"""Fraction by which a part of a reward has fallen that the report names, and the most that it names."""
INTERVAL = 1.96
"""Standard errors on each side of an evaluation's mean: a 95% interval."""
Series = tuple[str, str, str]
"""Source, metric, label."""
PANELS: tuple[tuple[str, tuple[Series, ...]], ...] = (
    ("share of the rollouts", (("orchestrator", "rollouts/zero_advantage", "without signal"),
                               ("orchestrator", "rollouts/truncated", "truncated"), ("orchestrator", "rollouts/errored", "failed"))),
    ("tokens a rollout", (("orchestrator", "rollouts/length_mean", ""),)),
    ("entropy, nats a token", (("trainer", "entropy/mean", ""),)),
    ("lag, versions", (("orchestrator", "lag/max", "max"), ("orchestrator", "lag/mean", "mean"))),
    ("mismatch KL of the trained version", (("trainer", "mismatch_kl/mean", ""),)),
    ("gradient norm", (("trainer", "optim/grad_norm", ""),)),
    ("rollouts a step", (("orchestrator", "rollouts/finished", "finished"), ("orchestrator", "rollouts/trained", "trained"))),
)  # fmt: skip
"""Title and curves of the panels between the first and the last."""
SFT_PANELS: tuple[tuple[str, tuple[Series, ...]], ...] = (
    ("entropy, nats a token", (("trainer", "entropy/mean", ""),)),
    ("gradient norm", (("trainer", "optim/grad_norm", ""),)),
    ("learning rate", (("trainer", "optim/lr", ""),)),
    ("tokens a second", (("trainer", "perf/tokens_per_s", ""),)),
)
"""The same for supervised fine-tuning."""


REPORTED = {metric for panels in (PANELS, SFT_PANELS) for _, series in panels for _, metric, _ in series} | {
    "epoch", "loss/mean", "validation/loss", "time/step", "time/wait_for_batch", "time/batch", "perf/inference_idle_fraction",
}  # fmt: skip
"""What the report and the picture show, beside the rewards."""


@functools.cache
def is_reported(metric: str) -> bool:
    """Whether the report and the picture need a metric."""
    named = metric.endswith(("/mean", "/reward_mean", "/reward_mean_stderr")) or metric.startswith("reward/")
    return named or metric in REPORTED or is_count(metric)


def eval_curves(lines: Lines) -> dict[str, Curve]:
    """Reward of every evaluation over policy versions, by its label."""
    keys = {key for (_, source), line in lines.items() if source == "eval" for key in line if key.endswith("/reward_mean")}
    return {key.removeprefix("eval/").removesuffix("/reward_mean"): curve(lines, "eval", key) for key in sorted(keys)}


def environment_curves(lines: Lines) -> dict[str, Curve]:
    """Training reward of each environment over steps, if there are several."""
    envs = {env for (_, source), line in lines.items() if source == "orchestrator" for env in environment_rewards(line)}
    return {env: curve(lines, "orchestrator", f"reward/{env}/mean") for env in sorted(envs)} if len(envs) > 1 else {}


def environment_lines(lines: Lines) -> list[str]:
    """The reward of each environment, where there are several, and what is the matter with the rollouts of any."""
    rewarded = {env for (_, source), line in lines.items() if source == "orchestrator" for env in environment_rewards(line)}
    faults = {env: one.fault for env, one in played_in(lines).items()}
    envs = sorted({*rewarded, *faults})
    shown = {env: trend(curve(lines, "orchestrator", f"reward/{env}/mean")[1]) or "-" for env in envs if len(envs) > 1 or faults.get(env)}
    return [f"          {text}   {env}" + (f": {faults[env]}" if faults.get(env) else "") for env, text in shown.items()]


def ends(values: list[float]) -> tuple[float, float]:
    """Means over the first and over the last values."""
    count = max(1, min(ENDS, len(values) // 2))
    return fmean(values[:count]), fmean(values[-count:])


def fallen_lines(lines: Lines) -> list[str]:
    """The parts of rewards, and other metrics of environments, that fell by more than FALLEN, the deepest first.
    A policy may earn one part of its reward at the cost of another."""
    names = {key for (_, source), line in lines.items() if source == "orchestrator" for key in line if key.startswith("reward/")}
    curves = {name: curve(lines, "orchestrator", name)[1] for name in names if name.count("/") > 1 and not name.endswith("/mean")}
    means = {name: ends(values) for name, values in curves.items() if len(values) > 2 * ENDS}
    left = {name: last / first for name, (first, last) in means.items() if first > 0}
    deepest = sorted((fraction, name) for name, fraction in left.items() if 0 <= fraction < 1 - FALLEN)[:MOST_FALLEN]
    parts = [(name.split("/", 2), trend(curves[name])) for _, name in deepest]
    return [f"fell      {text}   ({part} of {env})" for (_, env, part), text in parts]


def is_sft(lines: Lines) -> bool:
    """Whether the run is supervised fine-tuning, which alone writes `epoch`."""
    return any("epoch" in line for line in lines.values())


def trend(values: list[float], spec: str = ".3f") -> str:
    """Mean over the first and over the last values, `0.200 -> 0.700`; a single one by itself; empty without values."""
    return " -> ".join(f"{mean:{spec}}" for mean in ends(values)[: len(values)]) if values else ""


def inference_idle(lines: Lines) -> float | None:
    """Fraction of the time in which inference had nothing to do; None where it was not measured."""
    seconds = dict(zip(*curve(lines, "orchestrator", "time/batch"), strict=True))
    idle = dict(zip(*curve(lines, "orchestrator", "perf/inference_idle_fraction"), strict=True))
    total = sum(seconds.get(step, 0.0) for step in idle)
    return sum(seconds.get(step, 0.0) * fraction for step, fraction in idle.items()) / total if total else None


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 07 s` or `4.2 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def seconds_of(run_dir: RunDir, part: str) -> float:
    """Seconds that the trainer has spent on a part of its steps, those that it trained once more after a resume counted twice."""
    reader, total_s = MetricsReader(run_dir.metrics), 0.0
    while lines := reader.new():
        total_s += sum(line.get(part) or 0.0 for line in lines if line["source"] == "trainer")
    return total_s


def report_lines(lines: Lines, run_dir: RunDir) -> list[str]:
    """The final report as lines of text; what was not measured has none."""
    took_s, waited_s = (seconds_of(run_dir, part) for part in ("time/step", "time/wait_for_batch"))
    measured = took_s and curve(lines, "trainer", "time/wait_for_batch")[1]
    shares = [f"trainer waited for batches {waited_s / took_s:.0%}"] if measured else []
    if (idle := inference_idle(lines)) is not None:
        shares.append(f"inference was idle {idle:.0%}")
    count = max(0, max(curve(lines, "trainer", "time/step")[0], default=0) - first_step(run_dir))
    took = f"{count} step{'' if count == 1 else 's'} in {duration(took_s)}"
    report = [took + (f"; {', '.join(shares)} of the time" if shares else "") if took_s else "no step was trained"]
    if reward := trend(curve(lines, "orchestrator", "reward/mean")[1]):
        report.append(f"reward    {reward}   (mean of the first and of the last steps)")
    report += environment_lines(lines) + fallen_lines(lines)
    if is_sft(lines) and (loss := trend(curve(lines, "trainer", "loss/mean")[1], ".4f")):
        report.append(f"loss      {loss}   (nats a token, mean of the first and of the last steps)")
    at, losses = curve(lines, "trainer", "validation/loss")
    if losses:
        versions = f"version {at[0]} and version {at[-1]}"
        report.append(f"valid     {losses[0]:.4f} -> {losses[-1]:.4f}   (held-out loss, nats a token, {versions})")
    for label, (at, rewards) in eval_curves(lines).items():
        if len(rewards) > 1:
            report.append(f"eval      {rewards[0]:.3f} -> {rewards[-1]:.3f}   ({label}, version {at[0]} and version {at[-1]})")
        elif rewards:
            report.append(f"eval      {rewards[0]:.3f}   ({label}, version {at[0]})")
    if kl := curve(lines, "trainer", "mismatch_kl/mean")[1]:
        report.append(f"mismatch  {fmean(kl):.1e}   (mean KL between inference and trainer on tokens of the trained version)")
    newest = run_dir.newest_weights()
    where = {
        "weights": str(newest[1]) if newest else None,
        "curves": run_dir.curves if run_dir.curves.exists() else None,
        "metrics": run_dir.metrics if run_dir.metrics.exists() else None,
        "logs": run_dir.logs,
        "all of it": run_dir.root,
    }
    return report + [f"{what:<9} {path}" for what, path in where.items() if path]


def draw_curves(lines: Lines, path: Path, title: str) -> None:
    """Writes curves.png: reward and evals, what PANELS lists, time a step with the part spent waiting. The old picture stays until then."""
    from matplotlib.figure import Figure

    sft = is_sft(lines)
    size, rows = ((14, 7), 2) if sft else ((15, 10), 3)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    first, *middle, last = figure.subplots(rows, 3).flat
    draw_first(first, lines, sft)
    for panel, (name, series) in zip(middle, SFT_PANELS if sft else PANELS, strict=True):
        for source, metric, label in series:
            panel.plot(*curve(lines, source, metric), label=label)
        panel.set_title(name)
        if len(series) > 1:
            panel.legend(loc="best")
    last.plot(*curve(lines, "trainer", "time/step"), label="whole step")
    steps, waits = curve(lines, "trainer", "time/wait_for_batch")
    last.fill_between(steps, waits, alpha=0.4, label="trainer waits for the batch")
    last.set_title("seconds a step")
    last.legend(loc="best")
    for panel in (first, *middle, last):
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png")
    write_file(path, picture.getvalue())


def draw_first(panel: Any, lines: Lines, sft: bool) -> None:
    """The panel of what is learned: loss in supervised fine-tuning, else reward and evaluations, these with their intervals."""
    from matplotlib import rcParams

    panel.set_title("loss, nats a token" if sft else "reward")
    if sft:
        panel.plot(*curve(lines, "trainer", "validation/loss"), marker="o", linestyle="--", label="validation")
    environments = environment_curves(lines)
    whole = ("training", curve(lines, "trainer", "loss/mean") if sft else curve(lines, "orchestrator", "reward/mean"))
    for env, points in environments.items() or [whole]:
        panel.plot(*points, label=env)
    colours = dict(zip(environments, rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for label, (versions, rewards) in eval_curves(lines).items():
        errors = [INTERVAL * (lines[version, "eval"].get(f"eval/{label}/reward_mean_stderr") or 0.0) for version in versions]
        style = {
            "marker": "o",
            "linestyle": "--",
            "capsize": 3,
            "label": f"eval {label}" + ", 95% interval" * any(errors),
            "color": colours.get(label),
        }
        panel.errorbar(versions, rewards, yerr=errors, **style)
    panel.legend(loc="best")


def final_report(lines: Lines, run_dir: RunDir, title: str, say: Callable[[str], None]) -> None:
    """Draws curves.png and prints the report, if the run has any metrics. A picture that cannot be written is only reported."""
    if not any(source in ("trainer", "eval") for _, source in lines):
        return
    try:
        draw_curves(lines, run_dir.curves, title)
    except OSError as error:
        say(f"no curves: {run_dir.curves}: {error.strerror}")
    for line in report_lines(lines, run_dir):
        say(line)
