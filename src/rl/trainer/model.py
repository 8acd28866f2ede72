"""The policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.attention import TreeMask
from rl.trainer.logprobs import head_logprobs, token_logprobs
from rl.trainer.lora import add_adapters
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel.sharding import RowGather, reshard, shard_model
from rl.trainer.parallel.world import World

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
    head = model.get_output_embeddings()
    if head is None:
        raise RunError(f"{type(model).__name__} has no language-model head")
    head.forward = LossHead(head)
    shard_model(model, DTYPES[config.dtype], settings.optim.offload, world)
    return model


def attention_name(settings: TrainerConfig, world: World) -> str:
    """transformers' name for the implementation that trainer.attention asks for, see rl/trainer/attention.py."""
    on_gpu = world.device.type == "cuda"
    name = settings.attention if settings.attention != "auto" else "flex" if on_gpu else "blocks"
    if name == "flex" and not on_gpu:
        raise RunError("trainer.attention = flex has no backward pass on CPUs; use blocks")
    if name == "eager" and world.context_size > 1:
        raise RunError("trainer.attention = eager cannot share a sequence over ranks; set trainer.context_parallel to 1")
    return name if name == "eager" else f"rl_{name}"


def check_attention(model: PreTrainedModel) -> None:
    """Raises RunError for layers of another kind than softmax attention: prefix trees are exact for that, with or without a window."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise RunError(f"{type(model).__name__}: layers of kind {sorted(kinds)} carry state across samples and cannot be packed as trees")


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The window of each layer by the model's config, in tokens; None: it sees all before it."""
    config = model.config.get_text_config()
    window, slides = getattr(config, "sliding_window", None) or None, getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def turn_off_randomness(model: PreTrainedModel) -> None:
    """The sampler has neither dropout nor router noise, and the ratio of trainer to sampler must be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "jitter_noise", "router_jitter_noise", "input_jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


KEPT_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.rl.block_attention.default,
]
"""Operations whose results selective checkpointing keeps: they cost the most to compute again, for the bytes they take."""


def change_layers(model: PreTrainedModel, settings: TrainerConfig) -> None:
    """Compiles the layers and has them recompute activations, as configured. Before sharding: FSDP's hooks stay outside of both."""
    model.train()
    kind = settings.activation_checkpointing
    if kind == "selective" and settings.compile:
        raise RunError("trainer.compile hides from activation_checkpointing = selective what it would keep; use none or full")
    for layer in (module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())):
        if settings.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if kind != "none":
            contexts = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT_OPERATIONS)} if kind == "selective" else {}
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
        """The micro batch that is scored; None where the head gives all logits."""
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


@dataclass(frozen=True)
class Scores:
    """Log-probability and entropy of a micro batch's N loss tokens."""

    logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that predicts the token


def score(model: PreTrainedModel, batch: MicroBatch, world: World, entropy_gradient: bool = False) -> Scores:
    """Scores of the micro batch's loss tokens. `entropy_gradient`: the entropies have a gradient too.

    Raises RunError for a model that does not pass the prefix tree on to its attention.
    """
    head: LossHead = model.get_output_embeddings().forward
    row = RowGather(len(batch.input_ids), world) if world.context_size > 1 else None
    tree = TreeMask(batch.ends, batch.position_ids, batch.queries, row)
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
    """The model's output: what its head returned, and what it did with these "logits" after it."""
    eager = model.config._attn_implementation == "eager"
    ids, positions = (x if batch.queries is None else x[batch.queries] for x in (batch.input_ids, batch.position_ids))
    attention = {"attention_mask": dense_masks(model, tree)} if eager else {"tree": tree}
    output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **attention).logits
    unknown = {window for window in layer_windows(model) if window} - tree.windows
    if not eager and (unknown or not tree.windows):
        unused = f"does not tell its attention function of its window of {max(unknown)} tokens" if tree.windows else "does not call it"
        raise RunError(f"trainer.attention: {type(model).__name__} {unused}; set trainer.attention = eager")
    return output


def dense_masks(model: PreTrainedModel, tree: TreeMask) -> Tensor | dict[str, Tensor]:
    """Masks for transformers' own attention, added to the scores: [1, 1, T, T], one for each kind of layer if there are several."""

    def dense(window: int | None) -> Tensor:
        seen = tree.dense(window)[None, None]
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.bfloat16).min)

    kinds, windows = getattr(model.config.get_text_config(), "layer_types", None), layer_windows(model)
    if not kinds or not any(windows):
        return dense(windows[0])
    return {kind: dense(window) for kind, window in dict(zip(kinds, windows, strict=True)).items()}
