"""Settings of the orchestrator: environments, sampling, batches, evals."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rl.orchestrator.credit_config import CreditConfig, DrGrpoConfig, NoCreditConfig
from rl.settings import Settings, switch


def short_name(env_id: str) -> str:
    """`owner/name@version` without owner and version; a file's name without its ending."""
    return Path(env_id.split("@")[0]).stem


class SamplingConfig(Settings):
    """How training rollouts are sampled. Plain temperature; what truncates the distribution also changes the importance ratio."""

    max_tokens: int = Field(256, ge=1)
    """New tokens a turn, at most."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature; the trainer scores tokens at the same temperature."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling. Tokens outside get probability 0 from the sampler but not from the trainer, so ratios are below 1."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k likeliest. The remark on top_p applies."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Drop tokens below this share of the likeliest one. The remark on top_p applies."""
    stop: list[str] | None = None
    """Strings that end a turn."""


class SamplingOverrides(Settings):
    """How one environment's rollouts are sampled; what is not given is as in orchestrator.sampling."""

    max_tokens: int | None = Field(None, ge=1)
    """New tokens a turn, at most."""
    temperature: float | None = Field(None, ge=0)
    """Softmax temperature; 0 is greedy, in evaluations only."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k likeliest."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Drop tokens below this share of the likeliest one."""
    stop: list[str] | None = None
    """Strings that end a turn."""


class EnvSource(Settings):
    """An environment: an installed package (`id`), rows with a reward function (`dataset`, `reward`), or a NeMo Gym server."""

    id: str | None = None
    """`name`, `owner/name`, `owner/name@version` of an installed environment, classic or v1, or `./folder` of one that is not."""
    dataset: str | None = None
    """JSONL file or Hugging Face dataset of prompts and answers, scored by `reward`; for a NeMo Gym server its rows."""
    eval_dataset: str | None = None
    """Rows that evaluations use. Default: `dataset`."""
    reward: str | None = None
    """Reward function for `dataset`: `file.py:function` or `module:function`."""
    system_prompt: str | None = None
    """Put before every prompt of `dataset`."""
    head_server: str | None = None
    """Address of a NeMo Gym head server."""
    args: dict[str, Any] = {}
    """Arguments of load_environment(), or the fields of a v1 taskset's config."""
    set_kwargs: dict[str, Any] = {}
    """Attributes set on a classic environment after loading, such as max_total_completion_tokens."""
    name: str | None = None
    """Its name in metrics and files. Default: the id without owner and version."""
    workers: int = Field(1, ge=1)
    """Processes that run its code."""
    python: str | None = None
    """Interpreter of a virtual environment of its own, for dependencies that clash with ours: `.venvs/x/bin/python`."""
    max_generating: int = Field(-1, ge=-1)
    """Rollouts that are generated at once, over all workers; -1: no limit."""
    max_scoring: int = Field(-1, ge=-1)
    """Rollouts that are scored at once, over all workers; -1: no limit."""
    timeout_s: float | None = Field(None, gt=0)
    """How long generating one rollout may take, and again scoring it. Default: orchestrator.rollout_timeout_s."""
    sampling: SamplingOverrides = Field(default_factory=SamplingOverrides)

    @property
    def label(self) -> str:
        return self.name or short_name(self.id or self.dataset or "environment")

    @property
    def source(self) -> dict[str, Any]:
        """What is played, without how often and under which name: equal for entries that can share workers."""
        return self.model_dump(include=set(EnvSource.model_fields) - {"name", "workers", "sampling"})


class TeacherConfig(Settings):
    """A vLLM server with the model's own tokenizer that scores sampled tokens, for on-policy distillation."""

    base_url: str
    """Its OpenAI-compatible address: `http://host:8000/v1`."""
    model: str | None = None
    """Name of the model there. Default: the only one, or the first."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if it wants one."""
    timeout_s: float = Field(600.0, gt=0)
    """How long to repeat a request that is not answered; then its rollout failed (`teacher`), and with it the group."""


class DifficultyConfig(Settings):
    """Pools of tasks by their running mean reward: those that are nearly always or nearly never solved come up less often."""

    hard_up_to: float = 0.25
    """A task is hard whose running mean reward is at most this."""
    easy_above: float = 0.75
    """A task is easy whose running mean reward is above this."""
    hard_weight: float = Field(0.2, ge=0, le=1)
    """Probability that a hard task is played when its turn comes."""
    easy_weight: float = Field(0.2, ge=0, le=1)
    """Probability that an easy task is played when its turn comes."""


class EnvConfig(EnvSource):
    """One environment that is trained on."""

    weight: float = Field(1.0, gt=0)
    """Its share of the rollouts, relative to the other environments'."""
    group_size: int | None = Field(None, ge=2)
    """Rollouts of one task. Default: orchestrator.group_size."""
    max_samples: int = Field(-1, ge=-1)
    """Train on the first so many tasks only; -1: all."""
    credit: CreditConfig | None = None
    """How its rewards become advantages. Default: orchestrator.credit."""
    difficulty: Annotated[DifficultyConfig | None, BeforeValidator(switch)] = None
    """Play easy and hard tasks less often; `true` is enough. Off by default."""
    teacher: TeacherConfig | None = None
    """What its rollouts are distilled from. Default: orchestrator.teacher."""


class EvalConfig(EnvSource):
    """An evaluation on held-out examples: before the first step, every `interval` steps, and after the last.

    One without an id is of the first training environment. One of a training environment's id has its settings where it gives none.
    """

    interval: int = Field(10, ge=1)
    """Steps between evaluations."""
    num_examples: int = Field(-1, ge=-1)
    """Examples of the environment's eval dataset; -1: all."""
    samples: int = Field(1, ge=1)
    """Rollouts an example."""
    target: float = math.inf
    """End the run when this evaluation's mean reward reaches it."""


def lend(env: EnvConfig, entry: EvalConfig) -> None:
    """Fills an evaluation of a training environment with that one's settings, where it gives none of its own."""
    for key in EnvSource.model_fields:
        if key not in ("sampling", "workers", "name") and getattr(entry, key) == EvalConfig.model_fields[key].default:
            setattr(entry, key, getattr(env, key))
    for key in SamplingOverrides.model_fields:
        if getattr(entry.sampling, key) is None:
            setattr(entry.sampling, key, getattr(env.sampling, key))
    entry.name = entry.name or env.label


class RetentionConfig(Settings):
    """Which files of steps stay on disk."""

    keep_last: int | None = Field(None, ge=1)
    """Newest ones kept. Default: all of them."""
    keep_every: int | None = Field(None, ge=1)
    """With keep_last: those whose step is a multiple of this are kept as well."""


def as_list(value: object) -> object:
    """`[environment]` (one table) and `[[environment]]` (several) are both accepted."""
    return [value] if isinstance(value, dict) else value


class OrchestratorConfig(Settings):
    """The orchestrator: plays environments against inference and turns finished groups into batches."""

    environment: Annotated[list[EnvConfig], BeforeValidator(as_list)] = []
    """What is trained on: one `[environment]` or several `[[environment]]`."""
    eval: Annotated[list[EvalConfig], BeforeValidator(as_list)] = []
    """Evaluations: one `[eval]` or several `[[eval]]`."""
    sampling: SamplingConfig = SamplingConfig()
    credit: CreditConfig = DrGrpoConfig()
    """How rewards become advantages."""
    teacher: TeacherConfig | None = None
    """On-policy distillation: log teacher - log trainer, times trainer.loss.teacher_coefficient, is added to the advantage of every sampled
    token. Groups without signal in their rewards are trained, too."""
    batch_size: int = Field(64, ge=1)
    """Rollouts a step."""
    group_size: int = Field(8, ge=2)
    """Rollouts of one task; their mean reward is the baseline of most kinds of credit."""
    max_off_policy_steps: int = Field(8, ge=0)
    """A rollout whose oldest token is further behind the policy than this is cancelled (`stale`), and its task issued again."""
    inference_urls: list[str] = []
    """Addresses of inference servers. Default: the one in status/inference.json."""
    host: str = "127.0.0.1"
    """Address to bind for the trainer. Anything but loopback opens it to other machines that have the run's token (docs/security.md)."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0 takes a free one. The address is published in status/orchestrator.json."""
    replace_no_signal: bool = True
    """Replace groups whose advantages are all zero, for they teach nothing. Off: they fill their place in the batch."""
    mask_truncated: bool = False
    """Do not train the tokens of truncated rollouts. Their reward still counts in their group's baseline."""
    keep_partial_groups: bool = False
    """Train what is left of a group when rollouts of it failed for good. Off: the whole group is dropped, for what is left is biased."""
    enforce_monotonicity: bool = False
    """Fail a rollout whose next prompt rewrites earlier ones (`not_append_only`), instead of starting a new sample there."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """How long generating one rollout may take, and again scoring it; then it failed (`timeout`)."""
    rollout_retries: int = Field(2, ge=0)
    """How often a failed rollout is played again with fresh state before its group is dropped."""
    worker_memory_gib: float = Field(8.0, gt=0)
    """Memory of a worker, its child processes not counted; above it the worker is ended and started anew. `inf`: no limit."""
    worker_silence_s: float = Field(120.0, gt=0)
    """How long a worker's event loop may be blocked by its environment; then it is ended and started anew."""
    inference_timeout_s: float = Field(900.0, gt=0)
    """How long to wait for an inference server to come up, come back, or load a version."""
    trainer_timeout_s: float = Field(3600.0, gt=0)
    """How long to wait for the trainer's next policy version before the run ends with a diagnosis."""
    worker_timeout_s: float = Field(300.0, gt=0)
    """How long an environment's worker may take to start."""
    batches: RetentionConfig = RetentionConfig()
    """batches/: what each step trained on. Those since the oldest checkpoint are kept in any case, for a resume needs them; `rl replay`
    retrains from version 0 only while all are there."""
    rollouts: RetentionConfig = RetentionConfig()
    """rollouts/: every rollout in words."""
    show_rollout_every: int = Field(5, ge=0)
    """Every so many steps one rollout is printed in full; 0: never."""

    def model_post_init(self, _context: object) -> None:
        for entry in self.eval:
            same = [env for env in self.environment if entry.id and env.id == entry.id and not entry.args]
            if not (entry.id or entry.dataset):
                same = self.environment[:1]
            if len(same) == 1:
                lend(same[0], entry)


def check_credit(settings: OrchestratorConfig, teacher_coefficient: float) -> list[tuple[str, object, str]]:
    """Faults of credit, difficulty pools and teachers, each environment with what it has of its own: (key, value, remedy)."""
    faults: list[tuple[str, object, str]] = []
    places: list[tuple[str, OrchestratorConfig | EnvConfig]] = [("orchestrator", settings)]
    places += [(f"orchestrator.environment.{i}", env) for i, env in enumerate(settings.environment)]
    for key, place in places:
        if place.teacher and not place.teacher.base_url.startswith(("http://", "https://")):
            faults.append((f"{key}.teacher.base_url", place.teacher.base_url, "give an address like http://host:8000/v1"))
        if place.teacher and teacher_coefficient == 0:
            remedy = "has no effect, for trainer.loss.teacher_coefficient = 0: raise that, or leave the teacher out"
            faults.append((f"{key}.teacher.base_url", place.teacher.base_url, remedy))
    for i, env in enumerate(settings.environment):
        key, taught = f"orchestrator.environment.{i}", env.teacher or settings.teacher
        if isinstance(env.credit or settings.credit, NoCreditConfig) and not taught:
            where = f"{key}.credit" if env.credit else "orchestrator.credit"
            faults.append(
                (f"{where}.type", "none", f"leaves environment {env.label} nothing to learn from without a teacher; take dr_grpo")
            )
        temperature = settings.sampling.temperature if env.sampling.temperature is None else env.sampling.temperature
        if taught and temperature != 1:
            where = "orchestrator" if env.sampling.temperature is None else key
            remedy = f"does not go with a teacher (environment {env.label}): vLLM scores given tokens at temperature 1 only; set it to 1"
            faults.append((f"{where}.sampling.temperature", temperature, remedy))
        if env.difficulty and env.difficulty.easy_above < env.difficulty.hard_up_to:
            remedy = f"is below hard_up_to = {env.difficulty.hard_up_to}; a task cannot be easy and hard"
            faults.append((f"{key}.difficulty.easy_above", env.difficulty.easy_above, remedy))
    return faults
