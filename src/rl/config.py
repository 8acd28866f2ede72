"""The whole configuration of a run. A setting lives once; every process loads the resolved config.toml of the run directory.

Importing this module loads neither torch nor vllm: `--help` has to answer at once.
"""

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rl.access import access_faults, exposure
from rl.credentials import secret_faults, strings
from rl.inference.config import InferenceConfig
from rl.names import MAX_LABEL, MAX_RUN_NAME, name_fault, text_fault
from rl.orchestrator.config import EnvSource, OrchestratorConfig, check_credit
from rl.renderer_config import RendererConfig
from rl.run_dir import RunDir
from rl.settings import Settings, switch
from rl.sft.config import SftConfig, check_sft, with_sft_defaults
from rl.supervisor_config import SupervisorConfig
from rl.trainer.config import OptimConfig, TrainerConfig
from rl.trainer.loss_config import check_loss


class ModelConfig(Settings):
    """The model that is trained."""

    name: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """A folder in Hugging Face format, or a model's id on the hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What inference and the trainer compute in. Master weights, optimizer state and reductions are always float32."""
    max_model_len: int = Field(2048, ge=2)
    """Longest sequence, prompt and answer together."""
    chat_template: str | None = None
    """File with a Jinja chat template, for a model that has none."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""


class WandbConfig(Settings):
    """Weights & Biases; `--wandb` or `wandb = true` is enough. WANDB_MODE=offline works."""

    project: str = "rl"
    """Project."""
    entity: str | None = None
    """Team or user."""
    name: str | None = None
    """Name of the run there. Default: the run's name."""


class RLConfig(Settings):
    """Run-wide settings at the top, and one section for each process."""

    name: str = ""
    """The run's name and directory. Default: environment and model."""
    output_dir: str = "outputs"
    """Where run directories are made."""
    max_steps: int = Field(100, ge=1, le=999_999)
    """Optimizer steps. `steps` is an alias."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seeds the order of tasks and the trainer."""
    max_lag: int = Field(1, ge=0)
    """How many batches sampling runs ahead of training, and so how many policy versions rollouts are behind; 0 is on-policy.
    A slow rollout that newer ones overtake may be further behind: see orchestrator.max_off_policy_steps."""
    model: ModelConfig = ModelConfig()
    renderer: RendererConfig = RendererConfig()
    """How messages become token ids and back."""
    supervisor: SupervisorConfig = SupervisorConfig()
    wandb: Annotated[WandbConfig | None, BeforeValidator(switch)] = None
    """Log to Weights & Biases."""
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    sft: Annotated[SftConfig | None, BeforeValidator(switch)] = None
    """Given: supervised fine-tuning instead of reinforcement learning; see `rl sft --help`."""

    @model_validator(mode="before")
    @classmethod
    def _with_sft_defaults(cls, values: object) -> object:
        return with_sft_defaults(values)

    def model_post_init(self, _context: object) -> None:
        if not self.name:
            envs = "+".join(env.label for env in self.orchestrator.environment) or "run"
            self.name = f"{'sft' if self.sft else envs}-{Path(self.model.name).name}"

    @property
    def run_dir(self) -> RunDir:
        root = Path(self.output_dir) / self.name
        weights = self.trainer.weights.dir
        return RunDir(root, Path(weights) / self.name if weights else root / "weights")

    def sampling_of(self, env: EnvSource) -> dict[str, Any]:
        """How an environment's training rollouts are sampled: what it sets, and for the rest the run's sampling."""
        return self.orchestrator.sampling.model_dump(exclude_none=True) | env.sampling.model_dump(exclude_none=True)


SECTIONS = ("trainer", "orchestrator", "inference", "sft")
RUN_WIDE = tuple(name for name in RLConfig.model_fields if name not in SECTIONS)


def check(config: RLConfig) -> list[tuple[str, object, str]]:
    """Every fault that lies between settings: (key, its value, what to do about it)."""
    faults: list[tuple[str, object, str]] = []
    if fault := name_fault(config.name, MAX_RUN_NAME):
        faults.append(("name", config.name, f"is a directory's name: {fault}; use output_dir for the place"))
    dump = config.model_dump()
    faults += [(key, text, fault) for key, text in strings(dump) if (fault := text_fault(text))]
    faults += secret_faults(dump) + access_faults(config)
    if config.sft:
        faults += check_sft(config.sft, config.trainer.loss)
    elif not config.trainer.data.fake:
        faults += check_sampling(config)
    faults += check_loss(config.trainer.loss)
    if config.trainer.lora and not config.trainer.lora.targets:
        faults.append(("trainer.lora.targets", [], 'names no layer; give some ("q_proj", "v_proj"), or all-linear'))
    if config.trainer.optim.offload and config.trainer.gpus == 0:
        remedy = "moves weights and optimizer state from GPU to CPU memory, and trainer.gpus = 0 trains on the CPU: leave it out"
        faults.append(("trainer.optim.offload", True, remedy))
    both = set(as_ids(config.trainer.gpus)) & set(as_ids(config.inference.gpus))
    if both and (len(as_ids(config.trainer.gpus)) > 1 or len(as_ids(config.inference.gpus)) > 1):
        remedy = f"shares {sorted(both)} with trainer.gpus; only a single GPU is shared"
        faults.append(("inference.gpus", config.inference.gpus, remedy))
    return faults


def check_sampling(config: RLConfig) -> list[tuple[str, object, str]]:
    """What is played, and whether its groups and answers fit."""
    orchestrator, sampling = config.orchestrator, config.orchestrator.sampling
    faults: list[tuple[str, object, str]] = []
    if not orchestrator.environment:
        faults.append(("orchestrator.environment", [], "name what to train on: --orchestrator.environment.id owner/name"))
    group_size = max([orchestrator.group_size, *(env.group_size or 0 for env in orchestrator.environment)])
    if orchestrator.batch_size < group_size:
        remedy = f"is less than one group of {group_size} rollouts (group_size); raise it or lower that"
        faults.append(("orchestrator.batch_size", orchestrator.batch_size, remedy))
    if config.max_lag > orchestrator.max_off_policy_steps:
        limit = f"orchestrator.max_off_policy_steps = {orchestrator.max_off_policy_steps}"
        remedy = f"lets rollouts get too old for {limit}; lower it or raise that"
        faults.append(("max_lag", config.max_lag, remedy))
    if sampling.max_tokens >= config.model.max_model_len:
        remedy = f"leaves no room for a prompt in model.max_model_len = {config.model.max_model_len}; lower it or raise that"
        faults.append(("orchestrator.sampling.max_tokens", sampling.max_tokens, remedy))
    return faults + check_environments(orchestrator) + check_credit(orchestrator, config.trainer.loss.teacher_coefficient)


def check_environments(orchestrator: OrchestratorConfig) -> list[tuple[str, object, str]]:
    """Each entry says what is played, and its name tells it apart, because metrics and files bear it."""
    faults: list[tuple[str, object, str]] = []
    for i, env in enumerate(orchestrator.environment):
        if env.sampling.temperature == 0:
            faults.append((f"orchestrator.environment.{i}.sampling.temperature", 0, "is greedy; all rollouts of a group would be equal"))
    for kind, entries in (("environment", orchestrator.environment), ("eval", orchestrator.eval)):
        labels = [entry.label for entry in entries]
        for i, entry in enumerate(entries):
            faults += check_source(f"orchestrator.{kind}.{i}", entry)
        for i, label in enumerate(labels):
            if labels.index(label) < i:
                faults.append((f"orchestrator.{kind}.{i}.name", label, "is taken by another one; give each its own name"))
    return faults


def check_source(key: str, entry: EnvSource) -> list[tuple[str, object, str]]:
    """What is played must be said once: a package, rows with a reward function, or a NeMo Gym server with its rows."""
    faults: list[tuple[str, object, str]] = []
    if bool(entry.id) == bool(entry.dataset):
        value = entry.id or ""
        faults.append((f"{key}.id", value, "give either id (an installed environment), or dataset (rows) with reward or head_server"))
    elif entry.dataset and bool(entry.reward) == bool(entry.head_server):
        faults.append((f"{key}.reward", entry.reward, "a dataset needs either reward = file.py:function or a NeMo Gym head_server"))
    if fault := name_fault(entry.label, MAX_LABEL):
        faults.append((f"{key}.name", entry.label, f"is part of file names: {fault}"))
    return faults


def as_ids(devices: int | list[int] | None) -> list[int]:
    """Ids that are spelled out; a count names none."""
    return devices if isinstance(devices, list) else []


def warn_about(config: RLConfig) -> None:
    """Settings that work but that the user should know the effect of."""
    if config.trainer.lora and config.trainer.optim.lr == OptimConfig().lr:
        message = (
            f"trainer.optim.lr = {OptimConfig().lr:g} is the default for training the whole model; adapters start at zero and need about "
            "ten to a hundred times as much (1e-5 to 1e-4) to learn as fast"
        )
        warnings.warn(message, stacklevel=2)
    for sentence in exposure(config):
        warnings.warn(sentence, stacklevel=2)
    for key in ("top_p", "top_k", "min_p"):
        value = getattr(config.orchestrator.sampling, key)
        if value is not None:
            message = (
                f"orchestrator.sampling.{key} = {value}: inference samples from a truncated, renormalised distribution that the trainer "
                "does not model; importance ratios come out below 1 and mismatch_kl above 0 even on-policy"
            )
            warnings.warn(message, stacklevel=2)
