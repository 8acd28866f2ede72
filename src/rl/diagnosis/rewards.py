"""Interprets rewards: why a reward does not rise, from the run's metrics, and what a trial
showed, from its rollouts."""

import math
import statistics
from collections import defaultdict

from rl.config.quick import TOKENS
from rl.diagnosis.clear_causes import clear_causes
from rl.diagnosis.environments import max_tokens
from rl.diagnosis.problems import Problem
from rl.diagnosis.rollouts import Row, read_all
from rl.diagnosis.state import RunState
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


def reward_problems(state: RunState) -> list[Problem]:
    """Returns that the reward does not rise, then possible causes. Empty if it rises, or it is too
    early to tell and no cause is clear.

    Of a run that plays no environments, which has no reward to rise, returns what may have
    destroyed its model."""
    values = state.numbers.reward()[1]
    if not state.config.plays:
        found = trainer_hints(state)
        return (
            [
                hint("the model may be worse than the one that it began as.", *found[0].metrics),
                *found,
            ]
            if found
            else []
        )
    clear = clear_causes(state)
    if len(values) < ENOUGH_STEPS:
        return early_problems(values.tolist(), clear)
    size = len(values) // 4
    first, last = values[:size], values[-size:]
    early, late = first.mean(), last.mean()
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / size)
    fell = any("reward/mean" in problem.metrics[:1] for problem in clear)
    if late >= SOLVED or (late - early > CLEAR * error and not fell):
        return []
    told = {metric for problem in clear for metric in problem.metrics}
    found = [
        *clear,
        *(
            one
            for one in (*rollout_hints(state), *trainer_hints(state))
            if one.metrics[0] not in told
        ),
    ]
    none = (
        ""
        if found
        else " No metric of the run shows why; try more steps, a higher trainer.optim.lr, or an "
        "easier task"
    )
    head = (
        f"the reward does not rise: {early:.3f} in the first {size} steps, {late:.3f} in the "
        f"last {size}.{none}"
    )
    return [hint(head, "reward/mean"), *found]


def early_problems(values: list[float], clear: list[Problem]) -> list[Problem]:
    """Returns the causes that are clear before a trend is, below the rewards so far."""
    if not clear or (values and values[-1] >= SOLVED):
        return []
    so_far = (
        f"{values[0]:.3f} in the first step, {values[-1]:.3f} in step {len(values)}"
        if values
        else "no step has been trained"
    )
    return [hint(f"the reward is low: {so_far}.", "reward/mean"), *clear]


def hint(text: str, *metrics: str, why: str | None = None) -> Problem:
    """Returns a possible cause of a low reward, with the metrics that show it and the `why` of
    the rollouts that show it."""
    return Problem(text, serious=False, metrics=metrics, why=why)


def reward_summary(state: RunState) -> str:
    """Returns what a trial (`--quick`) that ended well showed: the number of trained steps, and
    whether there is something to learn."""
    steps = len({*state.numbers.steps("trainer")} - {*state.quarantined})
    head = f"trained {steps or 'no'} step{'' if steps == 1 else 's'}"
    if state.config.sft:
        losses = state.values("trainer", "loss/mean")
        return f"{head}; loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else head
    rollouts: dict[str, list[Row]] = defaultdict(list)
    for rollout in read_all(state.run_dir.rollout_files().values(), damaged=[]):
        rollouts[rollout.get("env", "")].append(rollout)
    with_teacher = {
        env.label
        for env in state.config.orchestrator.environment
        if env.teacher or state.config.orchestrator.teacher
    }
    limits = max_tokens(state.config)
    found = [
        f"{env}: {what_rollouts_say(each, env in with_teacher, limits.get(env))}"
        for env, each in sorted(rollouts.items())
    ]
    return "; ".join([head, *found, *([f"see {state.run_dir.rollouts_dir}"] if found else [])])


def what_rollouts_say(rollouts: list[Row], has_teacher: bool, limit: int | None) -> str:
    """Describes an environment's rewards, what can be learned from them, and how many rollouts
    failed or were cut off at `limit` tokens."""
    count, failed = (
        len(rollouts),
        [rollout["error"] for rollout in rollouts if rollout.get("error")],
    )
    if len(failed) == count:
        return f"all {count} rollouts failed: {failed[0].splitlines()[0]}"
    scored = [
        rollout
        for rollout in rollouts
        if not rollout.get("error") and rollout.get("why") != "not_trainable"
    ]
    rewards = [rollout["reward"] for rollout in scored]
    signal = {rollout["group_id"] for rollout in scored if rollout.get("advantage")}
    groups = {rollout["group_id"] for rollout in rollouts}
    if not rewards:
        text = "no rollout belongs to a trained agent"
    elif all_equal(rewards):
        text = f"all rewards {rewards[0]:g}"
    else:
        text = f"rewards {min(rewards):g} to {max(rewards):g}, mean {statistics.mean(rewards):.3f}"
    if signal:
        text += f": something to learn in {len(signal)} of {len(groups)} groups"
    elif has_teacher:
        text += ": learning comes from the teacher"
    else:
        text += ": nothing to learn" + (" any more" if rewards and min(rewards) >= SOLVED else "")
    if failed:
        text += f"; {len(failed)} of {count} failed: {failed[0].splitlines()[0]}"
    if (cut := sum(rollout.get("outcome") == "truncated" for rollout in rollouts)) > count / 5:
        whose = (
            f"--quick allows {TOKENS} tokens"
            if limit == TOKENS
            else f"sampling.max_tokens = {limit}"
        )
        text += f"; {cut} of {count} answers were cut off ({whose})"
    return text


def means(state: RunState, source: str, *metrics: str) -> list[float]:
    """Returns each metric's mean over the newest steps; NaN, which is neither above nor below
    any limit, if it has no value."""
    return [statistics.mean(state.recent(source, metric) or [math.nan]) for metric in metrics]


def rollout_hints(state: RunState) -> list[Problem]:
    """Returns causes that the rollout metrics point to, with remedies."""
    config, root = state.config, state.run_dir.root
    shares = (
        "rollouts/errored",
        "rollouts/truncated",
        "rollouts/overlong",
        "rollouts/empty",
        "rollouts/zero_advantage",
    )
    errored, truncated, overlong, empty, equal, reward, lag = means(
        state, "orchestrator", *shares, "reward/mean", "lag/mean"
    )
    way = (
        "easier tasks, or `rl sft` first"
        if reward < 0.2
        else "harder tasks"
        if reward > 0.8
        else "another reward function"
    )
    signs = [
        (
            errored > 0.1,
            f"{errored:.0%} of the rollouts failed (rollouts/errored): `rl show {root} --why "
            "error` shows why",
            "rollouts/errored",
            "error",
        ),
        (
            truncated > 0.2,
            f"{truncated:.0%} of the answers were cut off (rollouts/truncated): "
            f"raise orchestrator.sampling.max_tokens = {config.orchestrator.sampling.max_tokens}",
            "rollouts/truncated",
            None,
        ),
        (
            overlong > 0.05,
            f"{overlong:.0%} of the rollouts exceeded the context (rollouts/overlong): "
            f"raise model.max_model_len = {config.model.max_model_len}",
            "rollouts/overlong",
            None,
        ),
        (
            empty > 0.1,
            f"{empty:.0%} of the rollouts have no tokens (rollouts/empty): look at some with "
            f"`rl show {root} --why empty`",
            "rollouts/empty",
            "empty",
        ),
        (
            equal > 0.5,
            f"{equal:.0%} of the rollouts are in groups with all rewards equal, at a mean "
            f"reward of {reward:.3f} "
            f"(rollouts/zero_advantage): {way}, a larger group_size = "
            f"{config.orchestrator.group_size}, a higher temperature, "
            "or orchestrator.environment.difficulty",
            "rollouts/zero_advantage",
            "no_signal",
        ),
        (
            lag > 4,
            f"tokens are {lag:.1f} versions old (lag/mean): lower max_lag = {config.max_lag}",
            "lag/mean",
            None,
        ),
    ]
    return [hint(text, metric, why=why) for is_there, text, metric, why in signs if is_there]


def trainer_hints(state: RunState) -> list[Problem]:
    """Returns causes that the trainer metrics point to, with remedies."""
    optim, lora, doctor = (
        state.config.trainer.optim,
        state.config.trainer.lora,
        "`rl doctor --parity MODEL` looks for the cause",
    )
    kls = ("mismatch_kl/mean", "lag_kl/mean")
    rate, norm, masked, entropy, kl, lag_kl = means(
        state, "trainer", "optim/lr", "optim/grad_norm", "masked_fraction", "entropy/mean", *kls
    )
    limit, disagree = (
        RUN_LIMITS[state.config.model.dtype].kl,
        0.0 in state.recent("trainer", "parity/agrees"),
    )
    held_out = state.values("trainer", "validation/loss") or [math.nan]
    signs = [
        (
            held_out[-1] > WORSE * held_out[0],
            f"the loss on held-out examples rose from {held_out[0]:.3g} to "
            f"{held_out[-1]:.3g} (validation/loss): lower the learning rate",
            "validation/loss",
        ),
        (
            rate == 0,
            f"the learning rate is 0 (optim/lr): raise trainer.optim.lr = {optim.lr:g}, or "
            "see trainer.optim.schedule",
            "optim/lr",
        ),
        (
            lora and 0 < rate < 5e-6,
            f"adapters hardly change at a learning rate of {rate:g} (optim/lr): 1e-5 to 1e-4 "
            "is usual",
            "optim/lr",
        ),
        (
            norm == 0,
            "all gradients are 0 (optim/grad_norm): no token of a batch contributes; see "
            "masked_fraction and rollouts/trained",
            "optim/grad_norm",
            "masked_fraction",
            "rollouts/trained",
        ),
        (
            norm > 20 * optim.max_grad_norm,
            f"gradients are {norm / optim.max_grad_norm:.0f} times the clipping limit "
            f"(optim/grad_norm {norm:.3g}): "
            "try a lower learning rate, or more rollouts",
            "optim/grad_norm",
        ),
        (
            masked > 0.2,
            f"{masked:.0%} of the tokens are masked (masked_fraction): see "
            "trainer.loss.token_mask, mismatch_kl and lag_kl",
            "masked_fraction",
            "mismatch_kl/mean",
            "lag_kl/mean",
        ),
        (
            disagree,
            f"trainer and inference disagree on the same tokens (parity/agrees): {doctor}",
            "parity/agrees",
        ),
        (
            kl > limit and not disagree,
            f"trainer and inference disagree: mismatch_kl/mean {kl:.2g} is above {limit:g}; "
            f"{doctor}",
            "mismatch_kl/mean",
        ),
        (
            lag_kl > (10 * limit if state.config.plays else FAR),
            f"rollouts are far from the trained policy: lag_kl/mean {lag_kl:.2g}; try a "
            "lower learning rate or max_lag",
            "lag_kl/mean",
        ),
        (
            # answers that fine-tuning teaches may be certain
            entropy < 0.02 and not state.config.sft,
            f"the policy is nearly certain of each token (entropy/mean {entropy:.3g}), so "
            "groups hardly differ: "
            "try a lower learning rate, or trainer.loss.entropy_coefficient",
            "entropy/mean",
        ),
    ]
    return [hint(text, *metrics) for is_there, text, *metrics in signs if is_there]
