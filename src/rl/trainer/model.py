"""The policy: a Hugging Face causal LM under FSDP2, one code path for any number of ranks."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rl.config.run import ModelConfig
from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.attention import TreeMask
from rl.trainer.compiled import compiled, kept_operations
from rl.trainer.logprobs import head_logprobs, token_logprobs
from rl.trainer.lora import add_adapters
from rl.trainer.modes import Mode, call, is_compiled, turn_off_randomness, widen_windows
from rl.trainer.norms import exchange_norms
from rl.trainer.packing import MicroBatch
from rl.trainer.parallel.loading import load_rows
from rl.trainer.parallel.sharding import RowGather, reshard, shard_model
from rl.trainer.parallel.world import World
from rl.trainer.rope import freeze_rope
from rl.trainer.rotary import exchange_rotary
from rl.trainer.selftest import choose_mode

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(folder: str, config: ModelConfig, settings: TrainerConfig, world: World, frozen: bool = False) -> PreTrainedModel:
    """The model of `folder` with float32 master weights, sharded over the ranks; it computes in `config.dtype`, reduces in float32.

    Every rank reads its own part of the files, see parallel/loading.py. A `frozen` one is only to be scored with: it is held in the dtype
    that it computes in. Raises RunError for a model that cannot be computed exactly, see trainer/selftest.py, and for files that lack
    a part of it.
    """
    choice = choose_mode(folder, config, settings, world)
    model, rows = load_rows(
        folder,
        world,
        dtype=DTYPES[config.dtype] if settings.lora or frozen else torch.float32,  # what is frozen needs no float32 master
        attn_implementation=choice.implementation,
        trust_remote_code=config.trust_remote_code,
    )
    if settings.lora:
        add_adapters(model, settings.lora)
    if frozen:
        model.requires_grad_(False)
    freeze_rope(model, config.max_model_len)
    widen_windows(model)
    turn_off_randomness(model)
    change_layers(model, settings, choice.mode, world)
    head = model.get_output_embeddings()
    if head is None:
        raise RunError(f"{type(model).__name__} has no language-model head")
    head.forward = LossHead(head, choice.mode)
    rows.leave_meta(model)
    shard_model(model, DTYPES[config.dtype], world)
    rows.put_back(model)
    return model


KEPT_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.rl.block_attention.default,
]
"""Operations whose results selective checkpointing keeps, beside compiled attention: they cost the most to compute again, for the bytes
they take. Products within a compiled layer are none: they are computed again."""


def change_layers(model: PreTrainedModel, settings: TrainerConfig, mode: Mode, world: World) -> None:
    """Compiles the layers and has them recompute activations, as configured. Before sharding: FSDP's hooks stay outside of both."""
    model.train()
    compiles = is_compiled(settings, mode)
    if compiles and settings.compile is None and world.is_main:
        print("trainer.compile: true, the default with flex; the first steps compile, for a minute or more", flush=True)
    kind = settings.activation_checkpointing
    contexts = {}
    if kind == "selective":
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, KEPT_OPERATIONS + kept_operations())
    if not compiles:  # the compiler makes its own of the operations
        exchange_norms(model)
        exchange_rotary(model)
    for layer in (module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())):
        if compiles:
            layer.forward = compiled(layer.forward, "set trainer.compile = false")
        if kind != "none":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


class LossHead:
    """The forward pass of the model's head: log-probabilities and entropies of a micro batch's loss tokens in place of logits.

    The model is called as a whole all the same: FSDP's hooks hang on that, and a tied head stays tied.
    """

    def __init__(self, head: nn.Module, mode: Mode) -> None:
        self.head, self.logits, self.mode = head, head.forward, mode
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


def mode_of(*models: PreTrainedModel) -> Mode:
    """How the model computes a row; of several models that compute the same rows the mode that allows the least of them."""
    return max((model.get_output_embeddings().forward.mode for model in models), key=get_args(Mode).index)


def is_packed(model: PreTrainedModel) -> bool:
    """Whether a row of this model may hold several samples."""
    return mode_of(model) != "unpacked"


@dataclass(frozen=True)
class Scores:
    """Log-probability and entropy of a micro batch's N loss tokens."""

    logprobs: Tensor  # [N] float32, with gradient
    entropies: Tensor  # [N] float32, of the distribution that predicts the token


def score(model: PreTrainedModel, batch: MicroBatch, world: World, entropy_gradient: bool = False) -> Scores:
    """Scores of the micro batch's loss tokens. `entropy_gradient`: the entropies have a gradient too.

    Raises RunError for a model that does not pass the prefix tree on to its attention. A row of an unpacked model is one sample.
    """
    head: LossHead = model.get_output_embeddings().forward
    assert head.mode != "unpacked" or batch.is_chain
    row = RowGather(len(batch.input_ids), world) if world.context_size > 1 else None
    tree = TreeMask(batch.ends, batch.position_ids, batch.queries, row)
    ids, positions = (x if batch.queries is None else x[batch.queries] for x in (batch.input_ids, batch.position_ids))
    head.batch, head.entropy_gradient, head.scores = batch, entropy_gradient, None
    with row.saved_as_parts() if row else nullcontext():
        output = call(model, head.mode, ids, positions, tree)
        if head.fused and output is not head.scores:  # the model scales or caps its logits, which scores are none
            head.fused = False
            output = call(model, head.mode, ids, positions, tree)
    head.batch, scores, head.scores = None, head.scores, None
    if not torch.is_grad_enabled():
        reshard(model)
    if not head.fused:
        logprobs, entropies = token_logprobs(output[0], batch.temperatures, batch.rows, batch.targets, entropy_gradient)
        return Scores(logprobs, entropies[batch.rows])
    return Scores(scores[0], scores[1] if entropy_gradient else scores[1].detach())
