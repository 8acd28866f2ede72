"""Settings of the trainer."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl.settings import Devices, Settings, switch
from rl.trainer.loss_config import LossConfig, PolicyGradientConfig


class OptimConfig(Settings):
    """AdamW with a warm-up and a schedule; one step a batch."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate. `learning_rate` is an alias."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's running means."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, until max_steps."""
    offload: bool = False
    """Keep master weights and optimizer state in the CPU's memory and step there: less GPU memory, a slower step."""


class CheckpointConfig(Settings):
    """Trainer state (fp32 weights, optimizer, step, RNG) under checkpoints/."""

    interval: int | None = Field(None, ge=1)
    """Steps between checkpoints. Default: by time, see interval_s. The last step is always saved."""
    interval_s: float = Field(60.0, gt=0)
    """Seconds between checkpoints when no interval in steps is given."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this are kept as well."""


class WeightsConfig(Settings):
    """Policy versions in Hugging Face format under weights/."""

    dir: str | None = None
    """Where versions are written; may be a memory file system shared by the processes. Default: weights/ of the run."""
    keep_last: int = Field(3, ge=2)
    """Newest versions kept. The version of the newest checkpoint and one that waits for its eval are kept in any case."""
    keep_every: int | None = Field(None, ge=1)
    """Versions whose number is a multiple of this are kept as well."""


def names_switch(value: object) -> object:
    """One name, or several with commas between them, are a list."""
    return value.split(",") if isinstance(value, str) and value != "all-linear" else value


class LoraConfig(Settings):
    """Low-rank adapters (peft): the base model is frozen, only the adapters are trained and published."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: Annotated[list[str] | Literal["all-linear"], BeforeValidator(names_switch)] = "all-linear"
    """Names of the modules that get one ("q_proj", "v_proj", ...), or every linear layer but the head."""


class FakeDataConfig(Settings):
    """Random samples instead of the orchestrator's: measures the trainer alone."""

    samples: int = Field(64, ge=1)
    """Samples a batch."""
    group_size: int = Field(8, ge=1)
    """Samples that share a prompt."""
    prompt_tokens: int = Field(64, ge=1)
    """Length of a prompt."""
    completion_tokens: int = Field(64, ge=1)
    """Length of an answer."""


class ReplayConfig(Settings):
    """Retrain a run from its logged batches and compare with what it has kept: `rl replay RUN` sets this."""

    run: str
    """Directory of the run; nothing is written there."""
    weights: str
    """Directory of its versions."""
    start: int = Field(0, ge=0)
    """The checkpoint to start from; 0: the base model."""
    until: int = Field(ge=1)
    """The last step."""


class DataConfig(Settings):
    """Where batches come from."""

    fake: Annotated[FakeDataConfig | None, BeforeValidator(switch)] = None
    """`--trainer.data.fake`: random samples."""
    replay: ReplayConfig | None = None
    """The batches of another run."""


def checkpointing_switch(value: object) -> object:
    """`true` means full, `false` means none."""
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


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
    """What is minimised; `type` chooses. docs/algorithms.md has the formulas."""
    lora: Annotated[LoraConfig | None, BeforeValidator(switch)] = None
    """Train low-rank adapters instead of the whole model."""
    data: DataConfig = DataConfig()
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens of one forward and backward pass on one rank: the first thing to lower when memory runs out."""
    dp_replicate: int = Field(1, ge=1)
    """Groups of ranks that hold a whole copy of the model each (HSDP); within a group it is sharded. 1: sharded over all ranks."""
    context_parallel: int = Field(1, ge=1)
    """Ranks that share each sequence, for sequences that one rank cannot hold."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], BeforeValidator(checkpointing_switch)] = "none"
    """Recompute activations in the backward pass: `full` keeps one tensor a layer and costs about a third more compute, `selective`
    keeps the results of matrix products and attention and recomputes the rest."""
    attention: Literal["auto", "blocks", "flex", "eager"] = "auto"
    """How attention over prefix trees is computed. auto: `blocks` on CPUs, `flex` (compiled) on GPUs; `eager` for models that need it."""
    compile: bool = False
    """torch.compile for the layers: a minute or more at the start, faster steps on GPUs."""
    deterministic: bool | None = None
    """The same batches give the same bits, as long as machine, threads, ranks and torch are the same; `rl replay` proves it. On CPUs it
    costs nothing that can be measured; on GPUs some operations get slower. Default: true on CPUs, false on GPUs."""
    strict_parity: bool = False
    """End the run, instead of warning, when trainer and inference disagree on tokens of the same policy version. `--strict-parity`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    batch_timeout_s: float = Field(3600.0, gt=0)
    """How long the trainer waits for one batch before it ends with a diagnosis."""

    @property
    def rank_timeout_s(self) -> float:
        """Ranks wait longer for rank 0 than rank 0 waits for a batch: it must be the one that reports."""
        return self.batch_timeout_s + 600.0
