"""Explains in a sentence why a rollout was trained or not."""

from collections.abc import Sequence

from rl.records.run import Run
from rl.system.errors import RunError
from rl.view.responses import RolloutRow
from rl.wire.rollouts import all_equal

REASONS = {
    "error": "another rollout of its group failed, and the rest of a group would be biased",
    "stale": "it is older than orchestrator.max_off_policy_steps allows",
    "surplus": "earlier groups filled its batch (extra groups are started because some have no "
    "signal); its task is played next",
    "empty": "no token was sampled",
    "overlong": "its prompt left no room for an answer: raise model.max_model_len",
    "truncated": "its answer was cut off, and orchestrator.mask_truncated leaves such answers out; "
    "raise orchestrator.sampling.max_tokens",
    "filtered": "orchestrator.filter dropped it",
    "not_trainable": "its agent is not trained",
    "environment": "it failed: the environment's code raised an exception",
    "reward": "it failed: a reward function raised an exception, or returned no finite number",
    "inference": "it failed: the inference server did not answer",
    "timeout": "it failed: a deadline passed",
    "worker": "it failed: its worker process died",
    "teacher": "it failed: the teacher did not score it",
    "logprobs": "it failed: the sampler returned a log-probability that is not finite",
    "pending": "no batch has settled it yet",
}
"""Sentences for the values of `why` in rollouts/*.jsonl."""


def explanation(row: RolloutRow, group: Sequence[RolloutRow], run: Run) -> str:
    """Explains what became of a rollout and why; empty for an evaluation's rollout."""
    if row.kind == "eval":
        return ""
    rewards = [other.reward for other in compared_with(row, group) if other.reward is not None]
    whose = (
        f"agent {row.agent} in its group"
        if len({other.agent for other in group}) > 1
        else "its group"
    )
    if row.why == "no_signal":
        equal = equal_rewards(rewards, whose)
        return (
            f"Not trained: {equal}, so no answer was better than the others and there is nothing "
            "to learn from it."
        )
    if row.why == "trained":
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        if row.advantage and row.reward is not None:
            side = "above" if row.reward > mean else "below" if row.reward < mean else "at"
            if (row.reward - mean) * row.advantage <= 0:  # another baseline, or a length penalty
                by = f"by {credit(run)}; the mean of {whose} is {mean:.3f}"
                return f"Trained in step {row.step} with advantage {row.advantage:+.3f}, {by}."
            reward = f"its reward is {side} the mean of {whose}, {mean:.3f}"
            return f"Trained in step {row.step} with advantage {row.advantage:+.3f}: {reward}."
        none = f"{credit(run)} gives it nothing to learn, and its tokens still count in the mean"
        return f"In the batch of step {row.step} with advantage 0: {none}."
    if row.why == "stale" and on_policy(run):
        return (
            "Not trained: with max_lag = 0 a batch has tokens of the newest version only, and an "
            "older one sampled some of it."
        )
    reason = REASONS.get(row.why, row.why)
    return f"Not trained: {reason}." if row.why else ""


def compared_with(row: RolloutRow, group: Sequence[RolloutRow]) -> list[RolloutRow]:
    """The rollouts of its group that credit compares a rollout with, including itself: those of
    its agent that did not fail and may be trained (`compared` in
    orchestrator/groups/group_credit.py)."""
    return [
        other
        for other in group
        if other.agent == row.agent and not other.failed and other.why != "not_trainable"
    ]


def equal_rewards(rewards: Sequence[float], whose: str) -> str:
    """Why a group has no signal, such as `all 8 rewards of its group are 1`. whose: `its group`,
    or one agent in it."""
    if rewards and all_equal(rewards):
        return f"all {len(rewards)} rewards of {whose} are {rewards[0]:g}"
    return f"all advantages of {whose} are 0"


def on_policy(run: Run) -> bool:
    """Whether the run's batches have tokens of the newest version only; False if its
    configuration cannot be read."""
    try:
        return run.config.max_lag == 0
    except RunError:
        return False


def credit(run: Run) -> str:
    """The run's type of credit assignment."""
    try:
        config = run.config.orchestrator.credit
        return config.type + (" with its length_penalty" if config.length_penalty else "")
    except RunError:
        return "the run's credit assignment"
