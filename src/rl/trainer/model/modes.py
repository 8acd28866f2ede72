"""The modes in which a model can compute a micro batch's row. selftest.py finds out which of them
are exact for a model.

* `blocks`, `flex`, `eager`: the whole packed row in one pass, with an attention over prefix trees,
  see attention.py.
* `unpacked`: the row is one sample, and the model is called in plain Hugging Face fashion: for
  models with state or unusual attention.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.model.attention import TreeMask
from rl.trainer.model.flex import compiled
from rl.trainer.parallel.experts import experts_of
from rl.trainer.parallel.world import World

Mode = Literal["blocks", "flex", "eager", "unpacked"]
"""How a model computes a row. Ordered by the longest row that each supports: masks of `eager` are
dense, and a row of `unpacked` is one sample."""


def possible_modes(settings: TrainerConfig, world: World) -> list[Mode]:
    """Returns the modes to try, fastest first, or only the one that trainer.attention names.
    Raises RunError if that cannot work here."""
    on_gpu, shared = world.device.type == "cuda", world.context_size > 1
    if settings.attention == "flex" and not on_gpu:
        raise RunError("trainer.attention = flex has no backward pass on CPUs; use blocks")
    if settings.attention in ("eager", "unpacked") and shared:
        raise RunError(
            f"trainer.attention = {settings.attention} cannot share a sequence over ranks; "
            "set trainer.context_parallel to 1"
        )
    if settings.attention != "auto":
        return [settings.attention]
    packed: list[Mode] = ["flex", "blocks"] if on_gpu else ["blocks"]
    return packed if shared else [*packed, "eager", "unpacked"]


def is_compiled(settings: TrainerConfig, mode: Mode) -> bool:
    """Returns trainer.compile, or its default for the mode."""
    return mode == "flex" if settings.compile is None else settings.compile


def set_mode(model: PreTrainedModel, settings: TrainerConfig, mode: Mode, compiles: bool) -> None:
    """Makes the policy compute in a mode, with compiled layers and recomputed activations as
    configured. Raises RunError if its attention cannot be replaced, and other errors if
    transformers refuses to."""
    if mode == "unpacked":
        set_attention(model, "sdpa" if model._supports_sdpa else "eager")
    elif not set_attention(model, mode if mode == "eager" else f"rl_{mode}"):
        raise RunError("its attention cannot be replaced")
    model.get_output_embeddings().forward.mode = mode
    if compiles:
        # In a graph transformers replaces grouped_mm for float32 by a loop that torch cannot
        # compile, and if experts are divided or have adapters the numbers of tokens would break
        # the graph at every step.
        for experts in experts_of(model).values():
            experts.forward = torch.compiler.disable(experts.forward)
    for layer in model.modules():
        if type(layer).__name__.removeprefix("FSDP") in (model._no_split_modules or ()):
            forward = vars(layer).setdefault("plain_forward", layer.forward)
            if compiles:
                forward = compiled(forward, "set trainer.compile = false")
            if settings.activation_checkpointing == "full":
                forward = partial(
                    checkpoint, forward, use_reentrant=False, preserve_rng_state=False
                )
            layer.forward = forward


def set_attention(model: PreTrainedModel, name: str) -> bool:
    """Has the model use an attention of transformers, unless its class has its own. Returns
    whether it does."""
    if model._can_set_attn_implementation():  # else transformers warns
        model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def call(
    model: PreTrainedModel, mode: Mode, input_ids: Tensor, position_ids: Tensor, tree: TreeMask
) -> Tensor:
    """Returns the model's output for a row, [T'] ids at [T'] positions: its head's result, as
    changed by the model after the head.

    Raises RunError if the model does not pass the prefix tree on to its attention.
    """
    if mode == "unpacked":
        return model(input_ids=input_ids[None], use_cache=False).logits
    attention = {"attention_mask": dense_masks(model, tree)} if mode == "eager" else {"tree": tree}
    output = model(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, **attention
    ).logits
    unknown = {window for window in layer_windows(model) if window} - tree.windows
    if mode != "eager" and (unknown or not tree.windows):
        missing = "call its attention function"
        if tree.windows:
            missing = f"pass its window of {max(unknown)} tokens to its attention function"
        name = type(model).__name__.removeprefix("FSDP")
        raise RunError(f"{name} does not {missing}; set trainer.attention = auto")
    return output


def dense_masks(model: PreTrainedModel, tree: TreeMask) -> Tensor | dict[str, Tensor]:
    """Returns the additive masks for transformers' own attention, [1, 1, T, T]: one per kind of
    layer if there are several."""

    def dense(window: int | None) -> Tensor:
        seen = tree.dense(window)[None, None]
        lowest = torch.finfo(torch.bfloat16).min
        return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, lowest)

    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    windows = layer_windows(model)
    if not kinds or not any(windows):
        return dense(windows[0])
    return {kind: dense(window) for kind, window in dict(zip(kinds, windows, strict=True)).items()}


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """Returns each layer's window in tokens from the model's config; None for full attention."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        slides = getattr(config, "use_sliding_window", True)
        return [window if slides else None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def widen_windows(model: PreTrainedModel) -> None:
    """Gives Command models the windows that vLLM serves them with
    (vllm/model_executor/models/commandr.py): they were trained with layers that see
    `sliding_window` tokens in addition to the query's own, but transformers includes the query's
    own in the window."""
    if model.config.model_type in ("cohere2", "cohere2_moe"):
        model.config.sliding_window += 1
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window += 1


def turn_off_randomness(model: PreTrainedModel) -> None:
    """Puts the model into training mode without randomness: the sampler has neither dropout nor
    router noise, and the ratio of trainer to sampler must be 1 on-policy."""
    model.train()
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            # in training mode it samples experts; its "jitter" is a threshold that evaluation uses
            # too
            module.eval()
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(
                word in name for word in ("dropout", "layerdrop", "jitter", "input_noise")
            ):
                setattr(module, name, 0.0)
