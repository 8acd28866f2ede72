"""What the orchestrator and its environment workers say to each other. Internal: nothing of it reaches the trainer."""

from typing import Any, Literal

import msgspec

from rl.messages import VersionSpan

Split = Literal["train", "eval"]

Cause = Literal["environment", "reward", "inference", "timeout", "worker", "not_append_only", "teacher"]
"""Why a rollout failed: the environment's code raised; a reward function raised or gave no finite number (a judge that is down, too);
the model could not be asked; a deadline passed; the worker process died; enforce_monotonicity refused it; the teacher did not score it."""


class Turn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer of the policy: exactly the ids that were sent and the ids that were sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of the completion's tokens, nats."""
    policy_versions: list[VersionSpan]
    """Runs over the completion's tokens."""
    finish_reason: str
    teacher_logprobs: list[float] | None = None
    """Of the completion's tokens under the teacher, nats."""

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.logprobs), sum(span.num_tokens for span in self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"an answer's tokens, logprobs and policy versions differ in number: {sorted(lengths)}")
        if self.completion_ids and not self.prompt_ids:
            raise ValueError("an answer to an empty prompt cannot be trained")
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != len(self.completion_ids):
            raise ValueError("a teacher's logprobs are as many as the tokens of the answer")


class Rollout(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One play of a task by one agent, scored. `error` set: it failed, and its reward says nothing."""

    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []
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
    """Counted by an endpoint that tells no token ids."""
    retries: int = 0
    """How often this episode was played before, and failed."""

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.completion_ids) for turn in self.turns) or self.completion_tokens

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
    def oldest_version(self) -> int | None:
        return min((span.policy_version for turn in self.turns for span in turn.policy_versions), default=None)

    def in_words(self) -> dict[str, Any]:
        """What every JSONL file of rollouts says of one, beside its place there."""
        return {
            "agent": self.agent,
            "messages": self.messages,
            "reward": self.reward,
            "metrics": self.metrics,
            "outcome": self.outcome,
            "stop": self.stop,
            "truncated": self.truncated,
            "num_tokens": self.num_tokens,
            "num_turns": len(self.turns),
            "versions": sorted({span.policy_version for turn in self.turns for span in turn.policy_versions}),
            **({"error": self.error} if self.error else {}),
        }


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
    """What the length penalty took off each reward before credit."""
    signal: bool | None = None
    """Whether there is something to learn from it; None: only its batch can tell."""
    why: str | None = None
    """Why it is not trained (no_signal, error, stale, empty); None: it is, or will be."""
    temperature: float = 1.0
    """That its rollouts were sampled at."""

    @property
    def num_episodes(self) -> int:
        return len({rollout.episode for rollout in self.rollouts})

    @property
    def rewards(self) -> list[float]:
        """Of the rollouts that did not fail, of agents that are trained."""
        return [rollout.reward for rollout in self.rollouts if rollout.error is None and rollout.trainable]

    @property
    def oldest_version(self) -> int | None:
        versions = [version for rollout in self.rollouts if (version := rollout.oldest_version) is not None]
        return min(versions, default=None)

    @property
    def newest_version(self) -> int:
        """That sampled a token of it; 0 without any."""
        spans = (span for rollout in self.rollouts for turn in rollout.turns for span in turn.policy_versions)
        return max((span.policy_version for span in spans), default=0)


class EnvSpec(msgspec.Struct, kw_only=True):
    """An environment as configured: a package (`id`), rows with a reward function (`dataset`, `reward`), or a NeMo Gym server."""

    name: str
    id: str | None = None
    dataset: str | None = None
    eval_dataset: str | None = None
    reward: str | None = None
    system_prompt: str | None = None
    head_server: str | None = None
    args: dict[str, Any] = {}
    set_kwargs: dict[str, Any] = {}
    """Attributes set on a classic environment after it is loaded, by `env.set_kwargs`."""
    max_generating: int = -1
    """Rollouts of this worker that are generated at once; -1: no limit."""
    max_scoring: int = -1
    timeout_s: float = 600.0
    """For generating one rollout, and again for scoring it."""


class Endpoint(msgspec.Struct, kw_only=True):
    """Any OpenAI-compatible server. It tells no token ids, so its rollouts are evaluated or collected, never trained."""

    base_url: str
    model: str
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""


class PolicySpec(msgspec.Struct, kw_only=True):
    """What environments sample from: our servers, token ids in and out, or `endpoint`."""

    model_path: str = ""
    max_model_len: int = 2048
    chat_template: str | None = None
    renderer: dict[str, Any] = {}
    """A RendererConfig."""
    inference_urls: list[str] = []
    inference_status: str = ""
    """Status file of the inference server, read when no URLs are given."""
    enforce_monotonicity: bool = False
    """Fail a rollout whose next prompt does not continue the ids of an earlier turn."""
    endpoint: Endpoint | None = None


class WorkerSetup(msgspec.Struct, kw_only=True):
    """Everything that a worker needs; given to it as JSON on its command line."""

    env: EnvSpec
    policy: PolicySpec
    orchestrator: str
    """ZeroMQ address of the orchestrator's pool."""
    worker_id: str
    max_tokens: int
    """New tokens a turn that prompts must leave room for."""
    retries: int
    """How often a failed episode is played again with fresh state."""
    python: str = ""
    """Interpreter of a virtual environment of its own; empty: ours."""


# Orchestrator -> worker.


class PlayGroup(msgspec.Struct, tag=True):
    """Play `num_episodes` episodes of one task."""

    play_id: int
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]
    server: int
    """Index of the inference server; all rollouts of a group go to one, for its prefix cache."""


class Cancel(msgspec.Struct, tag=True):
    """Forget a group; no answer is wanted."""

    play_id: int


class Describe(msgspec.Struct, tag=True):
    """Say what the environment is, with the first `num_tasks` tasks of a split."""

    split: Split
    num_tasks: int


class Close(msgspec.Struct, tag=True):
    """End: take down what the environment has started, then exit."""


# Worker -> orchestrator.


class Ready(msgspec.Struct, tag=True):
    """The environment is loaded. Sizes in tasks; None: endless."""

    num_train: int | None
    num_eval: int | None


class LoadFailed(msgspec.Struct, tag=True):
    """The environment cannot be used; the message names the remedy."""

    message: str


class Played(msgspec.Struct, tag=True):
    """A group is finished; failed rollouts are in it with their error."""

    play_id: int
    rollouts: list[Rollout]


class Heartbeat(msgspec.Struct, tag=True):
    """The worker's event loop runs. One that is silent is blocked by the environment's code."""


class Description(msgspec.Struct, tag=True):
    """What an environment is, for `rl env`."""

    about: dict[str, Any]
    """kind, arguments with defaults, reward functions, tools, ... in the order in which they are shown."""
    tasks: list[dict[str, Any]]


ToWorker = PlayGroup | Cancel | Describe | Close
FromWorker = Ready | LoadFailed | Played | Heartbeat | Description
