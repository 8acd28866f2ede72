"""Settings of the orchestrator: environments, sampling, batches, evals."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rl.config.base import (
    NAMES,
    PATH_IF_WRITTEN_AS_ONE,
    REQUIREMENTS,
    STOPS,
    Address,
    FunctionConfig,
    Host,
    Settings,
    Unbounded,
    default_type,
    switch,
)
from rl.config.environment_id import short_name


class CreditSettings(Settings):
    """Settings of every kind of credit."""

    length_penalty: float = Field(0.0, ge=0)
    """Weight of a length penalty, subtracted from the reward before credit: this, times the
    group's mean reward (clamped to 0..1), times the rollout's tokens relative to the longest of
    its group. Metrics show the reward without it; 0: off."""


class DrGrpoConfig(CreditSettings):
    """Dr. GRPO: reward minus the mean of its group."""

    type: Literal["dr_grpo"] = "dr_grpo"


class GrpoConfig(CreditSettings):
    """GRPO: reward minus the mean of its group, divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    epsilon: float = Field(1e-4, gt=0)
    """Term added to the standard deviation; rewards that differ by less than this count as
    nearly equal."""


class RlooConfig(CreditSettings):
    """RLOO: reward minus the mean of the other rollouts of its group."""

    type: Literal["rloo"] = "rloo"


class MaxRlConfig(CreditSettings):
    """MaxRL: reward minus the mean of its group, divided by that mean; for rewards that are
    never negative."""

    type: Literal["max_rl"] = "max_rl"


class ReinforcePlusPlusConfig(CreditSettings):
    """REINFORCE++: rewards normalised by mean and standard deviation over each environment's
    rollouts of the whole batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = False
    """Whether the group's mean is subtracted from each reward first."""


class NoCreditConfig(CreditSettings):
    """No advantages from rewards: the policy learns only from the teacher."""

    type: Literal["none"] = "none"


class CustomCreditConfig(CreditSettings, FunctionConfig):
    """A user function (Group, CustomCreditConfig) -> one advantage per rollout of the group; see
    docs/functions.md."""

    type: Literal["custom"] = "custom"


AnyCreditConfig = (
    DrGrpoConfig
    | GrpoConfig
    | RlooConfig
    | MaxRlConfig
    | ReinforcePlusPlusConfig
    | NoCreditConfig
    | CustomCreditConfig
)
CreditConfig = Annotated[
    Annotated[AnyCreditConfig, Field(discriminator="type")], default_type("dr_grpo")
]


class SamplingOverrides(Settings):
    """How one environment's rollouts are sampled; unset keys default to orchestrator.sampling."""

    max_tokens: int | None = Field(None, ge=1)
    """Most new tokens in one turn."""
    temperature: float | None = Field(None, ge=0)
    """Softmax temperature; 0 is greedy, in evaluations only."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass of nucleus sampling; 1 for all. The trainer computes with the same
    tokens, see trainer.max_kept."""
    top_k: int | None = Field(None, ge=0)
    """Number of likeliest tokens to sample from, 0 for all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Lowest probability of a sampled token, relative to the likeliest one, 0 for none."""
    stop: Annotated[list[str] | None, STOPS] = None
    """Strings that end a turn, left out of its content but trained. In a text, commas separate
    them and `\\n` is a newline; a list such as `[","]` is taken as it is."""


class SamplingConfig(SamplingOverrides):
    """How training rollouts are sampled. The trainer computes probabilities over the same
    tokens, see trainer.max_kept."""

    # always set in a training run
    max_tokens: int = Field(256, ge=1)  # ty: ignore[incompatible-mutable-override]
    """Most new tokens in one turn."""
    temperature: float = Field(1.0, ge=0)  # ty: ignore[incompatible-mutable-override]
    """Softmax temperature; the trainer scores tokens at the same one. At 0, all rollouts of a
    group would be identical."""


class EnvSource(Settings):
    """An environment: a package (`id`), rows with a reward function (`dataset`, `reward`), or a
    NeMo Gym server."""

    id: Annotated[str | None, PATH_IF_WRITTEN_AS_ONE] = None
    """A package with an environment, classic or v1: `owner/name` or `owner/name@version` of the
    Environments Hub, `pypi:name` of the package index, a `./folder`, or the `name` of one
    installed or in the current directory. See docs/environments.md."""
    kind: Literal["classic", "v1"] | None = None
    """Verifiers API used for the package. Default: the one that it has; v1 if it has both."""
    requirements: Annotated[list[str], REQUIREMENTS] = []
    """Packages that the environment's code needs in addition to its declared dependencies:
    `["sympy>=1.13"]`."""
    dataset: Annotated[str | None, PATH_IF_WRITTEN_AS_ONE] = None
    """A JSONL, CSV or Parquet file, or a Hugging Face data set, of prompts and answers, scored by
    `reward`; with a NeMo Gym server, its rows."""
    eval_dataset: Annotated[str | None, PATH_IF_WRITTEN_AS_ONE] = None
    """Rows for evaluations, in the form of `dataset`. Default: none; of an evaluation, the
    `dataset` that it names, unless that is trained on."""
    reward: Annotated[str | None, PATH_IF_WRITTEN_AS_ONE] = None
    """Reward function for `dataset`: `file.py:function` or `module:function`."""
    system_prompt: str | None = None
    """System message before every prompt of `dataset`."""
    head_server: str | None = None
    """Address of a NeMo Gym head server."""
    args: dict[str, Any] = {}
    """Arguments of load_environment(), or the fields of a v1 taskset's config."""
    set_kwargs: dict[str, Any] = {}
    """Attributes set on a classic environment after loading, such as
    max_total_completion_tokens."""
    name: str | None = None
    """Name of the environment in metrics and files. Default: the id without owner and version."""
    workers: int = Field(1, ge=1)
    """Number of processes that run the environment's code. An evaluation with the source of a
    training environment is played by that one's processes."""
    python: Annotated[str | None, PATH_IF_WRITTEN_AS_ONE] = None
    """Python interpreter of a virtual environment that you made for it: `.venvs/x/bin/python`.
    Default: rl makes one."""
    isolation: Literal["none", "sandbox"] = "none"
    """Isolation of its workers. `sandbox`: bubblewrap hides this machine's files, processes and
    network, and the run's token and directory; docs/security.md lists exactly what remains."""
    network: bool | None = None
    """Whether a sandbox has this machine's network. Default: no; only tokens from the run's own
    inference servers are available."""
    keys: Annotated[list[str], NAMES] = []
    """Environment variables visible in a sandbox, in addition to those that args refer to:
    `["OPENAI_API_KEY"]`."""
    read: Annotated[list[str], NAMES] = []
    """Files and directories visible in a sandbox, in addition to the environment's folder or
    module, its rows and its reward's file, such as modules that it imports from its directory
    and paths in its arguments: `["helper.py", "corpus"]`."""
    max_generating: int = Field(-1, ge=-1)
    """Maximum number of rollouts generated at once by all workers together, each of which
    generates at least one; -1: no limit."""
    max_scoring: int = Field(-1, ge=-1)
    """Maximum number of rollouts scored at once by all workers together, each of which scores at
    least one; -1: no limit."""
    timeout_s: float | None = Field(None, gt=0)
    """Time limit in seconds for generating one rollout, and again for scoring it. Default:
    orchestrator.rollout_timeout_s."""
    sampling: SamplingOverrides = Field(default_factory=SamplingOverrides)

    @property
    def label(self) -> str:
        return self.name or short_name(self.id or self.dataset or "environment")

    @property
    def source(self) -> dict[str, Any]:
        """The settings without name, sampling and number of workers: equal for entries that can
        share workers."""
        return self.model_dump(
            include=set(EnvSource.model_fields) - {"name", "workers", "sampling"}
        )


class TeacherConfig(Settings):
    """A vLLM server with the model's own tokenizer that scores sampled tokens, for on-policy
    distillation."""

    base_url: Address
    """The server's OpenAI-compatible address: `http://host:8000/v1`."""
    model: str | None = None
    """Name of the model on that server. Default: its only one, or its first."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server requires one. It is sent only over
    https or within this machine."""
    key_over_http: bool = False
    """Whether to send the key over plain http to another machine as well, where anyone on the
    network path can read it."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for which an unanswered request is retried; after that its rollout fails
    (`teacher`), and with it the group."""
    least_gain: float = 0.3
    """How much likelier a token of a fixed English text with numbers and code must be to it than
    in disorder, nats. Lower it only for a teacher that has learned none of these."""


class DifficultyConfig(Settings):
    """Pools of tasks by their running mean reward: tasks that are almost always or almost never
    solved are played less often."""

    hard_up_to: Unbounded = 0.25
    """Highest running mean reward of a hard task."""
    easy_above: Unbounded = 0.75
    """Running mean reward above which a task is easy."""
    hard_weight: float = Field(0.2, ge=0, le=1)
    """Probability that a hard task is played when its turn comes."""
    easy_weight: float = Field(0.2, ge=0, le=1)
    """Probability that an easy task is played when its turn comes."""


class EnvConfig(EnvSource):
    """One environment to train on."""

    weight: float = Field(1.0, gt=0)
    """The environment's share of the rollouts, relative to the others'."""
    group_size: int | None = Field(None, ge=2)
    """Episodes per task. Default: orchestrator.group_size."""
    max_samples: int = Field(-1, ge=-1)
    """Number of tasks to train on, starting with the first; -1: all."""
    credit: CreditConfig | None = None
    """How the environment's rewards become advantages. Default: orchestrator.credit."""
    difficulty: Annotated[DifficultyConfig | None, BeforeValidator(switch)] = None
    """Whether easy and hard tasks are played less often; `true` is enough. Off by default."""
    teacher: TeacherConfig | None = None
    """The teacher to distil from. Default: orchestrator.teacher."""


class EvalConfig(EnvSource):
    """An evaluation on held-out examples: before the first step, every `interval` steps, and after
    the last.

    Without an id, it uses the first training environment. With a training environment's id, it
    inherits settings that it leaves at their defaults, or sets to them.
    """

    interval: int = Field(10, ge=1)
    """Steps between evaluations."""
    num_examples: int = Field(-1, ge=-1)
    """Examples of the environment's eval dataset; -1: all."""
    samples: int = Field(1, ge=1)
    """Rollouts of each example."""
    target: Unbounded = math.inf
    """The run ends when this evaluation reaches this mean reward and less than a tenth of its
    rollouts failed."""


def inherit(entry: EvalConfig, env: EnvConfig) -> None:
    """Copies settings from the training environment to the evaluation where the evaluation has the
    default value.

    A value that was set to the default is replaced as well: config.toml has every key, and a branch
    that changes the environment must evaluate with the new value."""
    for key in EnvSource.model_fields:
        if (
            key not in ("sampling", "workers", "name")
            and getattr(entry, key) == EvalConfig.model_fields[key].default
        ):
            setattr(entry, key, getattr(env, key))
    for key in SamplingOverrides.model_fields:
        if getattr(entry.sampling, key) is None:
            setattr(entry.sampling, key, getattr(env.sampling, key))
    entry.name = entry.name or env.label


class RetentionConfig(Settings):
    """Which of the files written at every step are kept."""

    keep_last: int | None = Field(None, ge=1)
    """Number of newest files to keep. Default: all."""
    keep_every: int | None = Field(None, ge=1)
    """With keep_last: files whose step is a multiple of this number are kept as well."""


def as_list(value: object) -> object:
    """Returns a list of tables: `[environment]` is one table, `[[environment]]` several; a
    string in a list is an id."""
    tables = [value] if isinstance(value, dict) else value
    return (
        [{"id": entry} if isinstance(entry, str) else entry for entry in tables]
        if isinstance(tables, list)
        else tables
    )


class OrchestratorConfig(Settings):
    """The orchestrator: plays environments against inference and turns finished groups into
    batches."""

    environment: Annotated[list[EnvConfig], BeforeValidator(as_list)] = []
    """Environments to train on: one `[environment]` or several `[[environment]]`."""
    eval: Annotated[list[EvalConfig], BeforeValidator(as_list)] = []
    """Evaluations: one `[eval]` or several `[[eval]]`."""
    sampling: SamplingConfig = SamplingConfig()
    credit: CreditConfig = DrGrpoConfig()
    """How rewards become advantages."""
    filter: FunctionConfig | None = None
    """User function (Group, FunctionConfig) -> whether the group's rollouts may be trained on:
    one bool for all, or one for each. Rollouts that it drops have the reason `filtered` in
    rollouts/*.jsonl; see docs/functions.md."""
    metrics: FunctionConfig | None = None
    """User function (Rollout, FunctionConfig) -> numbers by name, added to the environment's
    own: `metrics` in rollouts/*.jsonl, reward/<env>/<name> and eval/<env>/<name> in
    metrics.jsonl; see docs/functions.md."""
    teacher: TeacherConfig | None = None
    """On-policy distillation: (log teacher - log trainer) * trainer.loss.teacher_coefficient is
    added to the advantage of every sampled token. Groups without signal in their rewards are
    trained on as well."""
    batch_size: int = Field(64, ge=1)
    """Episodes in a batch (one step), rounded up to whole groups. An episode is one rollout, or
    one for each agent if it has several."""
    group_size: int = Field(8, ge=2)
    """Episodes per task, of which one alone has nothing to be compared with: the mean reward of
    an agent in them is the baseline for most kinds of credit."""
    max_off_policy_steps: int = Field(8, ge=0)
    """Most policy versions that a rollout's oldest token may be behind; an older rollout is
    cancelled (`stale`) and its task reissued. With max_lag = 0 the bound is 0, whatever is set
    here."""
    inference_urls: Annotated[list[Address], NAMES] = []
    """Addresses of inference servers that do not see the run directory; no others are used then.
    Default: servers that publish their address in status/inference*.json, which may join and
    leave at any time."""
    host: Host = "127.0.0.1"
    """Address that the orchestrator binds for the trainer. Anything but loopback opens it to
    other machines that have the run's token (docs/security.md)."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0: any free one. The address is published in status/orchestrator.json."""
    replace_no_signal: bool = True
    """Whether groups whose advantages are all zero, which teach nothing, are replaced. Off: they
    keep their place in the batch."""
    max_refill: int = Field(3, ge=1)
    """Most episodes played for one batch, in multiples of the batch size. If too few of them can
    be trained on, the batch is trained short; 1: nothing is replaced as long as any rollout can
    be trained on."""
    mask_truncated: bool = False
    """Whether the tokens of truncated rollouts are excluded from training. Their reward still
    counts in the group's baseline."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """Time limit in seconds for generating one rollout, and again for scoring it; beyond it the
    rollout fails (`timeout`)."""
    rollout_retries: int = Field(2, ge=0)
    """Retries of a failed rollout, each with fresh state, before its group is dropped."""
    worker_memory_gib: Unbounded = Field(8.0, gt=0)
    """Memory limit of a worker in GiB, without its child processes; above it the worker is
    restarted. `inf`: no limit."""
    worker_silence_s: float = Field(120.0, gt=0)
    """Seconds that an environment may block its worker's event loop before the worker is
    restarted."""
    inference_timeout_s: float = Field(900.0, gt=0)
    """Seconds to wait for an inference server to come up, come back, or load a version."""
    trainer_timeout_s: float = Field(3600.0, gt=0)
    """Seconds to wait for the trainer's next policy version before the run ends with a
    diagnosis; counted anew whenever a group finishes, since the trainer may be waiting for its
    batch."""
    worker_timeout_s: float = Field(300.0, gt=0)
    """Seconds that an environment's worker may take to start."""
    batches: RetentionConfig = RetentionConfig()
    """Which files are kept in batches/: what each step trained on. Files since the oldest
    checkpoint are always kept, because a resume needs them; `rl replay` starts from version 0
    only while all are kept, otherwise from the oldest checkpoint with all later ones."""
    rollouts: RetentionConfig = RetentionConfig()
    """Which files are kept in rollouts/: every rollout in readable form, compressed
    (`000012.jsonl.gz`) after 100 further steps."""
    show_rollout_every: int = Field(5, ge=0)
    """Steps between printed rollouts, of which long ones are shortened in the middle; 0: none."""

    @property
    def max_in_flight(self) -> int:
        """Most episodes in flight, including slow ones; those of evaluations are counted
        separately."""
        return self.batch_size * (1 + self.max_off_policy_steps)

    @property
    def entries(self) -> "dict[str, EnvConfig | EvalConfig]":
        """The environments and evaluations, by the keys of their sections."""
        return {
            f"orchestrator.{kind}.{i}": entry
            for kind, entries in (("environment", self.environment), ("eval", self.eval))
            for i, entry in enumerate(entries)
        }

    @property
    def env_ids(self) -> list[str]:
        """Ids of the environments that must be installed: those without their own interpreter."""
        return [entry.id for entry in self.entries.values() if entry.id and not entry.python]

    def model_post_init(self, _context: object) -> None:
        trained = {env.dataset for env in self.environment}
        for entry in self.eval:
            if entry.dataset not in trained:
                entry.eval_dataset = entry.eval_dataset or entry.dataset
            same = [
                env
                for env in self.environment
                if entry.id and env.id == entry.id and not entry.args
            ]
            if not (entry.id or entry.dataset):
                same = self.environment[:1]
            if len(same) == 1:
                inherit(entry, same[0])
