"""Loads the policy: a Hugging Face causal LM, under FSDP2 if there are several ranks. And loads the
frozen reference model of the loss's KL term (`trainer.loss.kl_coefficient`).

Rotary embeddings that depend on sequence length are frozen, as in vLLM. transformers chooses their
frequencies by the largest position in the row: in a packed row a sample's results would depend on
its neighbours, and a short sample computed alone would differ from the sampler, which chooses once,
by the longest sequence that it serves (vllm/model_executor/layers/rotary_embedding:
phi3_long_rope_scaled_rope.py, dynamic_ntk_scaling_rope.py, dynamic_ntk_alpha_rope.py).
"""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl.config.run import ModelConfig, RLConfig
from rl.config.trainer import TrainerConfig
from rl.models.folder import resolve_model
from rl.system.errors import RunError
from rl.trainer.data.micro_batch import MicroBatch
from rl.trainer.model.head import ScoringHead, score
from rl.trainer.model.lora import add_adapters, without_adapters
from rl.trainer.model.modes import turn_off_randomness, widen_windows
from rl.trainer.model.routes import Routers
from rl.trainer.model.selftest import choose_mode
from rl.trainer.parallel.experts import count_tokens, dispatch_tokens
from rl.trainer.parallel.loading import LocalShards, load_rows
from rl.trainer.parallel.sharding import shard_model
from rl.trainer.parallel.world import World

FROZEN = "frozen"
"""A type of rotary embedding that transformers.modeling_rope_utils.dynamic_rope_update does not
change."""


def freeze_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Gives each rotary embedding of `model` its frequencies for sequences of up to `max_model_len`
    tokens.

    Raises RunError if the sampler does not support this length.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if depends_on_length(kinds):
                freeze_one(module, kinds, None, max_model_len)
                module.rope_type = FROZEN
        elif isinstance(kinds, dict):  # one for each type of layer
            for layer_type, kind in kinds.items():
                if depends_on_length(kind):
                    freeze_one(module, kind, layer_type, max_model_len)
                    kinds[layer_type] = FROZEN


def depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def freeze_one(module: nn.Module, kind: str, layer_type: str | None, max_model_len: int) -> None:
    """Freezes one set of frequencies of a rotary embedding: the set of `layer_type`, or the only
    one."""
    config: PreTrainedConfig = copy.deepcopy(module.config)
    settings = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    choose = longrope if kind == "longrope" else dynamic
    frequencies, scaling = choose(config, settings, layer_type, max_model_len)
    prefix = f"{layer_type}_" if layer_type else ""
    old = getattr(module, f"{prefix}inv_freq")
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(old.device), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    if layer_type is None:  # Phimoe's embedding recomputes both at each call
        for name in settings.keys() & {"short_mscale", "long_mscale"}:
            settings[name] = scaling
        module.config, module.rope_init_fn = config, lambda *_, **__: (frequencies, scaling)


def longrope(
    config: PreTrainedConfig, settings: dict, layer_type: str | None, max_model_len: int
) -> tuple[Tensor, float]:
    """Returns the long factors for all sequences if one may exceed the original maximum length,
    else the short factors."""
    original = settings["original_max_position_embeddings"]
    is_long = max_model_len > original
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        config, seq_len=original + is_long, layer_type=layer_type
    )
    growth = config.max_position_embeddings / original
    scaling = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1.0 else 1.0
    return frequencies, settings.get("long_mscale" if is_long else "short_mscale") or scaling


def dynamic(
    config: PreTrainedConfig, settings: dict, layer_type: str | None, max_model_len: int
) -> tuple[Tensor, float]:
    """Returns the frequencies for `max_position_embeddings`, the length of vLLM's table; for longer
    sequences vLLM reads beyond its end.

    With `alpha` (HunYuan) the base does not depend on length: rope_theta * alpha^(d / (d - 2)),
    with d rotated values.
    """
    longest = config.max_position_embeddings
    if max_model_len > longest:
        raise RunError(
            f"model.max_model_len = {max_model_len}: inference has this model's rotary "
            f"embedding (dynamic) only up to {longest} tokens; "
            f"set model.max_model_len to at most {longest}"
        )
    trained = settings.get("max_trained_positions", longest)
    frequencies, scaling = ROPE_INIT_FUNCTIONS["dynamic"](
        config, seq_len=longest * longest / trained, layer_type=layer_type
    )
    # transformers' function may not support it; HunYuan's own code does
    if alpha := settings.get("alpha"):
        rotated = 2 * len(frequencies)
        base = settings["rope_theta"] * alpha ** (rotated / (rotated - 2))
        frequencies = base ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    return frequencies, scaling


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_policy(
    folder: str, config: ModelConfig, settings: TrainerConfig, world: World, frozen: bool = False
) -> PreTrainedModel:
    """Loads the model of `folder` with float32 master weights, sharded over the ranks; it computes
    in `config.dtype`, reduces in float32.

    Every rank reads its own part of the files, see parallel/loading.py. A `frozen` model is used
    only for scoring, so its weights are kept in the dtype that it computes in. Raises RunError if
    the model cannot be computed exactly (see selftest.py) or if tensors are missing from its files.
    """
    dtype = DTYPES[config.dtype]
    model = load_rows(
        folder,
        world if world.size > 1 else None,
        # frozen weights need no float32 master
        dtype=dtype if settings.lora or frozen else torch.float32,
        attn_implementation="eager",
        trust_remote_code=config.trust_remote_code,
    )
    model._can_set_attn_implementation()  # found out by the source of its class, which FSDP hides
    routers = Routers(model) if settings.router_replay != "off" else None
    if settings.lora:
        add_adapters(model, settings.lora)
    if frozen:
        model.requires_grad_(False)
    freeze_rope(model, config.max_model_len)
    widen_windows(model)
    turn_off_randomness(model)
    count_tokens(model, world.device)
    dispatch_tokens(model, world)
    head = model.get_output_embeddings()
    if head is None:
        raise RunError(f"{type(model).__name__} has no language-model head")
    head.forward = ScoringHead(head, routers)
    rows = LocalShards(model)
    shard_model(model, dtype, world)
    rows.attach_shards(model)
    choose_mode(model, settings, dtype, world)
    return model


@torch.no_grad()
def reference_logprobs(reference: PreTrainedModel, batch: MicroBatch, world: World) -> Tensor:
    """Returns the log-probability of each loss token, [N] float32 without gradient, by routes of
    its own. Every rank calls this, as for `score`."""
    with without_adapters(reference):
        return score(reference, replace(batch, routes=None), world).trainer_logprobs


def load_reference(
    config: RLConfig, base: str, policy: PreTrainedModel, world: World
) -> PreTrainedModel | None:
    """Returns the reference of `policy`, or None if the loss has no KL term. Raises RunError for a
    model that cannot be a reference.

    `base` is the folder of the model that the run started from; `kl_reference` may name another
    model. With adapters the policy's own frozen weights are the base, and the reference takes no
    memory. Otherwise it takes, on each rank, a shard of the weights in the compute dtype, and the
    gathered weights of one layer while it computes.
    """
    loss = config.trainer.loss
    if not loss.kl_coefficient:
        return None
    if config.trainer.lora and not loss.kl_reference:
        return policy
    try:
        other = config.model.model_copy(update={"name": loss.kl_reference, "chat_template": None})
        folder = resolve_model(other, needs_template=False) if loss.kl_reference else base
    except RunError as error:
        raise RunError(f"trainer.loss.kl_reference: {error}") from error
    settings = config.trainer.model_copy(
        update={"lora": None, "activation_checkpointing": "none", "router_replay": "off"}
    )
    model = load_policy(folder, config.model, settings, world, frozen=True)
    if model.config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        raise RunError(
            f"trainer.loss.kl_reference: {folder} has another vocabulary than {base}; a "
            "reference must use the same token ids"
        )
    for module in model.modules():
        # there is no backward pass, so gathered weights are freed right after use
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)
    return model
