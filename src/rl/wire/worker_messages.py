"""What the orchestrator sends to an environment worker, and what the worker answers."""

from typing import Any, Literal

import msgspec

from rl.wire.rollouts import Rollout, Split


class EnvSpec(msgspec.Struct, kw_only=True):
    """An environment as configured: a package (`id`), rows with a reward function (`dataset`, `reward`), or a NeMo Gym server."""

    name: str
    id: str | None = None
    kind: Literal["classic", "v1"] | None = None
    """The API that a package is played by; None: the one that it has."""
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
    """Any OpenAI-compatible server. It gives no token ids, so its rollouts are evaluated or collected, never trained."""

    base_url: str
    model: str
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key."""


class PolicySpec(msgspec.Struct, kw_only=True):
    """What environments sample from: our servers, token ids in and out, or `endpoint`."""

    model_path: str = ""
    tokenizer: str = ""
    """Folder of the model's tokenizer for workers without transformers; empty: transformers loads it."""
    max_model_len: int = 2048
    vocab_size: int = 0
    """Of the model; 0: unknown."""
    trust_remote_code: bool = False
    renderer: dict[str, Any] = {}
    """A RendererConfig."""
    inference_urls: list[str] = []
    inference_status: str = ""
    """Status file of the run's own inference server. It is read, and those beside it, when no URLs are given and no Fleet has come."""
    relay: str = ""
    """Unix socket over which the servers are asked; empty: over the network."""
    enforce_monotonicity: bool = False
    """Fail a rollout whose next prompt does not continue the ids of an earlier turn."""
    endpoint: Endpoint | None = None


class WorkerSetup(msgspec.Struct, kw_only=True):
    """Everything that a worker needs; given to it as JSON in a file."""

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
    sandbox: bool = False
    """Whether it runs in a sandbox, with this machine's `network` or without, and the environment variables `keys`."""
    network: bool = False
    keys: list[str] = []
    most: int = 0
    """So many workers like this one the pool may have, as their load demands; 0: those that it is told to start."""
    spans: str = ""
    """Folder for its spans, see rl.run_dir.spans; empty: it notes none."""


class PlayGroup(msgspec.Struct, tag=True):
    """Play the `num_episodes` episodes of one task, but for those that are `done`."""

    play_id: int
    split: Split
    task: int
    num_episodes: int
    sampling: dict[str, Any]
    server: int
    """The session of all rollouts of the group: as long as that is good, one inference server answers them, for its prefix cache."""
    done: list[int] = []
    """Episodes that are finished already; none where the episodes of a group are scored together."""


class Fleet(msgspec.Struct, tag=True):
    """The inference servers from now on. Nothing is asked of any other one; what was is asked of another one again."""

    urls: list[str]
    """Those that take requests."""
    closed: list[str]
    """Those that only finish the ones that they have: they hold another version than is wanted."""
    oldest: int
    """The oldest policy version that may answer a new request."""
    newest: int
    """The newest one that there is."""


class Cancel(msgspec.Struct, tag=True):
    """Forget a group; no answer is wanted."""

    play_id: int


class Describe(msgspec.Struct, tag=True):
    """Describe the environment and the first `num_tasks` tasks of a split."""

    split: Split
    num_tasks: int


class Close(msgspec.Struct, tag=True):
    """End: take down what the environment has started, then exit."""


class Ready(msgspec.Struct, tag=True):
    """The environment is loaded. Sizes in tasks; None: endless."""

    num_train: int | None
    num_eval: int | None
    scores_groups: bool = False
    """Whether the episodes of a task are scored together, and so finish together."""
    notice: str = ""
    """What the user is to know about how the environment is played."""


class LoadFailed(msgspec.Struct, tag=True):
    """The environment cannot be used; the message names the remedy."""

    message: str


class Played(msgspec.Struct, tag=True):
    """Episodes of a group that are finished; failed rollouts are among them with their error."""

    play_id: int
    rollouts: list[Rollout]
    unfinished: int = 0
    """Episodes of the group that are still played."""


class Heartbeat(msgspec.Struct, tag=True):
    """The worker's event loop runs: without heartbeats the environment's code blocks it."""

    busy: float = 0.0
    """Share of the time since the last one in which the worker computed, or its event loop was blocked."""


class Description(msgspec.Struct, tag=True):
    """The description of an environment, for `rl env`."""

    about: dict[str, Any]
    """kind, arguments with values and defaults, reward functions, tools, ... in the order in which they are shown."""
    tasks: list[dict[str, Any]]


ToWorker = Fleet | PlayGroup | Cancel | Describe | Close
FromWorker = Ready | LoadFailed | Played | Heartbeat | Description
