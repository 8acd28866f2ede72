"""What environments make: a turn, a rollout, a group. Internal to orchestrator and workers: nothing of it reaches the trainer."""

from typing import Any, Literal

import msgspec

from rl.wire.turns import Turn, Turns

Split = Literal["train", "eval"]

MAX_NUMBER = 1e18
"""The largest reward, or metric of a rollout: the square of a larger one is no float32, and a mean of several no number."""

MAX_NAME = 200
"""Characters in the name of a metric or an agent, which become part of names in metrics.jsonl and of the heads of tables."""

Cause = Literal["environment", "reward", "inference", "timeout", "worker", "not_append_only", "teacher", "logprobs"]
"""Why a rollout failed: the environment's code raised; a reward function raised or gave no finite number (a judge that is down, too);
the model could not be asked; a deadline passed; the worker process died; enforce_monotonicity refused it; the teacher did not score it;
the sampler gave a log-probability that is not finite."""


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One play of a task by one agent, scored. `error` set: it failed, and its reward says nothing."""

    turns: Turns | list[Turn] = []
    """Always Turns; a list becomes that, also in what older versions of rl wrote."""
    messages: list[dict[str, Any]] = []
    num_prompt_messages: int | None = None
    """So many messages at the beginning are the prompt: the policy wrote none of them, worked examples included. None: not known."""
    reward: float = 0.0
    metrics: dict[str, float] = {}
    stop: str = ""
    """Why it ended, in the environment's words."""
    truncated: bool = False
    """An answer hit max_tokens or the context's end."""
    overlong: bool = False
    """A prompt left no room for an answer in the context."""
    error: str | None = None
    cause: Cause | None = None
    """Set with `error`."""
    episode: int = 0
    """Place in the group. The agents of one episode are rollouts of their own."""
    agent: str = "agent"
    trainable: bool = True
    completion_tokens: int = 0
    """Counted by an endpoint that gives no token ids."""
    retries: int = 0
    """How often this episode was played before, and failed."""
    filtered: bool = False
    """orchestrator.filter dropped it."""

    def __post_init__(self) -> None:
        if isinstance(self.turns, list):
            self.turns = Turns.of(self.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that can be trained: those whose ids and log-probabilities are known."""
        return sum(answer.num_tokens for answer in self.turns.answers)

    @property
    def num_tokens(self) -> int:
        return self.num_sampled or self.completion_tokens

    @property
    def outcome(self) -> str:
        """finished, truncated, overlong, empty, timeout or failed."""
        if self.error:
            return "timeout" if self.cause == "timeout" else "failed"
        if self.overlong:
            return "overlong"
        if self.truncated:
            return "truncated"
        return "finished" if self.num_tokens else "empty"

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled a token, oldest first."""
        return sorted({span.policy_version for answer in self.turns.answers for span in answer.policy_versions})

    def as_record(self) -> dict[str, Any]:
        """The fields of a rollout that every JSONL file of rollouts has, beside its place there."""
        return {
            "agent": self.agent,
            "messages": self.messages,
            **({"num_prompt_messages": self.num_prompt_messages} if self.num_prompt_messages is not None else {}),
            "reward": None if self.error else self.reward,
            "metrics": self.metrics,
            "outcome": self.outcome,
            "stop": self.stop,
            "truncated": self.truncated,
            "num_tokens": self.num_tokens,
            "num_turns": len(self.turns),
            "versions": self.versions,
            **({"error": self.error} if self.error else {}),
        }


def unfit(rollout: Rollout) -> str:
    """What of a rollout's numbers and names cannot be computed with, or recorded; empty if all can."""
    for name, value in {
        "the reward": rollout.reward,
        **{f"metric {name!r:.100}": value for name, value in rollout.metrics.items()},
    }.items():
        if not abs(value) <= MAX_NUMBER:  # nan is not, either
            return f"{name} is {value}, no number of at most {MAX_NUMBER:g}"
    for name in (rollout.agent, *rollout.metrics):
        if not name or len(name) > MAX_NAME or not name.isprintable():
            return f"{name!r:.100} is no name: printable characters, 1 to {MAX_NAME}"
    return ""


Episode = list[Rollout]
"""One play of a task: a rollout for each agent's part, one for most environments."""


class Group(msgspec.Struct, kw_only=True):
    """The finished rollouts of one task, and what becomes of them."""

    group_id: int
    env: str
    task: int
    rollouts: list[Rollout]
    advantages: list[float] = []
    penalties: list[float] = []
    """By how much the length penalty lowered each reward before credit."""
    signal: bool | None = None
    """Whether there is something to learn from it; None: only its batch can tell."""
    why: str | None = None
    """Why it is not trained (no_signal, error, stale, empty, filtered); None: it is, or will be."""
    temperature: float = 1.0
    """At which its rollouts were sampled."""

    @property
    def num_episodes(self) -> int:
        return len({rollout.episode for rollout in self.rollouts})

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that did not fail, of agents that are trained."""
        return [rollout.reward for rollout in self.rollouts if rollout.error is None and rollout.trainable]

    @property
    def versions(self) -> list[int]:
        """The policy versions that sampled a token, oldest first."""
        return sorted({version for rollout in self.rollouts for version in rollout.versions})


class Members(msgspec.Struct, kw_only=True):
    """Finished rollouts of a group that is still played, of whole episodes, before the user's metrics are added."""

    group_id: int
    env: str
    task: int
    members: list[Rollout]
