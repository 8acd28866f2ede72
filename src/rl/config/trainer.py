"""Settings of the trainer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl.config.base import OPTIONAL_PATH, PAIR, Devices, Settings, Unbounded, parse_names, switch
from rl.config.loss import LossConfig, PolicyGradientConfig

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """AdamW with a warm-up and a schedule. All optimizer steps of a batch have the same learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate. `learning_rate` is an alias."""
    betas: Annotated[tuple[Decay, Decay], PAIR] = (0.9, 0.95)
    """Decay rates of AdamW's running means of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Term added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: Unbounded = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down to it. `inf`: none is."""
    warmup_steps: int = Field(0, ge=0)
    """Batches over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, until max_steps."""
    offload: bool = False
    """Whether AdamW's two moments stay in the CPU's memory and visit the GPU once an optimizer step: 8 bytes a weight less there and
    more here, a slower optimizer step."""


class CheckpointConfig(Settings):
    """Trainer state (fp32 weights, optimizer, step, RNG) under checkpoints/."""

    interval: int | None = Field(None, ge=1)
    """Steps between checkpoints, whatever they cost; above a twentieth of the time there is a warning. Default: interval_s decides. The
    last step is always saved."""
    interval_s: Unbounded = Field(60.0, gt=0)
    """Least seconds from the end of a checkpoint to the next one, where no interval in steps is given; 20 times what the last one cost
    (its copy and its writing) if that is longer. `inf`: only the last step is saved."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this number are kept as well."""


class WeightsConfig(Settings):
    """Policy versions in Hugging Face format under weights/."""

    dir: Annotated[str | None, OPTIONAL_PATH] = None
    """Directory for the versions; it may be in a memory file system that the processes share. Default: the run's weights/."""
    keep_last: int = Field(3, ge=2)
    """Number of newest versions that are kept. The version of the newest checkpoint and one that waits for its eval are kept in any
    case."""
    keep_every: int | None = Field(None, ge=1)
    """Versions whose number is a multiple of this one are kept as well."""


class TokenLogConfig(Settings):
    """What the trainer computed at each trained token, a file a step under tokens/: log-probability, entropy, whether a clip or mask
    acted. 7 bytes a token."""

    max_gib: Unbounded = Field(1.0, ge=0)
    """Size of all these files together, GiB; the oldest are deleted. 0: none are written; `inf`: all are kept."""


def parse_targets(value: object) -> object:
    """`all-linear` as it is, anything else as a list of names."""
    return value if value == "all-linear" else parse_names(value)


class LoraConfig(Settings):
    """Low-rank adapters (peft): the base model is frozen, only the adapters are trained and published."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Annotated[list[str] | Literal["all-linear"], BeforeValidator(parse_targets)] = "all-linear"
    """Names of the modules that get an adapter ("q_proj", "v_proj", ...); `all-linear`: every linear layer but the head."""


class FakeDataConfig(Settings):
    """Random samples instead of the orchestrator's: measures the trainer alone."""

    samples: int = Field(64, ge=1)
    """Samples in a batch."""
    group_size: int = Field(8, ge=1)
    """Number of samples that share a prompt."""
    prompt_tokens: int = Field(64, ge=1)
    """Length of a prompt in tokens."""
    completion_tokens: int = Field(64, ge=1)
    """Length of an answer in tokens."""


class ReplayConfig(Settings):
    """Retrains a run from its logged batches and compares with what it has kept; `rl replay RUN` sets this section."""

    run: str
    """Directory of the run; nothing is written there."""
    weights: str
    """Directory of the run's policy versions."""
    start: int = Field(0, ge=0)
    """Step of the checkpoint to start from; 0: the base model."""
    until: int = Field(ge=1)
    """The last step that is trained again."""


class DataConfig(Settings):
    """Where batches come from."""

    fake: Annotated[FakeDataConfig | None, BeforeValidator(switch)] = None
    """Random samples; `--trainer.data.fake` is enough."""
    replay: ReplayConfig | None = None
    """The logged batches of another run."""


class TrainerConfig(Settings):
    """The trainer: FSDP2 under torchrun, one code path for any number of ranks, CPU or GPU."""

    gpus: Devices = None
    """GPUs of the trainer: a count, or a list of ids ("0,1"). Default: one; 0 trains on the CPU."""
    cpus: Devices = None
    """CPU cores of the trainer: a count, or a list of ids. Default: all cores, shared with inference."""
    ranks: int | None = Field(None, ge=1)
    """Trainer processes on this host. Default: one a GPU, or one without a GPU."""
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = PolicyGradientConfig()
    """The loss that is minimised; `type` chooses it. docs/algorithms.md has the formulas."""
    lora: Annotated[LoraConfig | None, BeforeValidator(switch)] = None
    """Low-rank adapters are trained instead of the whole model; `--trainer.lora` switches them on."""
    data: DataConfig = DataConfig()
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward and backward pass on one rank: the first thing to lower when memory runs out. Default: 4,096; on GPUs with
    `activation_checkpointing` 16,384, where attention is not eager."""
    minibatches: int = Field(1, ge=1)
    """Parts of a batch, each of whole groups and with an optimizer step of its own. A clipped loss then compares the policy with the one
    that the batch began with."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch, each with an optimizer step on every minibatch."""
    dp_replicate: int = Field(1, ge=1)
    """Number of copies of the model (HSDP), each sharded over its own group of ranks. 1: one copy, sharded over all ranks."""
    context_parallel: int = Field(1, ge=1)
    """Number of ranks that share each sequence, for sequences that one rank cannot hold."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is recomputed in the backward pass to save memory: `full` keeps one tensor a layer and costs about a third more compute,
    `selective` keeps the results of matrix products and attention and recomputes the rest; of compiled layers, those of attention alone."""
    attention: Literal["auto", "blocks", "flex", "eager", "unpacked"] = "auto"
    """How a row of samples is computed. auto: the fastest way that a test at the start finds exact for the model: `blocks` on CPUs, `flex`
    (compiled) on GPUs, `eager` with dense masks, `unpacked` with one sample a row. Any other is tested, too."""
    compile: bool | None = None
    """Whether the layers go through torch.compile: a minute or more at the start, faster steps on GPUs. Default: where attention is `flex`,
    so on GPUs, not on CPUs."""
    deterministic: bool | None = None
    """Whether the same batches give the same bits, as long as machine, threads, ranks and torch are the same; `rl replay` proves it. On
    CPUs it costs nothing that can be measured; on GPUs some operations get slower. Default: true on CPUs, false on GPUs."""
    strict_parity: bool | None = None
    """Whether the run ends, instead of warning, when trainer and inference disagree on tokens of the same policy version. Default: in
    the first comparison after each start, and only where they are so far apart (KL above 0.1) that they compute different models; `false`:
    never."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    token_log: TokenLogConfig = TokenLogConfig()
    batch_timeout_s: float = Field(3600.0, gt=0)
    """Seconds that the trainer waits for one batch before it ends with a diagnosis."""

    @property
    def rank_timeout_s(self) -> float:
        """Seconds that ranks wait for rank 0: more than it waits for a batch, for it must be the one that reports."""
        return self.batch_timeout_s + 600.0
