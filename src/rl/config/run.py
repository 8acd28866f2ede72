"""The complete configuration of a run. Each setting exists once; every process loads the resolved
config.toml of the run directory.

Importing this module must load neither torch nor vllm, so that `--help` is fast.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rl.config.base import (
    ABSOLUTE_PATHS,
    NAMES,
    PATH,
    PATH_IF_EXISTS,
    TEMPLATE,
    Devices,
    Host,
    Settings,
    switch,
)
from rl.config.cluster import ClusterConfig
from rl.config.kinds import (
    SOURCES,
    BatchesFrom,
    Kind,
    RecordedConfig,
    ServeConfig,
    SftConfig,
    with_defaults,
)
from rl.config.orchestrator import EnvSource, OrchestratorConfig
from rl.config.tinker import TinkerConfig
from rl.config.trainer import TrainerConfig
from rl.run_dir.files import matching
from rl.run_dir.paths import RunDir
from rl.system.machine import multiplies_bfloat16


class InferenceConfig(Settings):
    """One vLLM server, which `rl` starts. `inference @ RUN/config.toml` starts further servers,
    which join the run, on any machine that sees the run directory (docs/clusters.md)."""

    host: Host = "127.0.0.1"
    """Address to bind. Anything but loopback opens the server to other machines that have the
    run's token (docs/security.md)."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0: any free one. The address is published in status/inference.json, or for a
    server that `rl` did not start, in status/inference-<host>-<port>.json."""
    gpus: Devices = None
    """GPUs of the server: a count, or a list of ids ("0,1"). Default: all that the trainer does
    not use; 0 runs on the CPU."""
    cpus: Devices = None
    """CPU cores of the server: a count, or a list of ids. Default: all cores, shared with the
    trainer."""
    startup_timeout_s: float = Field(900.0, gt=0)
    """Seconds that the server may take to start answering."""
    engine_timeout_s: float = Field(300.0, gt=0)
    """Seconds that vLLM's engine may take to answer a request of the server; beyond that the
    engine is killed and the server restarted. The engine answers between steps, which take long
    on a CPU. Reading new weights may make no progress for ten times as long, and putting them in
    place may take that. A stopped engine is detected sooner: see supervisor.silence_s."""
    adapters: Literal["auto", "merge", "hot"] = "auto"
    """How policy versions of a run with trainer.lora are served. `hot`: as adapters beside the
    model, loaded without a pause; requests in flight keep theirs. `merge`: added to the model's
    weights, as fast as the model alone. `auto`: hot on GPUs; merge on the CPU, where hot takes 5
    times as long, and for adapters of experts and of models that see images."""
    vllm: dict[str, Any] = {}
    """vLLM engine arguments by name, such as `tensor_parallel_size = 2`; vLLM checks them when
    the server starts."""


MAX_STEP = 999_999
"""The largest step: file names of steps have six digits."""


class SupervisorConfig(Settings):
    """How `rl` keeps the processes of a run alive."""

    max_restarts: int = Field(20, ge=0)
    """Restarts of one process within window_s; one more ends the run with a summary. 0: the
    first death ends it. A process that fails twice before it first becomes ready always ends the
    run."""
    window_s: float = Field(1800.0, gt=0)
    """Seconds over which restarts are counted."""
    backoff_s: float = Field(0.5, ge=0)
    """Seconds to wait before restarting a process that died without progress; they double with
    every further such death in a row, up to backoff_limit_s. A process that made progress is
    restarted at once."""
    backoff_limit_s: float = Field(30.0, ge=0)
    """Longest wait before a restart, in seconds."""
    silence_s: float = Field(45.0, gt=0)
    """Seconds without a heartbeat after which a process (stopped, or stuck in the kernel) is
    killed and restarted. A thread sends one every 2 s, but a long call that holds the GIL
    (loading a large model) can delay it by half a minute."""
    stall_s: float = Field(600.0, gt=0)
    """Seconds without a new token, rollout, batch or step after which a diagnosis is printed:
    what every process is waiting for. While the model is downloaded or data are prepared, the
    interval at which `rl` says what is being done."""
    quarantine_after: int = Field(3, ge=1)
    """Trainer deaths in a row during one step after which its batch is quarantined: the step is
    skipped, and this is recorded. With `rl serve`: deaths during one call of a client, after
    which the call is answered with an error."""


class RendererConfig(Settings):
    """How chat messages become token ids and sampled ids become messages."""

    name: str = "auto"
    """The renderer. `auto` chooses by the model's chat template; `template` uses that template
    unchanged; `chatml` adds tools to a template without them; any other name is one of the
    `renderers` package: qwen3, llama-3, gpt-oss, ..."""
    thinking_retention: Literal["all", "tool_cycle", "template"] = "all"
    """How long thinking stays in the prompts of later turns: `all`: always, so that a rollout is
    one sample; `tool_cycle`: until the next user message; `template`: as in the model's
    template. A turn whose prompt drops earlier thinking starts a new sample."""
    enable_thinking: bool | None = None
    """Value of `enable_thinking` for chat templates with that switch. Default: the template's
    own."""
    special_tokens_in_text: bool = False
    """Whether a special token of the chat template that a user's or a tool's message spells is
    that token. By default it is text, which can neither end the message nor forge a turn."""


LENGTH = 2048


def default_length(known: dict[str, Any]) -> int:
    """Returns LENGTH, or the longest sequence of the named model, if that is shorter and the
    model's config.json is on this machine."""
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    name = known.get("name", "")
    for folder in (name, f"{cache}/hub/models--{name.replace('/', '--')}/snapshots/*"):
        for path in matching(f"{folder}/config.json"):
            # a damaged one is told of where the model is found
            with contextlib.suppress(ValueError, AttributeError):
                return min(LENGTH, longest_sequence(json.loads(path.read_bytes())) or LENGTH)
    return LENGTH


def longest_sequence(config: dict[str, Any]) -> int | None:
    """The longest sequence, in tokens, of a model with plain positions, which vLLM holds it to;
    None for scaled ones: vLLM tells."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default" and not any(
        isinstance(part, dict) for part in rope.values()
    )
    return text.get("max_position_embeddings") if plain else None


class ModelConfig(Settings):
    """The model to train."""

    name: Annotated[str, Field(min_length=1), PATH_IF_EXISTS] = (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    """A folder in Hugging Face format, or a model's id on the hub."""
    dtype: Literal["bfloat16", "float32"] = Field(
        default_factory=lambda: "bfloat16" if multiplies_bfloat16() else "float32"
    )
    """Number format in which inference and the trainer compute. Default: `bfloat16` on machines
    that multiply it in hardware (GPUs, CPUs with AVX-512 BF16 or AMX), otherwise `float32`.
    Master weights, optimizer state and reductions are always float32; masters of a bfloat16
    model begin with noise below its rounding, without which the first updates would be lost
    (docs/algorithms.md)."""
    max_model_len: int = Field(default_factory=default_length, ge=2)
    """Longest sequence in tokens, prompt and answer together. Default: 2048, or what the model's
    config.json allows, if that is less."""
    chat_template: Annotated[str | None, TEMPLATE] = None
    """Chat template to use instead of the model's own, or if it has none: a Jinja file, or the
    built-in `chatml`."""
    trust_remote_code: bool = False
    """Whether to run Python code shipped with the model."""


class WandbConfig(Settings):
    """Weights & Biases; `--wandb` or `wandb = true` is enough. WANDB_MODE=offline works."""

    project: str = Field(default_factory=lambda: os.environ.get("WANDB_PROJECT", "rl"))
    """Project to log the run to. Default: WANDB_PROJECT, or `rl`."""
    entity: str | None = None
    """Team or user that owns the project. Default: yours."""
    name: str | None = None
    """Name of the run on Weights & Biases. Default: WANDB_NAME, or the run's name."""
    group: str | None = None
    """Group of runs that this one belongs to."""
    tags: Annotated[list[str], NAMES] = []
    """Tags for finding the run."""
    notes: str | None = None
    """Description of the run."""
    rollouts: int = Field(20, ge=0)
    """Rollouts of the newest step to send as a table, every five minutes and at the end; 0:
    none."""


class CostConfig(Settings):
    """Prices, in any currency, of the metric `cost/total`. Prices of tokens are those of a
    service, such as the one of trainer.backend = "tinker". Calls of judges are not counted."""

    per_hour: float = Field(0.0, ge=0)
    """Price of one machine for an hour."""
    per_million_prompt: float = Field(0.0, ge=0)
    """Price of a million tokens of prompts, cached or not."""
    per_million_sampled: float = Field(0.0, ge=0)
    """Price of a million sampled tokens."""
    per_million_trained: float = Field(0.0, ge=0)
    """Price of a million tokens of trained samples, prompts included."""

    def price(self, spent: dict[str, float]) -> float:
        """Returns the price of what was spent, see rl.run_dir.cost.totals."""
        prices = {
            "prefilled": self.per_million_prompt / 1e6,
            "cached": self.per_million_prompt / 1e6,
            "sampled": self.per_million_sampled / 1e6,
            "batch": self.per_million_trained / 1e6,
            "machine_s": self.per_hour / 3600,
        }
        return sum(prices.get(name.rpartition("/")[2], 0.0) * spent[name] for name in spent)


class PrometheusConfig(Settings):
    """A page with the newest value of each metric, for Prometheus: `/metrics` of `rl`
    (docs/metrics.md). Scrapers need the run's token."""

    host: Host = "127.0.0.1"
    """Address to bind. Anything but loopback opens the page to other machines that have the
    run's token (docs/security.md)."""
    port: int = Field(8412, ge=0, le=65535)
    """Port to bind; 0: any free one, which `rl` prints at its start."""


TRUNCATIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Settings that leave tokens out of what is sampled, each with the value at which it leaves out
none."""


class RLConfig(Settings):
    """Run-wide settings at the top, and one section for each process."""

    name: str = ""
    """Name of the run and of its directory. Default: environment and model."""
    output_dir: Annotated[str, PATH] = "outputs"
    """Directory in which run directories are created."""
    max_steps: int = Field(100, ge=1, le=MAX_STEP)
    """Batches to train on; batch N makes policy version N. `steps` is an alias."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed for the order of tasks, the draws of evaluations, and the trainer."""
    max_lag: int = Field(1, ge=0)
    """Batches that sampling may begin ahead of training; 0 is on-policy. A rollout that no newer
    one overtakes is at most this many policy versions behind; a slow one may be further, and the
    hard bound on its age is orchestrator.max_off_policy_steps."""
    model: ModelConfig = ModelConfig()
    renderer: RendererConfig = RendererConfig()
    """How chat messages become token ids, and sampled ids become messages."""
    supervisor: SupervisorConfig = SupervisorConfig()
    wandb: Annotated[WandbConfig | None, BeforeValidator(switch)] = None
    """Logging to Weights & Biases; `--wandb` switches it on."""
    tensorboard: bool = False
    """Whether to write metrics as TensorBoard event files to the run's `tensorboard/` as well.
    Needs the extra `tensorboard`."""
    prometheus: Annotated[PrometheusConfig | None, BeforeValidator(switch)] = None
    """A page of metrics for Prometheus; `--prometheus` switches it on."""
    cost: CostConfig = CostConfig()
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: OrchestratorConfig = OrchestratorConfig()
    inference: InferenceConfig = InferenceConfig()
    tinker: TinkerConfig = TinkerConfig()
    sft: Annotated[SftConfig | None, BeforeValidator(switch)] = None
    """Supervised fine-tuning instead of reinforcement learning; see `rl sft --help`."""
    recorded: Annotated[RecordedConfig | None, BeforeValidator(switch)] = None
    """Recorded rollouts instead of environments and inference; see `rl train --help`."""
    serve: Annotated[ServeConfig | None, BeforeValidator(switch)] = None
    """A server of the Tinker API instead of a run; see `rl serve --help`."""
    cluster: Annotated[ClusterConfig | None, BeforeValidator(switch)] = None
    """Several machines, see `rl --help cluster`. Default: this machine alone."""

    _with_defaults = model_validator(mode="before")(with_defaults)

    def model_post_init(self, _context: object) -> None:
        if not self.name:
            envs = "+".join(env.label for env in self.orchestrator.environment) or "run"
            kind = envs if self.kind == "rl" else self.kind
            self.name = f"{kind}-{Path(self.model.name).name}"

    @property
    def run_dir(self) -> RunDir:
        root = Path(self.output_dir) / self.name
        weights = self.trainer.weights.dir
        return RunDir(root, Path(weights) / self.name if weights else root / "weights")

    def with_absolute_paths(self) -> "RLConfig":
        """Returns a copy that means the same in every directory: relative paths are resolved
        against the current one."""
        return RLConfig.model_validate(self.model_dump(), context=ABSOLUTE_PATHS)

    def sampling_of(self, env: EnvSource) -> dict[str, Any]:
        """Returns the sampling settings for an environment's training rollouts: its own,
        completed by the run's, without a truncation that leaves all tokens."""
        sampling = self.orchestrator.sampling.model_dump(
            exclude_none=True
        ) | env.sampling.model_dump(exclude_none=True)
        return {
            key: value
            for key, value in sampling.items()
            if key not in TRUNCATIONS or value != TRUNCATIONS[key]
        }

    @property
    def kind(self) -> Kind:
        """What this run is; the sections that say so are read nowhere else."""
        sections = (Kind.SERVE, Kind.SFT, Kind.RECORDED)
        return next((kind for kind in sections if getattr(self, kind)), Kind.RL)

    @property
    def batches_from(self) -> BatchesFrom:
        """Who gives the trainer its batches."""
        data = self.trainer.data
        return "replay" if data.replay else "fake" if data.fake else SOURCES[self.kind]

    @property
    def plays(self) -> bool:
        """Whether environments are played, or clients sample."""
        return "inference" in self.kind.roles

    @property
    def starts_inference(self) -> bool:
        """Whether the run has inference servers of its own."""
        return self.plays and not self.orchestrator.inference_urls

    @property
    def max_behind(self) -> int:
        """Most versions that a batch's oldest token may be behind."""
        return self.orchestrator.max_off_policy_steps if self.max_lag else 0

    @property
    def is_remote(self) -> bool:
        """Whether a service trains and samples, and this machine only plays."""
        return self.trainer.backend == "tinker"

    def replays_sampling(self, env: EnvSource) -> bool:
        """Whether the trainer is told which tokens truncation keeps. NeMo Gym's agents ask for
        chats, whose answers do not tell."""
        return self.trainer.max_kept > 0 and not env.head_server

    def truncates(self, vocab_size: int, *, replayed: bool) -> bool:
        """Whether inference samples from a truncated distribution, and the trainer computes with
        the same (`replayed`) or with another one."""
        settings = [
            item
            for env in self.orchestrator.environment or [EnvSource()]  # `rl record`
            if self.replays_sampling(env) == replayed
            for item in self.sampling_of(env).items()
        ]
        return any(
            key in TRUNCATIONS and (key != "top_k" or value < vocab_size) for key, value in settings
        )


SECTIONS = ("trainer", "orchestrator", "inference", "tinker", "sft", "recorded", "serve")
RUN_WIDE = tuple(name for name in RLConfig.model_fields if name not in SECTIONS)
"""Keys that may also be written in a section: `orchestrator.max_lag` is `max_lag`."""
ALIASES = {
    "steps": "max_steps",
    "learning_rate": "trainer.optim.lr",
    "trainer.learning_rate": "trainer.optim.lr",
}
"""Other names of settings that guides use -> their keys."""


QUICK_STEPS, QUICK_GROUPS, QUICK_GROUP_SIZE, QUICK_TOKENS, QUICK_EXAMPLES = 2, 2, 4, 32, 4
"""The sizes of `--quick`."""


def shrink(config: RLConfig) -> RLConfig:
    """Returns the copy for `--quick`, the smallest version of a run that still goes through
    everything, with every size lowered to that of a trial, and its own name. A size is
    raised only to stay consistent with another. Groups without signal are trained on, because a
    hard task must not end the trial."""
    config = config.model_copy(deep=True)
    settings = config.orchestrator
    config.name = config.name if config.name.endswith("-quick") else f"{config.name}-quick"
    config.max_steps = min(config.max_steps, QUICK_STEPS)
    if config.sft:
        config.sft.epochs, config.sft.batch_size = (
            None,
            min(config.sft.batch_size, QUICK_GROUPS * QUICK_GROUP_SIZE),
        )
    settings.group_size = min(settings.group_size, QUICK_GROUP_SIZE)
    for env in settings.environment:
        env.group_size = min(env.group_size, QUICK_GROUP_SIZE) if env.group_size else None
    config.trainer.minibatches = min(config.trainer.minibatches, QUICK_GROUPS)
    largest = max([settings.group_size, *(env.group_size or 0 for env in settings.environment)])
    settings.batch_size = QUICK_GROUPS * largest
    settings.replace_no_signal = False  # the trial does not test whether the task is too hard
    settings.sampling.max_tokens = min(settings.sampling.max_tokens, QUICK_TOKENS)
    for entry in settings.entries.values():
        entry.sampling.max_tokens = (
            min(entry.sampling.max_tokens, QUICK_TOKENS) if entry.sampling.max_tokens else None
        )
    for entry in settings.eval:
        entry.num_examples = (
            min(entry.num_examples, QUICK_EXAMPLES) if entry.num_examples >= 0 else QUICK_EXAMPLES
        )
        entry.samples = 1
    return config
