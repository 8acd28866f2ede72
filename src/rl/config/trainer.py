"""Settings of the trainer."""

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rl.config.base import PAIR, PATH, Devices, Settings, Unbounded, parse_names, switch
from rl.config.loss import LossConfig, PolicyGradientConfig

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Settings):
    """AdamW with warm-up and a schedule. All optimizer steps of a batch use the same learning
    rate."""

    lr: float = Field(1e-6, gt=0, le=1)
    """Peak learning rate, usually 1e-7 to 1e-3; more than 1 would destroy the model in the first
    step. `learning_rate` is an alias."""
    betas: Annotated[tuple[Decay, Decay], PAIR] = (0.9, 0.95)
    """Decay rates of AdamW's running means of the gradient and its square."""
    eps: float = Field(1e-8, gt=0)
    """Term added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: Unbounded = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down to it. `inf`: no limit."""
    warmup_steps: int = Field(0, ge=0)
    """Batches over which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, until max_steps."""
    offload: bool = False
    """Whether AdamW's two moments (8 bytes per weight) stay in CPU memory. Each optimizer step
    copies them to the GPU and back, which makes it slower."""

    def lr_at(self, step: int, max_steps: int) -> float:
        """Returns the learning rate of step `step` (the first is 1), used by all of its optimizer
        steps.

        Warm-up: lr * step / warmup_steps for step <= warmup_steps. After that, with f = (step - 1 -
        warmup_steps) / (max_steps - warmup_steps): constant lr; linear lr * (1 - f); cosine lr * (1
        + cos(pi f)) / 2. f is the completed fraction at the start of the step (0 at the first one
        after warm-up), so no step has learning rate 0.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        rest = max(1, max_steps - self.warmup_steps)
        fraction = min(1.0, (step - self.warmup_steps - 1) / rest)
        if self.schedule == "linear":
            return self.lr * (1.0 - fraction)
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1.0 + math.cos(math.pi * fraction))
        return self.lr


class CheckpointConfig(Settings):
    """Trainer state (fp32 weights, optimizer, step, RNG) under checkpoints/."""

    interval: int | None = Field(None, ge=1)
    """Steps between checkpoints, whatever they cost; a warning is printed if they take more than
    a twentieth of the time. Default: interval_s decides. The last step is always saved."""
    interval_s: Unbounded = Field(60.0, gt=0)
    """Shortest time in seconds from the end of a checkpoint to the next, if `interval` is not
    set; 20 times what the last one took to copy and write, if that is longer. `inf`: only the
    last step is saved."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this number are kept as well."""


class WeightsConfig(Settings):
    """Policy versions in Hugging Face format under weights/."""

    dir: Annotated[str | None, PATH] = None
    """Directory for the versions, possibly in a memory file system that the processes share.
    Default: the run's weights/."""
    keep_last: int = Field(3, ge=2)
    """Number of newest versions to keep. The version of the newest checkpoint and versions
    waiting for their evaluation are always kept."""
    keep_every: int | None = Field(None, ge=1)
    """Versions whose number is a multiple of this one are kept as well."""
    anchor_every: int = Field(1, ge=1)
    """Versions whose number is a multiple of this one, or of keep_every, are written whole, and
    the others as deltas: what differs from the version before, compressed. Deltas need a copy of
    a version's bytes in the trainer's memory, and another in each server's that reads them. 1:
    all are whole."""
    transport: Literal["memory", "files", "nixl"] = "memory"
    """Where servers read a new version. memory: in the trainer's memory on the same host, before
    the version is on disk, elsewhere in its folder. files: in its folder. nixl: in the memory of
    each rank over the network, or if that fails in its folder; needs the extra `nixl`. Adapters
    are read from their folder."""


class TokenLogConfig(Settings):
    """What the trainer computed at each trained token, one file per step under tokens/:
    log-probability, entropy, and whether a clip or mask acted. 7 bytes per token."""

    max_gib: Unbounded = Field(1.0, ge=0)
    """Total size limit of these files in GiB; beyond it the oldest are deleted. 0: none are
    written; `inf`: all are kept."""


ALL_LINEAR, EXPERTS = "all-linear", "experts"
"""Targets of adapters that are not names of modules."""


def parse_targets(value: object) -> object:
    """Returns `all-linear` unchanged, and any other text as a list of names. Raises ValueError
    for an empty list."""
    if not value:
        raise ValueError('names no layer; give some ("q_proj", "v_proj"), or all-linear')
    return value if value == ALL_LINEAR else parse_names(value)


class LoraConfig(Settings):
    """Low-rank adapters (peft): the base model is frozen; only the adapters are trained and
    published."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the update, which is multiplied by alpha / rank."""
    targets: Annotated[list[str] | Literal["all-linear"], BeforeValidator(parse_targets)] = (
        "all-linear"
    )
    """Names of the modules that get an adapter ("q_proj", "v_proj", ...); `all-linear`: every
    linear layer except the head, and some that would never learn (docs/lora.md); `experts`: the
    stacked matrices of a mixture of experts, with `rank` * (rows + columns) weights for each
    expert. Both: "all-linear,experts"."""


class FakeDataConfig(Settings):
    """Random samples instead of the orchestrator's, to measure the trainer alone."""

    samples: int = Field(64, ge=1)
    """Samples in a batch."""
    group_size: int = Field(8, ge=1)
    """Number of samples that share a prompt."""
    prompt_tokens: int = Field(64, ge=1)
    """Length of a prompt in tokens."""
    completion_tokens: int = Field(64, ge=1)
    """Length of an answer in tokens."""


class ReplayConfig(Settings):
    """Retrains a run from its logged batches and compares the results with its stored ones; `rl
    replay RUN` sets this section."""

    run: str
    """Directory of the run; nothing is written there."""
    weights: str
    """Directory of the run's policy versions."""
    start: int = Field(0, ge=0)
    """Step of the checkpoint to start from; 0: the base model."""
    until: int = Field(ge=1)
    """The last step to retrain."""


class DataConfig(Settings):
    """Where batches come from."""

    fake: Annotated[FakeDataConfig | None, BeforeValidator(switch)] = None
    """Random samples; `--trainer.data.fake` is enough."""
    replay: ReplayConfig | None = None
    """The logged batches of another run."""


DISK_S = 3600.0
"""Seconds that a disk has for a version or a checkpoint, in addition to trainer.batch_timeout_s,
which may be short: large ones take minutes."""


class TrainerConfig(Settings):
    """The trainer, under torchrun: FSDP2 on several ranks, plain weights on one, CPU or GPU."""

    backend: Literal["local", "tinker"] = "local"
    """Who trains and samples. local: this project's trainer, and vLLM. tinker: a service with
    the Tinker API, see `tinker`."""
    gpus: Devices = None
    """GPUs of the trainer: a count, or a list of ids ("0,1"). Default: one; 0 trains on the CPU."""
    cpus: Devices = None
    """CPU cores of the trainer: a count, or a list of ids. Default: all cores, shared with
    inference."""
    ranks: int | None = Field(None, ge=1)
    """Trainer processes on this host. Default: one per GPU, or one without GPUs."""
    optim: OptimConfig = OptimConfig()
    loss: LossConfig = PolicyGradientConfig()
    """The loss to minimise, selected by `type`. docs/algorithms.md has the formulas."""
    lora: Annotated[LoraConfig | None, BeforeValidator(switch)] = None
    """Train low-rank adapters instead of the whole model; `--trainer.lora` switches them on."""
    data: DataConfig = DataConfig()
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens per forward and backward pass on one rank: the first setting to lower when memory
    runs out. Default: 4,096; 16,384 on GPUs with `activation_checkpointing` and attention other
    than eager."""
    minibatches: int = Field(1, ge=1)
    """Parts of a batch, each of whole groups and with its own optimizer step. A clipped loss
    then compares the policy with the one that the batch began with."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch, each with an optimizer step on every minibatch."""
    dp_replicate: int = Field(1, ge=1)
    """Number of copies of the model (HSDP), each sharded over its own group of ranks. 1: one
    copy, sharded over all ranks."""
    context_parallel: int = Field(1, ge=1)
    """Number of ranks that share each sequence, for sequences that one rank cannot hold."""
    expert_parallel: int = Field(1, ge=1)
    """Number of ranks over which the experts of each layer are divided: tokens travel to their
    experts, instead of all experts to each rank. It divides the experts, and the ranks of one
    model copy."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """What to recompute in the backward pass to save memory: `full` keeps one tensor per layer
    and costs about a third more compute."""
    router_replay: Literal["off", "trainer", "engine"] = "off"
    """Whose choice of experts training repeats, for mixtures of experts. trainer: its own when
    it computed the log-probabilities of the policy that the batch began with, in all optimizer
    steps of the batch. engine: that of sampling, which vLLM gives on GPUs; it takes a byte of
    the batch for each token, layer and chosen expert."""
    max_kept: int = Field(512, ge=0)
    """Most ids that truncation (sampling's top_p, top_k, min_p) may keep at a token for it to be
    trained: its probability is then computed over these ids alone, as when it was sampled. At 0
    it is computed over all ids, and ratios are below 1."""
    attention: Literal["auto", "blocks", "flex", "eager", "unpacked"] = "auto"
    """How attention within a row of packed samples is computed. auto: the fastest way that a
    test at the start finds exact for the model: `blocks` on CPUs, `flex` (compiled) on GPUs,
    `eager` with dense masks, `unpacked` with one sample per row. Any other is tested too."""
    compile: bool | None = None
    """Whether the layers go through torch.compile: a minute or more at the start, faster steps
    on GPUs. Default: where attention is `flex`, so on GPUs, not on CPUs."""
    deterministic: bool | None = None
    """Whether the same batches give bit-identical results on the same machine, threads, ranks
    and torch; `rl replay` proves it. The cost is not measurable on CPUs; on GPUs some operations
    get slower. Default: true on CPUs, false on GPUs."""
    strict_parity: bool | None = None
    """Whether the run ends, instead of warning, when trainer and inference disagree on tokens of
    the same policy version. Default: only in the first comparison after each start, and only if
    they differ so much (KL above 0.1) that they compute different models; `false`: never."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    token_log: TokenLogConfig = TokenLogConfig()
    batch_timeout_s: float = Field(3600.0, gt=0)
    """Seconds that the trainer waits for a batch, or for the orchestrator to confirm a version,
    before it exits with a diagnosis. Versions and checkpoints have an hour more to be written."""
    rank_timeout_s: float = Field(300.0, gt=0)
    """Seconds that a rank waits for another one inside of a computation before all end and start
    again; 15 minutes until the first step is trained. A rank that waits for the orchestrator or
    a disk is not late, and a lost one is noticed earlier: see supervisor.silence_s."""

    @property
    def patience_s(self) -> float:
        """Seconds that ranks wait for one that waits for the orchestrator or a disk: more than
        rank 0 waits for a batch or a version to be written, so that rank 0 reports it."""
        return self.batch_timeout_s + DISK_S + 600.0
