"""Settings of the trainer."""

from typing import Literal

from pydantic import Field

from rl.settings import Devices, Settings


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


class LossConfig(Settings):
    """Importance-weighted policy gradient; the formula is at the head of `rl/trainer/loss.py`."""

    ratio_cap: float = Field(2.0, gt=0)
    """The importance ratio (trainer over inference) is truncated at this value; inf: not truncated."""
    ratio_low: float = Field(0.125, ge=0)
    """A token whose ratio is below is not trained; 0: no lower bound."""
    ratio_high: float = Field(8.0, gt=0)
    """A token whose ratio is above is not trained; inf: no upper bound."""


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


class TrainerConfig(Settings):
    """The trainer: FSDP2 under torchrun, one code path for any number of ranks, CPU or GPU."""

    gpus: Devices = None
    """GPUs of the trainer: a count, or a list of ids ("0,1"). Default: one; 0 trains on the CPU."""
    cpus: Devices = None
    """CPU cores of the trainer: a count, or a list of ids. Default: all cores, shared with inference."""
    ranks: int | None = Field(None, ge=1)
    """Trainer processes on this host. Default: one a GPU, or one without a GPU."""
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = LossConfig()
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens of one forward and backward pass, padding included: the first thing to lower when memory runs out."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, about a third more compute."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    batch_timeout_s: float = Field(3600.0, gt=0)
    """How long the trainer waits for one batch before it ends with a diagnosis."""
