"""The final report of a run: metrics at the start and the end, where the time went, paths of its
files, and curves.png.

`python -m rl.launch.curves RUN TITLE` keeps curves.png up to date during the run, so that neither
the loop of `rl` nor training waits.
"""

import io
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from rl.diagnosis.environments import played
from rl.run_dir.cost import cost_lines
from rl.run_dir.files import Fence, LineReader, write_file
from rl.run_dir.lease import lease_path, newest_lease
from rl.run_dir.metrics import environment_rewards, parse_line
from rl.run_dir.numbers import Numbers, Points
from rl.run_dir.paths import RunDir, first_step
from rl.run_dir.status import is_over
from rl.system.errors import RunError
from rl.system.linux import die_with_parent
from rl.system.terminal import span

ENDS = 3
"""Number of steps at the start and at the end over which a reward is averaged: a single batch is
noisy."""
FALLEN, MOST_FALLEN = 0.2, 3
"""The report names parts of a reward that fell by more than this fraction, and at most this
many."""
MOST_PARTS = 6
"""Maximum parts of rewards that the picture shows. If there are more it shows none: `rl view`
and `rl compare` have all."""
INTERVAL = 1.96
"""Standard errors on each side of an evaluation's mean: a 95% interval."""
EVERY_S = 60.0
"""Minimum seconds between two pictures during a run."""
SHARE = 0.02
"""Maximum share of one core's time spent on them."""
PANELS = {
    "share of the rollouts": (
        ("orchestrator", "rollouts/zero_advantage", "without signal"),
        ("orchestrator", "rollouts/truncated", "truncated"),
        ("orchestrator", "rollouts/errored", "failed"),
    ),
    "tokens a rollout": (("orchestrator", "rollouts/length_mean", ""),),
    "entropy, nats a token": (("trainer", "entropy/mean", ""),),
    "lag, versions": (
        ("orchestrator", "lag/max", "max"),
        ("orchestrator", "lag/mean", "mean"),
    ),
    "mismatch KL of the trained version": (("trainer", "mismatch_kl/mean", ""),),
    "gradient norm": (("trainer", "optim/grad_norm", ""),),
    "rollouts a step": (
        ("orchestrator", "rollouts/finished", "finished"),
        ("orchestrator", "rollouts/trained", "trained"),
    ),
}
"""Title of a panel between the first and the last -> source, metric and label of its curves."""
SFT_PANELS = {
    "entropy, nats a token": (("trainer", "entropy/mean", ""),),
    "gradient norm": (("trainer", "optim/grad_norm", ""),),
    "learning rate": (("trainer", "optim/lr", ""),),
    "tokens a second": (("trainer", "perf/tokens_per_s", ""),),
}
"""The same in supervised fine-tuning."""


def eval_curves(numbers: Numbers) -> dict[str, Points]:
    """Returns the reward of every evaluation over policy versions, by label."""
    return {
        match[1]: numbers.points("eval", name)
        for name in numbers.names_of("eval")
        if (match := re.fullmatch("eval/(.*)/reward_mean", name))
    }


def environment_curves(numbers: Numbers) -> dict[str, Points]:
    """Returns the training reward of each environment over steps."""
    names = environment_rewards(dict.fromkeys(numbers.names_of("orchestrator")))
    return {env: numbers.points("orchestrator", f"reward/{env}/mean") for env in names}


def environment_lines(numbers: Numbers) -> list[str]:
    """Returns lines with the reward of each environment, if there are several, and with faults
    in its rollouts."""
    faults = {env: rollouts.fault for env, rollouts in played(numbers).items()}
    rewards = {env: trend(values) for env, (_, values) in environment_curves(numbers).items()}
    envs = sorted({*rewards, *faults})
    return [
        f"          {rewards.get(env) or '-'}   {env}{f': {fault}' if fault else ''}"
        for env in envs
        if (fault := faults.get(env)) or len(envs) > 1
    ]


def ends(values: list[float]) -> tuple[float, float]:
    """Returns the means of the first and of the last values."""
    count = max(1, min(ENDS, len(values) // 2))
    return fmean(values[:count]), fmean(values[-count:])


def reward_parts(numbers: Numbers) -> list[str]:
    """Returns the metrics `reward/<env>/<metric>`: parts of a reward, and other metrics of an
    environment's rollouts."""
    names = [name for name in numbers.names_of("orchestrator") if name.startswith("reward/")]
    return [name for name in names if name.count("/") > 1 and not name.endswith("/mean")]


def fallen_lines(numbers: Numbers) -> list[str]:
    """Returns lines on parts of rewards, and other metrics of environments, that fell by more
    than FALLEN, largest fall first. A policy may gain one part of its reward at the cost of
    another."""
    falls = []
    for name in reward_parts(numbers):
        values = numbers.points("orchestrator", name)[1]
        first, last = ends(values) if len(values) > 2 * ENDS else (0.0, 0.0)
        if first > 0 and 0 <= last / first < 1 - FALLEN:
            _, env, metric = name.split("/", 2)
            falls.append((last / first, f"fell      {trend(values)}   ({metric} of {env})"))
    return [line for _, line in sorted(falls)[:MOST_FALLEN]]


def is_sft(numbers: Numbers) -> bool:
    """Returns whether the run is supervised fine-tuning, the only kind that writes `epoch`."""
    return "epoch" in numbers.names


def trend(values: list[float], spec: str = ".3f") -> str:
    """Formats the means of the first and of the last values, `0.200 -> 0.700`; a single value
    alone; empty without values."""
    return " -> ".join(f"{mean:{spec}}" for mean in ends(values)[: len(values)]) if values else ""


def inference_idle(numbers: Numbers) -> float | None:
    """Returns the fraction of the time in which inference was idle; None if it was not measured."""
    seconds = dict(zip(*numbers.points("orchestrator", "time/batch"), strict=True))
    steps, fractions = numbers.points("orchestrator", "perf/inference_idle_fraction")
    weights = [seconds.get(step, 0.0) for step in steps]
    return fmean(fractions, weights) if sum(weights) else None


def seconds_of(run_dir: RunDir, part: str) -> float:
    """Returns the seconds that the trainer spent on a part of its steps; steps trained again
    after a resume count each time."""
    lines = filter(None, map(parse_line, LineReader(run_dir.metrics).all()))
    return sum(line.get(part) or 0.0 for line in lines if line["source"] == "trainer")


def report_lines(numbers: Numbers, run_dir: RunDir) -> list[str]:
    """Returns the lines of the final report, without those of metrics that were not measured."""
    took_s, waited_s = (seconds_of(run_dir, part) for part in ("time/step", "time/wait_for_batch"))
    shares = []
    if took_s and numbers.points("trainer", "time/wait_for_batch")[1]:
        shares.append(f"trainer waited for batches {waited_s / took_s:.0%}")
    if (idle := inference_idle(numbers)) is not None:
        shares.append(f"inference was idle {idle:.0%}")
    count = max(0, max(numbers.points("trainer", "time/step")[0], default=0) - first_step(run_dir))
    of_time = f"; {', '.join(shares)} of the time" if shares else ""
    steps = f"{count} step{'' if count == 1 else 's'} in {span(took_s)}{of_time}"
    report = [steps if took_s else "no step was trained"]
    if reward := trend(numbers.reward()[1].tolist()):
        several = len(environment_curves(numbers)) > 1
        mean = (
            "mean of the first and of the last steps"
            if took_s
            else "of rollouts that no step was trained on"
        ) + ", environments at equal shares" * several
        report.append(f"reward    {reward}   ({mean})")
    report += environment_lines(numbers) + fallen_lines(numbers)
    if is_sft(numbers) and (loss := trend(numbers.points("trainer", "loss/mean")[1], ".4f")):
        report.append(f"loss      {loss}   (nats a token, mean of the first and of the last steps)")
    at, losses = numbers.points("trainer", "validation/loss")
    if losses:
        report.append(
            f"valid     {losses[0]:.4f} -> {losses[-1]:.4f}   (held-out loss, nats a token, "
            f"version {at[0]} and version {at[-1]})"
        )
    for label, (at, rewards) in eval_curves(numbers).items():
        line = f"eval      {rewards[0]:.3f}" if rewards else ""
        if len(rewards) > 1:
            line += f" -> {rewards[-1]:.3f}   ({label}, version {at[0]} and version {at[-1]})"
        elif rewards:
            line += f"   ({label}, version {at[0]})"
        report += filter(None, [line])
    if kl := numbers.points("trainer", "mismatch_kl/mean")[1]:
        report.append(
            f"mismatch  {fmean(kl):.1e}   (mean KL between inference and trainer on tokens "
            "of the trained version)"
        )
    newest = run_dir.newest_weights()
    paths = {
        "weights": newest[1] if newest else None,
        "curves": run_dir.curves,
        "metrics": run_dir.metrics,
        "logs": run_dir.logs,
        "all of it": run_dir.root,
    }
    always = ("logs", "all of it")
    report += cost_lines(numbers)
    return report + [
        f"{what:<9} {path}"
        for what, path in paths.items()
        if path and (what in always or path.exists())
    ]


def draw_curves(numbers: Numbers, path: Path, title: str, fence: Fence = None) -> None:
    """Writes curves.png: reward and evals, the panels of PANELS, time per step with the part spent
    waiting. Replaces it atomically. `fence`: see write_file."""
    from matplotlib.figure import Figure

    sft = is_sft(numbers)
    size, rows = ((14, 7), 2) if sft else ((15, 10), 3)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels = list(figure.subplots(rows, 3).flat)
    first, *middle, last = panels
    draw_first(first, numbers, sft)
    titles = SFT_PANELS if sft else PANELS
    for panel, (title, curves) in zip(middle, titles.items(), strict=True):
        panel.set_title(title)
        for source, metric, label in curves:
            panel.plot(*numbers.points(source, metric), label=label)
        if len(curves) > 1:
            panel.legend(loc="best")
    last.plot(*numbers.points("trainer", "time/step"), label="whole step")
    waits = numbers.points("trainer", "time/wait_for_batch")
    last.fill_between(*waits, alpha=0.4, label="trainer waits for the batch")
    last.set_title("seconds a step")
    last.legend(loc="best")
    for panel in panels:
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=100, format="png")
    write_file(path, picture.getvalue(), fence=fence)


def drawn_parts(numbers: Numbers) -> dict[str, Points]:
    """Returns the parts of rewards to draw with the rewards: at least two, within 0 to 1, and
    not constant."""
    curves = {name: numbers.points("orchestrator", name) for name in reward_parts(numbers)}
    within = {
        name: points
        for name, points in curves.items()
        if points[1] and 0 <= min(points[1]) < max(points[1]) <= 1
    }
    return within if 1 < len(within) <= MOST_PARTS else {}


def draw_first(panel: Any, numbers: Numbers, sft: bool) -> None:
    """Draws the first panel: loss in supervised fine-tuning, else reward and evaluations with
    confidence intervals."""
    from matplotlib import rcParams

    dashed = {"marker": "o", "linestyle": "--"}
    panel.set_title("loss, nats a token" if sft else "reward")
    environments = environment_curves(numbers)
    if sft:
        panel.plot(*numbers.points("trainer", "validation/loss"), **dashed, label="validation")
    if len(environments) < 2:
        source, metric = ("trainer", "loss/mean") if sft else ("orchestrator", "reward/mean")
        environments = {"training": numbers.points(source, metric)}
    for env, points in environments.items():
        panel.plot(*points, label=env)
    for name, points in drawn_parts(numbers).items():
        panel.plot(*points, linewidth=0.8, linestyle=":", label=name.removeprefix("reward/"))
    colours = dict(zip(environments, rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for label, (versions, rewards) in eval_curves(numbers).items():
        known = dict(zip(*numbers.points("eval", f"eval/{label}/reward_mean_stderr"), strict=True))
        errors = [INTERVAL * known.get(version, 0.0) for version in versions]
        name = f"eval {label}" + ", 95% interval" * any(errors)
        style = {**dashed, "capsize": 3, "label": name, "color": colours.get(label)}
        panel.errorbar(versions, rewards, yerr=errors, **style)
    panel.legend(loc="best")


def final_report(numbers: Numbers, run_dir: RunDir, title: str, say: Callable[[str], None]) -> None:
    """Draws curves.png and prints the report, if the run has any metrics. If the picture cannot
    be written, it only prints that."""
    if not numbers.tables.keys() & {"trainer", "eval"}:
        return
    try:
        draw_curves(numbers, run_dir.curves, title)
    except OSError as error:
        say(f"no curves: {run_dir.curves}: {error.strerror}")
    for line in report_lines(numbers, run_dir):
        say(line)


def main() -> None:
    """Draws curves.png when there are new metrics, until it is ended with the run."""
    die_with_parent()
    os.nice(19)
    root, title = Path(sys.argv[1]), sys.argv[2]
    run_dir, drawn = RunDir(root, root / "weights"), 0
    lock = run_dir.lock("rl")
    number = newest_lease(lock) if lock.parent.is_dir() else 0

    def fence() -> None:
        if number and is_over(lease_path(lock, number)):
            raise RunError("the `rl` that has started this process has lost or given back its run")

    while True:
        fence()
        started = time.monotonic()
        if (size := run_dir.metrics.stat().st_size if run_dir.metrics.exists() else 0) != drawn:
            draw_curves(Numbers.read(run_dir.metrics), run_dir.curves, title, fence)
            drawn = size
        time.sleep(max(EVERY_S, (time.monotonic() - started) / SHARE))


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        sys.exit(f"curves: {error}")
