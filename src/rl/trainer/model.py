"""The policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl.config import ModelConfig
from rl.models import ModelError
from rl.trainer.attention import TreeMask
from rl.trainer.config import TrainerConfig
from rl.trainer.distributed import World
from rl.trainer.logprobs import head_logprobs, token_logprobs
from rl.trainer.lora import add_adapters
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel import RowGather, reshard, shard_model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(folder: str, config: ModelConfig, settings: TrainerConfig, world: World, frozen: bool = False) -> PreTrainedModel:
    """The model of `folder` with float32 master weights, sharded over the ranks; it computes in `config.dtype`, reduces in float32.

    Every rank maps the same files and keeps its shards, see parallel.shard_model. A `frozen` one is only to be scored with: it is held in
    the dtype that it computes in.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES[config.dtype] if settings.lora or frozen else torch.float32,  # what is frozen needs no float32 master
        attn_implementation=attention_name(settings, world),
        trust_remote_code=config.trust_remote_code,
    )
    if settings.lora:
        add_adapters(model, settings.lora)
    if frozen:
        model.requires_grad_(False)
    check_attention(model)
    turn_off_randomness(model)
    change_layers(model, settings)
    install_head(model)
    shard_model(model, DTYPES[config.dtype], settings.optim.offload, world)
    return model


def attention_name(settings: TrainerConfig, world: World) -> str:
    """What transformers calls the implementation of trainer.attention, see rl/trainer/attention.py."""
    on_gpu = world.device.type == "cuda"
    name = settings.attention if settings.attention != "auto" else "flex" if on_gpu else "blocks"
    if name == "flex" and not on_gpu:
        raise ModelError("trainer.attention = flex has no backward pass on CPUs; use blocks")
    if name == "eager" and world.context_size > 1:
        raise ModelError("trainer.attention = eager cannot share a sequence over ranks; set trainer.context_parallel to 1")
    return name if name == "eager" else f"rl_{name}"


def check_attention(model: PreTrainedModel) -> None:
    """Prefix trees are exact for softmax attention with or without a window; says which layers have another kind."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{type(model).__name__}: layers of kind {sorted(kinds)} carry state across samples and cannot be packed as trees")


def config_window(model: PreTrainedModel) -> int | None:
    """The window that some layers have by the model's config."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return window if window and slides else None


def turn_off_randomness(model: PreTrainedModel) -> None:
    """The sampler has neither dropout nor router noise, and the ratio of trainer to sampler must be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "jitter_noise", "router_jitter_noise", "input_jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


KEPT_OPERATIONS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.rl.block_attention.default,
}
"""Whose results selective checkpointing keeps: they cost the most to compute again, for the bytes they take."""


def checkpoint_policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


def change_layers(model: PreTrainedModel, settings: TrainerConfig) -> None:
    """Compiles the layers and has them recompute activations, as configured. Before sharding: FSDP's hooks stay outside of both."""
    model.train()
    kind = settings.activation_checkpointing
    if kind == "selective" and settings.compile:
        raise ModelError("trainer.compile hides from activation_checkpointing = selective what it would keep; use none or full")
    for layer in (module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())):
        if settings.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if kind != "none":
            contexts = {"context_fn": partial(create_selective_checkpoint_contexts, checkpoint_policy)} if kind == "selective" else {}
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


class LossHead:
    """The forward pass of the model's head: log-probabilities and entropies of a micro batch's loss tokens in place of logits.

    The model is called as a whole all the same: FSDP's hooks hang on that, and a tied head stays tied.
    """

    def __init__(self, head: nn.Module) -> None:
        self.head, self.logits = head, head.forward
        self.fused = type(head) is nn.Linear
        """Else, and for models that change the logits after the head, the logits of the predictors are returned."""
        self.batch: MicroBatch | None = None
        """None: the model is used for something else."""
        self.entropy_gradient = False
        self.scores: Tensor | None = None  # [2, N], what the fused head has returned

    def __call__(self, hidden: Tensor) -> Tensor:
        """[1, T', H] -> scores [2, N], or logits [1, P, V]."""
        if self.batch is None:
            return self.logits(hidden)
        batch, predicting = self.batch, hidden[:, self.batch.predictors]
        if not self.fused:
            return self.logits(predicting)
        tokens = (batch.temperatures, batch.rows, batch.targets)
        logprobs, entropies = head_logprobs(predicting[0], self.head.weight, self.head.bias, *tokens, self.entropy_gradient)
        self.scores = torch.stack([logprobs, entropies[batch.rows]])
        return self.scores


def install_head(model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head")
    head.forward = LossHead(head)


@dataclass(frozen=True)
class Scores:
    """What the model makes of a micro batch's N loss tokens."""

    logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that predicts the token


def score(model: PreTrainedModel, batch: MicroBatch, world: World, entropy_gradient: bool = False) -> Scores:
    """Scores of the micro batch's loss tokens. `entropy_gradient`: the entropies have a gradient too.

    Raises ModelError for a model whose attention cannot be told what a prefix tree is.
    """
    head: LossHead = model.get_output_embeddings().forward
    row = RowGather(len(batch.input_ids), world) if world.context_size > 1 else None
    tree = TreeMask(batch.ends, batch.position_ids, batch.queries, **({"gather": row} if row else {}))
    head.batch, head.entropy_gradient, head.scores = batch, entropy_gradient, None
    with row.saved_as_parts() if row else nullcontext():
        output = call(model, batch, tree)
        if head.fused and output is not head.scores:  # the model scales or caps its logits, which scores are none
            head.fused = False
            output = call(model, batch, tree)
    head.batch, scores, head.scores = None, head.scores, None
    if not torch.is_grad_enabled():
        reshard(model)
    if not head.fused:
        logprobs, entropies = token_logprobs(output[0], batch.temperatures, batch.rows, batch.targets, entropy_gradient)
        return Scores(logprobs, entropies[batch.rows])
    return Scores(scores[0], scores[1] if entropy_gradient else scores[1].detach())


def call(model: PreTrainedModel, batch: MicroBatch, tree: TreeMask) -> Tensor:
    """What the model makes of its head's output, logits as it believes."""
    eager = model.config._attn_implementation == "eager"
    ids, positions = (x if batch.queries is None else x[batch.queries] for x in (batch.input_ids, batch.position_ids))
    attention = {"attention_mask": dense_masks(model, tree)} if eager else {"tree": tree}
    output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **attention).logits
    window = config_window(model)
    if not eager and (not tree.windows or (window and window not in tree.windows)):
        unused = f"does not tell its attention function of its window of {window} tokens" if tree.windows else "does not call it"
        raise ModelError(f"trainer.attention: {type(model).__name__} {unused}; set trainer.attention = eager")
    return output


def dense_masks(model: PreTrainedModel, tree: TreeMask) -> Tensor | dict[str, Tensor]:
    """For transformers' own attention, added to the scores: [1, 1, T, T], one for each kind of layer if there are several."""

    def dense(window: int | None) -> Tensor:
        seen = tree.dense(window)[None, None]
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.bfloat16).min)

    kinds, window = getattr(model.config.get_text_config(), "layer_types", None), config_window(model)
    if not kinds or window is None:
        return dense(window)
    return {kind: dense(window if kind == "sliding_attention" else None) for kind in set(kinds)}
