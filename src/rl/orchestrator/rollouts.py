"""What the orchestrator and its environment workers say to each other. Internal: nothing of it reaches the trainer."""

from typing import Any, Literal

import msgspec

from rl.messages import VersionSpan

Split = Literal["train", "eval"]


class Turn(msgspec.Struct, kw_only=True):
    """One answer of the policy: exactly the ids that were sent and the ids that were sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of the completion's tokens, nats."""
    policy_versions: list[VersionSpan]
    """Runs over the completion's tokens."""
    finish_reason: str


class Rollout(msgspec.Struct, kw_only=True):
    """One play of a task, scored. `error` set: it failed, and its reward says nothing."""

    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []
    reward: float = 0.0
    metrics: dict[str, float] = {}
    stop: str = ""
    """Why it ended, in the environment's words."""
    truncated: bool = False
    """An answer hit max_tokens or the context's end."""
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        return min((span.policy_version for turn in self.turns for span in turn.policy_versions), default=None)


class Group(msgspec.Struct, kw_only=True):
    """The finished rollouts of one task, and what becomes of them."""

    group_id: int
    env: str
    task: int
    rollouts: list[Rollout]
    advantages: list[float] = []
    why: str | None = None
    """Why it is not trained (no_signal, error, stale); None: it is, or will be."""

    @property
    def oldest_version(self) -> int | None:
        versions = [version for rollout in self.rollouts if (version := rollout.oldest_version) is not None]
        return min(versions, default=None)


class WorkerSetup(msgspec.Struct, kw_only=True):
    """Everything that a worker needs; given to it as JSON on its command line."""

    env: str
    env_id: str
    args: dict[str, Any]
    orchestrator: str
    """ZeroMQ address of the orchestrator's pool."""
    worker_id: str
    model_path: str
    max_model_len: int
    max_tokens: int
    inference_urls: list[str]
    inference_status: str
    """Status file of the inference server, read when no URLs are given."""
    rollout_timeout_s: float
    rollout_retries: int


# Orchestrator -> worker.


class PlayGroup(msgspec.Struct, tag=True):
    """Play `num_rollouts` rollouts of one task."""

    play_id: int
    split: Split
    task: int
    num_rollouts: int
    sampling: dict[str, Any]
    server: int
    """Index of the inference server; all rollouts of a group go to one, for its prefix cache."""


class Cancel(msgspec.Struct, tag=True):
    """Forget a group; no answer is wanted."""

    play_id: int


# Worker -> orchestrator.


class Ready(msgspec.Struct, tag=True):
    """The environment is loaded."""

    num_train: int
    num_eval: int


class LoadFailed(msgspec.Struct, tag=True):
    """The environment cannot be used; the message names the remedy."""

    message: str


class Played(msgspec.Struct, tag=True):
    """A group is finished; failed rollouts are in it with their error."""

    play_id: int
    rollouts: list[Rollout]


ToWorker = PlayGroup | Cancel
FromWorker = Ready | LoadFailed | Played
