"""Settings of the orchestrator: environments, sampling, batches, evals."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rl.settings import Settings


def short_name(env_id: str) -> str:
    """`owner/name@version` without owner and version."""
    return env_id.split("@")[0].split("/")[-1]


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


class EvalSamplingConfig(Settings):
    """How eval rollouts are sampled; what is not given is as in training."""

    max_tokens: int | None = Field(None, ge=1)
    """New tokens a turn, at most."""
    temperature: float | None = Field(None, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(None, ge=1)
    """Sample among the k likeliest."""
    min_p: float | None = Field(None, gt=0, le=1)
    """Drop tokens below this share of the likeliest one."""
    stop: list[str] | None = None
    """Strings that end a turn."""


class EnvConfig(Settings):
    """One `verifiers` environment that is trained on."""

    id: str
    """`name`, `owner/name` or `owner/name@version` of an installed environment."""
    args: dict[str, Any] = {}
    """Arguments of its load_environment()."""
    weight: float = Field(1.0, gt=0)
    """Its share of the groups, relative to the other environments'."""
    workers: int = Field(1, ge=1)
    """Processes that run its code."""
    name: str | None = None
    """Its name in metrics and files. Default: the id without owner and version."""

    @property
    def label(self) -> str:
        return self.name or short_name(self.id)


class EvalConfig(Settings):
    """An evaluation on held-out examples: before the first step, every `interval` steps, and after the last."""

    id: str | None = None
    """Environment id. Default: the first training environment, which then also lends its args."""
    args: dict[str, Any] = {}
    """Arguments of its load_environment()."""
    interval: int = Field(10, ge=1)
    """Steps between evaluations."""
    num_examples: int = Field(-1, ge=-1)
    """Examples of the environment's eval dataset; -1: all."""
    samples: int = Field(1, ge=1)
    """Rollouts an example."""
    sampling: EvalSamplingConfig = EvalSamplingConfig()
    name: str | None = None
    """Its name in metrics and files. Default: the id without owner and version."""

    @property
    def label(self) -> str:
        return self.name or short_name(self.id or "eval")


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
    batch_size: int = Field(64, ge=1)
    """Rollouts a step."""
    group_size: int = Field(8, ge=2)
    """Rollouts of one task; their mean reward is the baseline."""
    max_off_policy_steps: int = Field(8, ge=0)
    """A rollout whose oldest token is further behind the policy than this is cancelled (`stale`), and its task issued again."""
    inference_urls: list[str] = []
    """Addresses of inference servers. Default: the one in status/inference.json."""
    host: str = "127.0.0.1"
    """Address to bind for the trainer. Anything but loopback opens it to everyone who can reach it."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0 takes a free one. The address is published in status/orchestrator.json."""
    rollout_timeout_s: float = Field(600.0, gt=0)
    """How long one rollout may take; then it counts as an error (`timeout`)."""
    rollout_retries: int = Field(2, ge=0)
    """How often a failed rollout is played again with fresh state before its group is dropped."""
    inference_timeout_s: float = Field(900.0, gt=0)
    """How long to wait for an inference server to come up, come back, or load a version."""
    trainer_timeout_s: float = Field(3600.0, gt=0)
    """How long to wait for the trainer's next policy version before the run ends with a diagnosis."""
    worker_timeout_s: float = Field(300.0, gt=0)
    """How long an environment's worker may take to start."""
    show_rollout_every: int = Field(5, ge=0)
    """Every so many steps one rollout is printed in full; 0: never."""

    def model_post_init(self, _context: object) -> None:
        for entry in self.eval:
            if entry.id is None and self.environment:
                first = self.environment[0]
                entry.id, entry.args, entry.name = first.id, entry.args or first.args, entry.name or first.label
