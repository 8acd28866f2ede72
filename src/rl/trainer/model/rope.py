"""Freezes rotary embeddings that depend on sequence length, as vLLM does.

transformers chooses their frequencies by the largest position in the row: in a packed row a
sample's results would depend on its neighbours, and a short sample computed alone would differ from
the sampler, which chooses once, by the longest sequence that it serves
(vllm/model_executor/layers/rotary_embedding: phi3_long_rope_scaled_rope.py,
dynamic_ntk_scaling_rope.py, dynamic_ntk_alpha_rope.py).
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl.system.errors import RunError

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
