"""Why a reward does not rise: what the run's own numbers point to."""

import math
import statistics

from rl.parity import run_limit
from rl.run_state import RunState

ENOUGH_STEPS = 8
"""Before that a reward has had no time to rise."""
CLEAR = 2.0
"""Standard errors by which the late reward must be above the early one to count as risen."""
SOLVED = 0.95


def reward_lines(state: RunState) -> list[str]:
    """Nothing where it rises, or where it is too early to tell; else the figures and what they point to."""
    rewards = [(step, line["reward/mean"]) for (step, source), line in sorted(state.lines.items()) if source == "orchestrator"
               and line.get("reward/mean") is not None]  # fmt: skip
    values = [value for _, value in rewards]
    if state.config.sft or len(values) < ENOUGH_STEPS or rises(values):
        return []
    size = max(2, len(values) // 4)
    early, late = statistics.mean(values[:size]), statistics.mean(values[-size:])
    head = f"the reward does not rise: {early:.3f} in the first {size} steps, {late:.3f} in the last {size}."
    found = hints(state)
    if not found:
        return [f"{head} No figure of the run says why; more steps, a higher trainer.optim.lr, or an easier task"]
    return [f"{head} To see why it does not:", *(f"  - {hint}" for hint in found)]


def rises(values: list[float]) -> bool:
    """Whether the last quarter is clearly above the first, or there is nothing above it."""
    size = max(2, len(values) // 4)
    early, late = values[:size], values[-size:]
    error = math.sqrt((statistics.variance(early) + statistics.variance(late)) / size)
    difference = statistics.mean(late) - statistics.mean(early)
    return statistics.mean(late) >= SOLVED or (difference > 0 and difference > CLEAR * error)


def hints(state: RunState) -> list[str]:
    """What stands out, with its figure and the remedy."""
    return [*rollout_hints(state), *trainer_hints(state)]


def mean_of(state: RunState, source: str, metric: str) -> float | None:
    values = state.recent(source, metric)
    return statistics.mean(values) if values else None


def rollout_hints(state: RunState) -> list[str]:
    """What the rollouts show."""
    orchestrator = state.config.orchestrator

    def share(name: str) -> float:
        return mean_of(state, "orchestrator", f"rollouts/{name}") or 0.0

    reward, found = mean_of(state, "orchestrator", "reward/mean") or 0.0, []
    if share("errored") > 0.1:
        found.append(f"{share('errored'):.0%} of the rollouts failed (rollouts/errored): `error` in rollouts/*.jsonl says why")
    if share("truncated") > 0.2:
        limit = orchestrator.sampling.max_tokens
        found.append(
            f"{share('truncated'):.0%} of the answers were cut off (rollouts/truncated): raise orchestrator.sampling.max_tokens = {limit}"
        )
    if share("overlong") > 0.05:
        limit = state.config.model.max_model_len
        found.append(
            f"{share('overlong'):.0%} of the rollouts outgrew the context (rollouts/overlong): raise model.max_model_len = {limit}"
        )
    if share("empty") > 0.1:
        found.append(f"{share('empty'):.0%} of the rollouts have no token (rollouts/empty): look at one in rollouts/*.jsonl")
    if share("zero_advantage") > 0.5:
        size = orchestrator.group_size
        way = "easier tasks, or `rl sft` first" if reward < 0.2 else "harder tasks" if reward > 0.8 else "another reward function"
        found.append(
            f"{share('zero_advantage'):.0%} of the rollouts are in groups whose rewards are all equal, at a mean reward of {reward:.3f} "
            f"(rollouts/zero_advantage): {way}, a larger group_size = {size}, a higher temperature, or orchestrator.environment.difficulty"
        )
    lag = mean_of(state, "orchestrator", "lag/mean") or 0.0
    if lag > 4:
        found.append(f"tokens are {lag:.1f} versions old (lag/mean): lower max_lag = {state.config.max_lag}")
    return found


def trainer_hints(state: RunState) -> list[str]:
    """What the training shows."""
    found, trainer = [], state.config.trainer
    rate, norm = mean_of(state, "trainer", "optim/lr"), mean_of(state, "trainer", "optim/grad_norm")
    if rate == 0:
        found.append(f"the learning rate is 0 (optim/lr): raise trainer.optim.lr = {trainer.optim.lr:g}, or see trainer.optim.schedule")
    elif rate is not None and trainer.lora and rate < 5e-6:
        found.append(f"adapters hardly move at a learning rate of {rate:g} (optim/lr): 1e-5 to 1e-4 is usual")
    if norm == 0:
        found.append("all gradients are 0 (optim/grad_norm): no token of a batch counts; see masked_fraction and rollouts/trained")
    elif norm is not None and norm > 20 * trainer.optim.max_grad_norm:
        times = norm / trainer.optim.max_grad_norm
        found.append(
            f"gradients are {times:.0f} times what is let through (optim/grad_norm {norm:.3g}): a lower learning rate, more rollouts"
        )
    masked = mean_of(state, "trainer", "masked_fraction") or 0.0
    if masked > 0.2:
        found.append(f"{masked:.0%} of the tokens are masked (masked_fraction): see trainer.loss.token_mask and what mismatch_kl says")
    found += mismatch_hints(state)
    entropy = mean_of(state, "trainer", "entropy/mean")
    if entropy is not None and entropy < 0.02:
        remedy = "a lower learning rate, or trainer.loss.entropy_coefficient"
        found.append(f"the policy is nearly certain of each token (entropy/mean {entropy:.3g}), so groups hardly differ: {remedy}")
    return found


def mismatch_hints(state: RunState) -> list[str]:
    """Trainer and inference that compute differently. Where tokens lag, what training moved is in the KL, too."""
    limit, kl = run_limit(state.config.model.dtype).kl, mean_of(state, "trainer", "mismatch_kl/mean") or 0.0
    look = "`rl doctor --parity MODEL` looks for the cause"
    if 0.0 in state.recent("trainer", "parity/agrees"):
        return [f"trainer and inference disagree on the same tokens (parity/agrees): {look}"]
    lag = mean_of(state, "orchestrator", "lag/mean") or 0.0
    if kl > limit and lag == 0:
        return [f"trainer and inference disagree: mismatch_kl/mean {kl:.2g} is over {limit:g} though no token is old; {look}"]
    if kl > 10 * limit:
        return [f"rollouts are far from what is trained: mismatch_kl/mean {kl:.2g}; a lower learning rate or max_lag, or {look}"]
    return []
