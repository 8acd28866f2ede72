"""What a run came to: numbers before and after, where the time went, where everything lies, and the curves as a picture."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.metrics import environment_rewards
from rl.run_dir import RunDir

ENDS = 3
"""Steps at either end over which a reward is averaged: one batch alone is noisy."""
Lines = dict[tuple[int, str], dict[str, Any]]
Curve = tuple[list[int], list[float]]
PANELS: tuple[tuple[str, str], ...] = (
    ("loss/mean", "loss"),
    ("entropy/mean", "entropy, nats a token"),
    ("mismatch_kl/mean", "trainer-inference mismatch, KL"),
    ("optim/grad_norm", "gradient norm"),
)


SFT_PANELS = (("entropy/mean", "entropy, nats a token"), ("optim/grad_norm", "gradient norm"), ("optim/lr", "learning rate"),
              ("perf/tokens_per_s", "tokens a second"))  # fmt: skip
"""Of supervised fine-tuning."""


@dataclass
class Summary:
    """The run in numbers; None where nothing was measured."""

    steps: int = 0
    """The newest step that was trained."""
    reward: tuple[float, float] | None = None
    """Mean over the first and over the last steps."""
    environments: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same for each environment, if there are several."""
    evals: dict[str, tuple[int, float, int, float]] = field(default_factory=dict)
    """Label -> first version, its reward, last version, its reward."""
    time_s: float = 0.0
    """Sum of the steps' wall time."""
    trainer_waited: float | None = None
    """Share of that time in which the trainer waited for a batch."""
    inference_idle: float | None = None
    """Share of the time in which inference had nothing to do."""
    mismatch_kl: float | None = None
    loss: tuple[float, float] | None = None
    """Of supervised fine-tuning: mean over the first and over the last steps, nats a token."""
    validation: tuple[int, float, int, float] | None = None
    """First validated version, its loss, last one, its loss."""


def curve(lines: Lines, source: str, metric: str) -> Curve:
    """A metric's values over steps, without those that are missing or were not finite."""
    points = sorted((step, line[metric]) for (step, of), line in lines.items() if of == source and line.get(metric) is not None)
    return [step for step, _ in points], [value for _, value in points]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def eval_curves(lines: Lines) -> dict[str, Curve]:
    """Reward of every evaluation over policy versions, by its label."""
    keys = {key for (_, source), line in lines.items() if source == "eval" for key in line if key.endswith("/reward_mean")}
    return {key.removeprefix("eval/").removesuffix("/reward_mean"): curve(lines, "eval", key) for key in sorted(keys)}


def environment_curves(lines: Lines) -> dict[str, Curve]:
    """Training reward of each environment over steps, if there are several."""
    envs = {env for (_, source), line in lines.items() if source == "orchestrator" for env in environment_rewards(line)}
    return {env: curve(lines, "orchestrator", f"reward/{env}/mean") for env in sorted(envs)} if len(envs) > 1 else {}


def is_sft(lines: Lines) -> bool:
    """Supervised fine-tuning counts passes over its data, and nothing else does."""
    return any("epoch" in line for line in lines.values())


def ends(values: list[float]) -> tuple[float, float] | None:
    """Mean over the first and over the last values."""
    count = max(1, min(ENDS, len(values) // 2))
    return (mean(values[:count]), mean(values[-count:])) if values else None


def summarize(lines: Lines) -> Summary:
    """A run's lines in a few numbers."""
    steps, times = curve(lines, "trainer", "time/step")
    waits = curve(lines, "trainer", "time/wait_for_batch")[1]
    batch_times, idle = curve(lines, "orchestrator", "time/batch"), curve(lines, "orchestrator", "perf/inference_idle_fraction")
    seconds = dict(zip(*batch_times, strict=True))
    weighted = [(seconds.get(step, 0.0), fraction) for step, fraction in zip(*idle, strict=True)]
    total = sum(weight for weight, _ in weighted)
    kl = curve(lines, "trainer", "mismatch_kl/mean")[1]
    versions, validated = curve(lines, "trainer", "validation/loss")
    return Summary(
        steps=max(steps, default=0),
        reward=ends(curve(lines, "orchestrator", "reward/mean")[1]),
        environments={env: both for env, (_, values) in environment_curves(lines).items() if (both := ends(values))},
        evals={label: (at[0], values[0], at[-1], values[-1]) for label, (at, values) in eval_curves(lines).items() if at},
        time_s=sum(times),
        trainer_waited=sum(waits) / sum(times) if waits and sum(times) else None,
        inference_idle=sum(weight * fraction for weight, fraction in weighted) / total if total else None,
        mismatch_kl=mean(kl) if kl else None,
        loss=ends(curve(lines, "trainer", "loss/mean")[1]) if is_sft(lines) else None,
        validation=(versions[0], validated[0], versions[-1], validated[-1]) if validated else None,
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def report_lines(summary: Summary, run_dir: RunDir) -> list[str]:
    """The closing words of a run."""
    steps = f"{summary.steps} step{'' if summary.steps == 1 else 's'}"
    shares = [
        f"{what} {share:.0%}"
        for what, share in (("trainer waited for batches", summary.trainer_waited), ("inference was idle", summary.inference_idle))
        if share is not None
    ]
    lines = [f"{steps} in {duration(summary.time_s)}" + (f"; {', '.join(shares)} of the time" if shares else "")]
    if summary.reward:
        lines.append(f"reward    {summary.reward[0]:.3f} -> {summary.reward[1]:.3f}   (mean of the first and of the last steps)")
    lines += [f"          {before:.3f} -> {after:.3f}   {env}" for env, (before, after) in summary.environments.items()]
    if summary.loss:
        lines.append(f"loss      {summary.loss[0]:.4f} -> {summary.loss[1]:.4f}   (nats a token, mean of the first and of the last steps)")
    if summary.validation:
        first, before, last, after = summary.validation
        lines.append(f"valid     {before:.4f} -> {after:.4f}   (held-out loss, nats a token, version {first} and version {last})")
    for label, (first, before, last, after) in summary.evals.items():
        lines.append(f"eval      {before:.3f} -> {after:.3f}   ({label}, version {first} and version {last})")
    if summary.mismatch_kl is not None:
        lines.append(f"mismatch  {summary.mismatch_kl:.1e}   (mean KL between inference and trainer on the same tokens)")
    newest = run_dir.newest_weights()
    where = {
        "weights": newest.path if newest else None,
        "curves": run_dir.curves if run_dir.curves.exists() else None,
        "metrics": run_dir.metrics if run_dir.metrics.exists() else None,
        "logs": run_dir.logs,
        "all of it": run_dir.root,
    }
    return lines + [f"{what:<9} {path}" for what, path in where.items() if path]


def draw_curves(lines: Lines, path: Path, title: str) -> None:
    """Writes curves.png: reward and evals, loss, entropy, mismatch, gradient norm, time a step with the part spent waiting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7), layout="constrained")
    figure.suptitle(title)
    panels = list(axes.flat)
    sft = is_sft(lines)
    panels[0].set_title("loss, nats a token" if sft else "reward")
    if sft:
        panels[0].plot(*curve(lines, "trainer", "validation/loss"), marker="o", linestyle="--", label="validation")
    environments = environment_curves(lines)
    first = ("training", curve(lines, "trainer", "loss/mean") if sft else curve(lines, "orchestrator", "reward/mean"))
    for env, points in environments.items() or [first]:
        panels[0].plot(*points, label=env)
    colours = dict(zip(environments, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for label, points in eval_curves(lines).items():
        panels[0].plot(*points, marker="o", linestyle="--", label=f"eval {label}", color=colours.get(label))
    panels[0].legend(loc="best")
    for panel, (metric, name) in zip(panels[1:], SFT_PANELS if sft else PANELS, strict=False):
        panel.plot(*curve(lines, "trainer", metric))
        panel.set_title(name)
    panels[5].plot(*curve(lines, "trainer", "time/step"), label="whole step")
    steps, waits = curve(lines, "trainer", "time/wait_for_batch")
    panels[5].fill_between(steps, waits, alpha=0.4, label="trainer waits for the batch")
    panels[5].set_title("seconds a step")
    panels[5].legend(loc="best")
    for panel in panels:
        panel.set_xlabel("step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def final_report(lines: Lines, run_dir: RunDir, title: str, say: Callable[[str], None]) -> None:
    """Draws and prints, if there is anything to show. A picture that cannot be written is a remark."""
    if not any(source in ("trainer", "eval") for _, source in lines):
        return
    try:
        draw_curves(lines, run_dir.curves, title)
    except OSError as error:
        say(f"no curves: {run_dir.curves}: {error.strerror}")
    for line in report_lines(summarize(lines), run_dir):
        say(line)
