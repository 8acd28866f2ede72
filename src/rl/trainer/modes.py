"""How a model computes a micro batch's row. trainer/selftest.py finds out which of these modes are exact for a model.

* `blocks`, `flex`, `eager`: packed, the whole row in one pass; implementations of attention over prefix trees, see trainer/attention.py.
* `unpacked`: the row is one sample, and the model is called as Hugging Face's: for models with state, or whose attention is none of those.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.config.trainer import TrainerConfig
from rl.system.errors import RunError
from rl.trainer.attention import TreeMask
from rl.trainer.parallel.world import World

Mode = Literal["blocks", "flex", "eager", "unpacked"]
"""Those to the right allow shorter rows: eager as its masks are dense, unpacked one sample."""


def possible_modes(settings: TrainerConfig, world: World) -> list[Mode]:
    """The modes to try, the fastest first; the one that trainer.attention names. Raises RunError if the ranks cannot compute that."""
    on_gpu, shared = world.device.type == "cuda", world.context_size > 1
    if settings.attention == "flex" and not on_gpu:
        raise RunError("trainer.attention = flex has no backward pass on CPUs; use blocks")
    if settings.attention in ("eager", "unpacked") and shared:
        raise RunError(f"trainer.attention = {settings.attention} cannot share a sequence over ranks; set trainer.context_parallel to 1")
    if settings.attention != "auto":
        return [settings.attention]
    packed: list[Mode] = ["flex", "blocks"] if on_gpu else ["blocks"]
    return packed if shared else [*packed, "eager", "unpacked"]


def is_compiled(settings: TrainerConfig, mode: Mode) -> bool:
    """trainer.compile, or its default for the mode."""
    return mode == "flex" if settings.compile is None else settings.compile


def implementation(mode: Mode, model_class: type[PreTrainedModel]) -> str:
    """transformers' name for the attention of a mode."""
    if mode == "unpacked":
        return "sdpa" if model_class._supports_sdpa else "eager"
    return mode if mode == "eager" else f"rl_{mode}"


def call(model: PreTrainedModel, mode: Mode, input_ids: Tensor, position_ids: Tensor, tree: TreeMask) -> Tensor:
    """The model's output for a row, [T'] ids at [T'] positions: what its head returned, and what it did with these "logits" after it.

    Raises RunError for a model that does not pass the prefix tree on to its attention.
    """
    if mode == "unpacked":
        return model(input_ids=input_ids[None], use_cache=False).logits
    attention = {"attention_mask": dense_masks(model, tree)} if mode == "eager" else {"tree": tree}
    output = model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, **attention).logits
    unknown = {window for window in layer_windows(model) if window} - tree.windows
    if mode != "eager" and (unknown or not tree.windows):
        missing = f"tell its attention function of its window of {max(unknown)} tokens" if tree.windows else "call its attention function"
        raise RunError(f"{type(model).__name__} does not {missing}; set trainer.attention = auto")
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


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The window of each layer by the model's config, in tokens; None: it sees all before it."""
    config = model.config.get_text_config()
    window, slides = getattr(config, "sliding_window", None) or None, getattr(config, "use_sliding_window", True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def widen_windows(model: PreTrainedModel) -> None:
    """Gives Command models the windows that vLLM serves them with (vllm/model_executor/models/commandr.py): they were trained with layers
    that see `sliding_window` tokens beside the query's own, and transformers counts that one among them."""
    if model.config.model_type in ("cohere2", "cohere2_moe"):
        model.config.sliding_window += 1
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window += 1


def turn_off_randomness(model: PreTrainedModel) -> None:
    """The sampler has neither dropout nor router noise, and the ratio of trainer to sampler must be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(word in name for word in ("dropout", "layerdrop", "jitter", "input_noise")):
                setattr(module, name, 0.0)
