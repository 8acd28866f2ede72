"""Causes of a low reward that a few steps, or none, suffice to show."""

import statistics

from rl.diagnosis.problems import Problem
from rl.diagnosis.remedies import MOSTLY, cut_off_remedy, equal_remedy
from rl.diagnosis.state import RunState
from rl.run_dir.origin import changes_of
from rl.wire.rollouts import all_equal

FEW_STEPS = 3
"""Steps that a run must have before anything is said of them."""
COLLAPSED = 0.4
"""Share of the way from the lowest reward to the highest below which that of the newest steps
has collapsed."""
ENTROPY_FACTOR, CUT_OFF_RISE = 3.0, 0.25
"""Changes since the first step that confirm a collapse: of the entropy and of the share of
answers cut off."""
SILENT = "rollouts/zero_advantage"


def clear_causes(state: RunState) -> list[Problem]:
    """Returns the causes that need no trend, the likeliest first: answers that are cut off
    explain rewards of 0, not other equal ones. One that explains all others stands alone."""
    metrics = ("rollouts/truncated", "rollouts/length_mean")
    said = dict.fromkeys(event.reason for event in state.recent_events if event.about == "template")
    template = [Problem(text, serious=False, metrics=metrics) for text in said]
    if found := collapse(state):
        return found
    shares, silent = (
        newest(state.values("orchestrator", name)) for name in ("rollouts/truncated", SILENT)
    )
    rewards = newest(every := state.numbers.reward()[1].tolist())
    if template and (not shares or statistics.fmean(shares) > MOSTLY):
        return template
    rises = bool(rewards) and rewards[-1] > every[0]
    if shares and (share := statistics.fmean(shares)) > MOSTLY and not rises:
        found = [
            Problem(
                f"{cut_off_remedy(share, state.config)} (rollouts/truncated)",
                serious=False,
                metrics=metrics,
            )
        ]
    settings = state.config.orchestrator
    taught = settings.teacher or any(env.teacher for env in settings.environment)
    if not taught and rewards and all_equal(rewards) and min(silent, default=0) == 1:
        text = (
            f"all rewards are {rewards[0]:g} ({SILENT}): {equal_remedy(rewards[0])}; `rl show "
            f"{state.run_dir.root}` shows them"
        )
        found.insert(
            0 if rewards[0] > 0 else len(found),
            Problem(text, serious=False, metrics=(SILENT, "reward/mean"), why="no_signal"),
        )
    return found + template


def newest(values: list[float]) -> list[float]:
    """Returns a metric's values in the newest steps; none if the run has too few."""
    return values[-FEW_STEPS:] if len(values) >= FEW_STEPS else []


def collapse(state: RunState) -> list[Problem]:
    """Returns that the reward fell while the entropy leapt or far more answers were cut off, if
    so."""
    steps, rewards = (column.tolist() for column in state.numbers.reward())
    late = newest(rewards)[-max(1, len(rewards) // 2) :]
    if (
        not late
        or (now := statistics.fmean(late))
        > (low := min(rewards)) + COLLAPSED * ((peak := max(rewards)) - low)
        or low == peak
    ):
        return []
    signs, confirmed = list[str](), False
    for source, metric, what in (
        ("trainer", "entropy/mean", "entropy"),
        ("orchestrator", "rollouts/truncated", "share cut off"),
    ):
        values = state.values(source, metric) or [0.0]
        first, last = values[0], statistics.fmean(values[-len(late) :])
        changed = (
            max(first, last) > ENTROPY_FACTOR * min(first, last)
            if source == "trainer"
            else last - first > CUT_OFF_RISE
        )
        signs += [f"the {what} went from {first:.2g} to {last:.2g} ({metric})"] if changed else []
        # an entropy that falls, as it does when a policy learns, shows nothing alone
        confirmed = confirmed or (changed and last > first)
    if not confirmed:
        return []
    rate, edited = (
        state.config.trainer.optim.lr,
        [each.key for each in changes_of(state.run_dir) if "(content of " in each.key],
    )
    cause = (
        "The usual cause is a learning rate that is too high: start over with a tenth of "
        f"trainer.optim.lr = {rate:g}"
    )
    if edited:
        cause = f"Look first at what was edited before a resume: {', '.join(edited)}"
    text = (
        f"the policy has collapsed: the reward fell from {peak:.3f} in step "
        f"{steps[rewards.index(peak)]} to {now:.3f}, and "
        f"{' and '.join(signs)}. {cause}"
    )
    return [
        Problem(
            text,
            serious=False,
            metrics=("reward/mean", "entropy/mean", "rollouts/truncated", "optim/grad_norm"),
        )
    ]
