"""Interprets rewards: why a reward does not rise, from the run's metrics, and what a trial
showed, from its rollouts."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

from rl.config.run import QUICK_TOKENS
from rl.diagnosis.environments import MOSTLY, cut_off_remedy, equal_remedy, max_tokens
from rl.diagnosis.problems import Problem
from rl.diagnosis.rollouts import Row, read_all
from rl.diagnosis.state import RunState
from rl.run_dir.paths import changes_of
from rl.wire.parity import RUN_LIMITS
from rl.wire.rollouts import all_equal

ENOUGH_STEPS = 16
"""Steps below which a quarter of them cannot distinguish a rising reward from noise."""
CLEAR = 1.0
"""Standard errors by which the late reward must exceed the early one to count as rising."""
SOLVED = 0.95
"""Late reward above which there is nothing left to gain."""
WORSE = 1.5
"""Factor over the first loss on held-out examples above which training has made the model worse."""
FAR = 3.0
"""Lag KL above which a policy has left recorded rollouts; another model's, which may be what was
recorded, are nearer."""
FEW_STEPS = 3
"""Steps that a run must have before anything is said of them."""
COLLAPSED = 0.4
"""Share of the way from the lowest reward to the highest below which that of the newest steps
has collapsed."""
ENTROPY_FACTOR, CUT_OFF_RISE = 3.0, 0.25
"""Rises since the first step that confirm a collapse: of the entropy and of the share of answers
cut off."""
CUT_OFF, SILENT = "rollouts/truncated", "rollouts/zero_advantage"
OVERFLOW, SAMPLED = "tokens/kept_overflow", ("rollouts/length_mean", "rollouts/finished")


def hint(text: str, *metrics: str, why: str | None = None) -> Problem:
    """Returns a possible cause of a low reward, with the metrics that show it and the `why` of
    the rollouts that show it."""
    return Problem(text, serious=False, metrics=metrics, why=why)


def reward_problems(state: RunState) -> list[Problem]:
    """Returns that the reward does not rise, then possible causes. Empty if it rises, or it is too
    early to tell and no cause is clear.

    Of a run that plays no environments, which has no reward to rise, returns what may have
    destroyed its model."""
    if not state.config.plays:
        causes = list(trainer_hints(state))
        return (
            [
                hint("the model may be worse than the one that it began as.", *causes[0].metrics),
                *causes,
            ]
            if causes
            else []
        )
    values, clear = state.numbers.reward()[1].tolist(), clear_causes(state)
    if len(values) < ENOUGH_STEPS:
        if not clear or (values and values[-1] >= SOLVED):
            return []
        so_far = "no step has been trained"
        if values:
            so_far = f"{values[0]:.3f} in the first step, {values[-1]:.3f} in step {len(values)}"
        return [hint(f"the reward is low: {so_far}.", "reward/mean"), *clear]
    size = len(values) // 4
    first, last = values[:size], values[-size:]
    early, late = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    fell = any("reward/mean" in problem.metrics[:1] for problem in clear)
    if late >= SOLVED or (late - early > CLEAR * error and not fell):
        return []
    shown = {metric for problem in clear for metric in problem.metrics}
    others = [*rollout_hints(state), *trainer_hints(state)]
    causes = [*clear, *(problem for problem in others if problem.metrics[0] not in shown)]
    none = (
        " No metric of the run shows why; try more steps, a higher trainer.optim.lr, or an easier "
        "task"
    )
    return [
        hint(
            f"the reward does not rise: {early:.3f} in the first {size} steps, {late:.3f} in the "
            f"last {size}.{'' if causes else none}",
            "reward/mean",
        ),
        *causes,
    ]


# Causes that a few steps, or none, suffice to show ------------------------------------------------


def clear_causes(state: RunState) -> list[Problem]:
    """Returns the causes that need no trend, the likeliest first: answers that are cut off
    explain rewards of 0, not other equal ones. One that explains all others stands alone."""
    lengths = (CUT_OFF, "rollouts/length_mean")
    warnings = [event.reason for event in state.recent_events if event.about == "template"]
    template = [hint(text, *lengths) for text in dict.fromkeys(warnings)]
    steps, rewards = (column.tolist() for column in state.numbers.reward())
    if text := collapse(state, steps, rewards):
        return [hint(text, "reward/mean", "entropy/mean", CUT_OFF, "optim/grad_norm")]
    late, silent = newest(rewards), newest(state.values("orchestrator", SILENT))
    cut_off = newest(state.values("orchestrator", CUT_OFF))
    share, causes = statistics.fmean(cut_off or [0.0]), list[Problem]()
    if template and (not cut_off or share > MOSTLY):
        return template
    if share > MOSTLY and not (late and late[-1] > rewards[0]):
        causes = [hint(f"{cut_off_remedy(share, state.config)} ({CUT_OFF})", *lengths)]
    settings = state.config.orchestrator
    is_taught = settings.teacher or any(env.teacher for env in settings.environment)
    if not is_taught and late and all_equal(late) and min(silent, default=0) == 1:
        equal = hint(
            f"all rewards are {late[0]:g} ({SILENT}): {equal_remedy(late[0])}; `rl show "
            f"{state.run_dir.root}` shows them",
            SILENT,
            "reward/mean",
            why="no_signal",
        )
        causes = [equal, *causes] if late[0] > 0 else [*causes, equal]
    return causes + template


def newest(values: list[float]) -> list[float]:
    """Returns a metric's values in the newest steps; none if the run has too few."""
    return values[-FEW_STEPS:] if len(values) >= FEW_STEPS else []


def collapse(state: RunState, steps: list[int], rewards: list[float]) -> str:
    """Returns that the reward fell while the entropy leapt or far more answers were cut off;
    empty if not so."""
    late = newest(rewards)[-max(1, len(rewards) // 2) :]
    if not late:
        return ""
    now, low, peak = statistics.fmean(late), min(rewards), max(rewards)
    if low == peak or now > low + COLLAPSED * (peak - low):
        return ""

    def change(source: str, metric: str) -> tuple[float, float]:
        values = state.values(source, metric) or [0.0]
        return values[0], statistics.fmean(values[-len(late) :])

    entropy, cut_off = change("trainer", "entropy/mean"), change("orchestrator", CUT_OFF)
    signs = list[str]()
    if entropy[1] > ENTROPY_FACTOR * entropy[0]:
        signs.append(f"the entropy went from {entropy[0]:.2g} to {entropy[1]:.2g} (entropy/mean)")
    if cut_off[1] - cut_off[0] > CUT_OFF_RISE:
        signs.append(
            f"the share cut off went from {cut_off[0]:.2g} to {cut_off[1]:.2g} ({CUT_OFF})"
        )
    if not signs:
        return ""
    cause = (
        "The usual cause is a learning rate that is too high: start over with a tenth of "
        f"trainer.optim.lr = {state.config.trainer.optim.lr:g}"
    )
    edited = [each.key for each in changes_of(state.run_dir) if "(content of " in each.key]
    if edited:
        cause = f"Look first at what was edited before a resume: {', '.join(edited)}"
    return (
        f"the policy has collapsed: the reward fell from {peak:.3f} in step "
        f"{steps[rewards.index(peak)]} to {now:.3f}, and {' and '.join(signs)}. {cause}"
    )


# Causes that the newest steps' metrics point to ---------------------------------------------------


def mean(state: RunState, source: str, metric: str) -> float:
    """Returns a metric's mean over the newest steps; NaN, which is neither above nor below any
    limit, if it has no value."""
    return statistics.fmean(state.recent(source, metric) or [math.nan])


def rollout_hints(state: RunState) -> Iterator[Problem]:
    """Yields causes that the rollout metrics point to, with remedies."""
    config, show = state.config, f"`rl show {state.run_dir.root}"
    names = ("errored", "truncated", "overlong", "empty", "zero_advantage")
    share = {name: mean(state, "orchestrator", f"rollouts/{name}") for name in names}
    lag, reward = (
        mean(state, "orchestrator", "lag/mean"),
        mean(state, "orchestrator", "reward/mean"),
    )
    if share["errored"] > 0.1:
        yield hint(
            f"{share['errored']:.0%} of the rollouts failed (rollouts/errored): {show} --why "
            "error` shows why",
            "rollouts/errored",
            why="error",
        )
    if share["truncated"] > 0.2:
        yield hint(
            f"{share['truncated']:.0%} of the answers were cut off ({CUT_OFF}): raise "
            f"orchestrator.sampling.max_tokens = {config.orchestrator.sampling.max_tokens}",
            CUT_OFF,
        )
    counts = [mean(state, "orchestrator", name) for name in (OVERFLOW, *SAMPLED)]
    if counts[0] > 0.01 * counts[1] * counts[2]:
        yield hint(
            f"{counts[0] / (counts[1] * counts[2]):.0%} of the tokens, those of the highest "
            f"entropy, are not trained ({OVERFLOW}): raise trainer.max_kept = "
            f"{config.trainer.max_kept}, or set orchestrator.sampling.top_k",
            OVERFLOW,
        )
    if share["overlong"] > 0.05:
        yield hint(
            f"{share['overlong']:.0%} of the rollouts exceeded the context (rollouts/overlong): "
            f"raise model.max_model_len = {config.model.max_model_len}",
            "rollouts/overlong",
        )
    if share["empty"] > 0.1:
        yield hint(
            f"{share['empty']:.0%} of the rollouts have no tokens (rollouts/empty): look at some "
            f"with {show} --why empty`",
            "rollouts/empty",
            why="empty",
        )
    if share["zero_advantage"] > 0.5:
        way = "harder tasks" if reward > 0.8 else "another reward function"
        yield hint(
            f"{share['zero_advantage']:.0%} of the rollouts are in groups with all rewards equal, "
            f"at a mean reward of {reward:.3f} ({SILENT}): "
            f"{'easier tasks, or `rl sft` first' if reward < 0.2 else way}, a larger group_size = "
            f"{config.orchestrator.group_size}, a higher temperature, or "
            "orchestrator.environment.difficulty",
            SILENT,
            why="no_signal",
        )
    if lag > 4:
        yield hint(
            f"tokens are {lag:.1f} versions old (lag/mean): lower max_lag = {config.max_lag}",
            "lag/mean",
        )


def trainer_hints(state: RunState) -> Iterator[Problem]:
    """Yields causes that the trainer metrics point to, with remedies."""
    config, optim = state.config, state.config.trainer.optim
    rate, norm = mean(state, "trainer", "optim/lr"), mean(state, "trainer", "optim/grad_norm")
    losses = state.values("trainer", "validation/loss") or [math.nan]
    if losses[-1] > WORSE * losses[0]:
        yield hint(
            f"the loss on held-out examples rose from {losses[0]:.3g} to {losses[-1]:.3g} "
            "(validation/loss): lower the learning rate",
            "validation/loss",
        )
    if rate == 0:
        yield hint(
            f"the learning rate is 0 (optim/lr): raise trainer.optim.lr = {optim.lr:g}, or see "
            "trainer.optim.schedule",
            "optim/lr",
        )
    if config.trainer.lora and 0 < rate < 5e-6:
        yield hint(
            f"adapters hardly change at a learning rate of {rate:g} (optim/lr): 1e-5 to 1e-4 is "
            "usual",
            "optim/lr",
        )
    if norm == 0:
        yield hint(
            "all gradients are 0 (optim/grad_norm): no token of a batch contributes; see "
            "masked_fraction and rollouts/trained",
            "optim/grad_norm",
            "masked_fraction",
            "rollouts/trained",
        )
    yield from trainer_signs(state)


def other_signs(state: RunState, hints: list[Problem]) -> Iterator[Problem]:
    """Yields what the trainer's metrics show of a run that plays environments and the hints do not:
    a reward may rise all the same, for a while."""
    if state.config.plays and newest(state.numbers.reward()[1].tolist()):
        yield from (sign for sign in trainer_signs(state) if sign not in hints)


def trainer_signs(state: RunState) -> Iterator[Problem]:
    """Yields what the trainer metrics show to be wrong however the reward moves, with remedies."""
    config, optim = state.config, state.config.trainer.optim
    norm, masked = (
        mean(state, "trainer", "optim/grad_norm"),
        mean(state, "trainer", "masked_fraction"),
    )
    kl, lag_kl = mean(state, "trainer", "mismatch_kl/mean"), mean(state, "trainer", "lag_kl/mean")
    entropy = mean(state, "trainer", "entropy/mean")
    limit, doctor = RUN_LIMITS[config.model.dtype].kl, "`rl doctor --parity MODEL`"
    if norm > 20 * optim.max_grad_norm:
        yield hint(
            f"gradients are {norm / optim.max_grad_norm:.0f} times the clipping limit "
            f"(optim/grad_norm {norm:.3g}): try a lower learning rate, or more rollouts",
            "optim/grad_norm",
        )
    if masked > 0.2:
        yield hint(
            f"{masked:.0%} of the tokens are masked (masked_fraction): see "
            "trainer.loss.token_mask, mismatch_kl and lag_kl",
            "masked_fraction",
            "mismatch_kl/mean",
            "lag_kl/mean",
        )
    if 0.0 in state.recent("trainer", "parity/agrees"):
        yield hint(
            "trainer and inference disagree on the same tokens (parity/agrees): "
            f"{doctor} looks for the cause",
            "parity/agrees",
        )
    elif kl > limit:
        yield hint(
            f"trainer and inference disagree: mismatch_kl/mean {kl:.2g} is above {limit:g}; "
            f"{doctor} looks for the cause",
            "mismatch_kl/mean",
        )
    if lag_kl > (10 * limit if config.plays else FAR):
        yield hint(
            f"rollouts are far from the trained policy: lag_kl/mean {lag_kl:.2g}; try a lower "
            "learning rate or max_lag",
            "lag_kl/mean",
        )
    # a policy that solves its tasks may be certain, and so may answers that fine-tuning teaches
    is_solved = mean(state, "orchestrator", "reward/mean") >= SOLVED
    if entropy < 0.02 and config.kind != "sft" and not is_solved:
        yield hint(
            f"the policy is nearly certain of each token (entropy/mean {entropy:.3g}), so groups "
            "hardly differ: try a lower learning rate, or trainer.loss.entropy_coefficient",
            "entropy/mean",
        )


# What a trial showed ------------------------------------------------------------------------------


def reward_summary(state: RunState) -> str:
    """Returns what a trial (`--quick`) that ended well showed: the number of trained steps, and
    whether there is something to learn."""
    steps = len({*state.numbers.steps("trainer")} - {*state.quarantined})
    head = f"trained {steps or 'no'} step{'' if steps == 1 else 's'}"
    if state.config.kind == "sft":
        losses = state.values("trainer", "loss/mean")
        return f"{head}; loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else head
    of_env: dict[str, list[Row]] = defaultdict(list)
    for row in read_all(state.run_dir.rollout_files().values(), damaged=[]):
        of_env[row.get("env", "")].append(row)
    settings, limits = state.config.orchestrator, max_tokens(state.config)
    taught = {env.label for env in settings.environment if env.teacher or settings.teacher}
    verdicts = [
        f"{env}: {what_rollouts_say(rows, env in taught, limits.get(env))}"
        for env, rows in sorted(of_env.items())
    ]
    see = [f"see {state.run_dir.rollouts_dir}"] if verdicts else []
    return "; ".join([head, *verdicts, *see])


def what_rollouts_say(rows: list[Row], is_taught: bool, limit: int | None) -> str:
    """Describes an environment's rewards, what can be learned from them, and how many rollouts
    failed or were cut off at `limit` tokens."""
    errors = [row["error"].splitlines()[0] for row in rows if row.get("error")]
    if len(errors) == len(rows):
        return f"all {len(rows)} rollouts failed: {errors[0]}"
    scored = [r for r in rows if not r.get("error") and r.get("why") != "not_trainable"]
    rewards = [row["reward"] for row in scored]
    with_signal = {row["group_id"] for row in scored if row.get("advantage")}
    if not rewards:
        text = "no rollout belongs to a trained agent"
    elif all_equal(rewards):
        text = f"all rewards {rewards[0]:g}"
    else:
        text = f"rewards {min(rewards):g} to {max(rewards):g}, mean {statistics.mean(rewards):.3f}"
    if with_signal:
        groups = {row["group_id"] for row in rows}
        text += f": something to learn in {len(with_signal)} of {len(groups)} groups"
    elif is_taught:
        text += ": learning comes from the teacher"
    else:
        text += ": nothing to learn" + (" any more" if rewards and min(rewards) >= SOLVED else "")
    if errors:
        text += f"; {len(errors)} of {len(rows)} failed: {errors[0]}"
    cut_off = sum(row.get("outcome") == "truncated" for row in rows)
    if cut_off > len(rows) / 5:
        quick = f"--quick allows {QUICK_TOKENS} tokens"
        whose = quick if limit == QUICK_TOKENS else f"sampling.max_tokens = {limit}"
        text += f"; {cut_off} of {len(rows)} answers were cut off ({whose})"
    return text
