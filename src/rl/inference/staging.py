"""New weights beside the ones that serve: a second set of the model's modules, loaded and packed while the first goes on computing.

vLLM's own reload works inside the running model: it counts every tensor on the meta device, loads, packs and copies back, 0.35 s of
standstill for 135M parameters on two cores. Here only pointers change while the engine stands still. The second set is made like the
first, by the model's own loaders and packing, so the model is afterwards what a server started on the new weights would hold.

For CPUs and weights without quantization (`can_stage`). It holds the weights twice from staging to the swap.
"""

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

from rl.inference.threads import threads

STRUCTURE = ("_modules", "_parameters", "_buffers")
PROCESSED = "_already_called_process_weights_after_loading"
"""vLLM's mark of a layer that would skip its packing."""


def can_stage(config: VllmConfig) -> bool:
    """Whether `staged` works. On GPUs captured graphs hold addresses, and packed formats of quantized weights have states of their own."""
    plain = config.model_config.quantization is None and config.lora_config is None and config.speculative_config is None
    return current_platform.is_cpu() and plain


class Staged:
    """The second set of one model's modules, complete; `put_in_place` makes the model compute with it."""

    def __init__(self, model: nn.Module, weights: Iterable[tuple[str, Tensor]], config: VllmConfig, num_threads: int):
        """Loads and packs, by so many threads; may run in a thread while the model computes. `weights` are all that the model was loaded
        from, by name."""
        self.model, self.dtype = model, config.model_config.dtype
        self.twins = make_twins(model)
        has_head = any(isinstance(module, ParallelLMHead) for module in self.twins)
        # The current config is global, but a running engine does not ask for it.
        with torch.no_grad(), set_current_vllm_config(config), threads(num_threads):
            self.twins[model].load_weights(weights)
            for module in self.twins.values():
                method = getattr(module, "quant_method", None)
                if type(module) is VocabParallelEmbedding and has_head:
                    module.cpu_linear = linear  # nobody multiplies by it: the head does; packed it would be a third of a small model more
                elif isinstance(method, QuantizeMethodBase):
                    method.process_weights_after_loading(module)

    def put_in_place(self) -> list[Any]:
        """Exchanges the weights; no step may run meanwhile. Returns what the model held before: freeing it takes time and can wait."""
        attention = [module for module in self.twins if is_deferred_attention_layer(module)]
        before = [exchange(live, twin, self.twins) for live, twin in self.twins.items() if live not in attention]
        for module in attention:  # its scales, and what it derives from other layers' weights
            module.process_weights_after_loading(self.dtype)
        return before


def make_twins(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Every module of the model -> a copy with tensors of its own, laid out as before loading, and all else shared. Nothing is copied."""
    twins: dict[nn.Module, nn.Module] = {}
    for live in model.modules():
        twin = twins[live] = object.__new__(type(live))
        twin.__dict__.update(live.__dict__)
        twin.__dict__.pop(PROCESSED, None)
        if "quant_method" in live.__dict__:
            twin.__dict__["quant_method"] = copy.copy(live.__dict__["quant_method"])
    tensors: dict[int, Tensor] = {}  # by the live tensor: what is tied stays tied
    for live, twin in twins.items():
        twin.__dict__["_modules"] = {name: twins.get(child) for name, child in live._modules.items()}
        names = {**get_layerwise_info(live).restore_metadata[0], **live._parameters}  # those before its weights were packed, and now
        twin.__dict__["_parameters"] = {name: twin_parameter(live, twin, name, tensors) for name in names}
    for live, twin in twins.items():  # behind all parameters, of which a buffer may be a view
        twin.__dict__["_buffers"] = {name: twin_buffer(live, name, tensors) for name in live._buffers}
    for twin in twins.values():
        if getattr(getattr(twin, "quant_method", None), "moe_kernel", None) is not None:
            twin.quant_method.moe_kernel = None  # experts are packed when their kernel is made, and only then
    return twins


def twin_parameter(live: nn.Module, twin: nn.Module, name: str, tensors: dict[int, Tensor]) -> Tensor | None:
    """An empty parameter as it was before loading; a copy where vLLM keeps no record (biases and the like are never packed)."""
    now, record = live._parameters.get(name), get_layerwise_info(live).restore_metadata[0].get(name)
    if now is None and record is None:
        return None
    if now is None or id(now) not in tensors:
        if record is not None:
            new = restore_layer_refs(materialize_meta_tensor(record), twin)
        else:
            new = nn.Parameter(now.detach().clone(), requires_grad=False)
            new.__class__ = type(now)
            new.__dict__.update({key: rebound(value, live, twin) for key, value in now.__dict__.items()})
        if now is None:
            return new
        tensors[id(now)] = new
    return tensors[id(now)]


def rebound(value: Any, live: nn.Module, twin: nn.Module) -> Any:
    """A method of `live` as that of `twin`; anything else as it is."""
    return value.__func__.__get__(twin) if isinstance(value, MethodType) and value.__self__ is live else value


def twin_buffer(live: nn.Module, name: str, tensors: dict[int, Tensor]) -> Tensor | None:
    """A copy of what a checkpoint may hold. Of the others a view of a parameter (Mamba-2's convolutions) is the same view of the twin's;
    the rest (rotary tables) never change and are shared."""
    now = live._buffers[name]
    if now is None or name in live._non_persistent_buffers_set:
        viewed = None if now is None else tensors.get(id(now._base))
        return now if viewed is None else viewed.data.as_strided(now.size(), now.stride(), now.storage_offset())
    return tensors.setdefault(id(now), now.clone())


def exchange(live: nn.Module, twin: nn.Module, twins: dict[nn.Module, nn.Module]) -> list[Any]:
    """Gives `live` the tensors of `twin` and all that packing has set on it. Returns what it had.

    Tensor objects stay and take over the other's memory, so that whoever else refers to them sees the new values.
    """
    before: list[Any] = []
    for ours, theirs in ((live._parameters, twin._parameters), (live._buffers, twin._buffers)):
        for name, new in theirs.items():
            old = ours.get(name)
            if old is None or new is None:
                ours[name] = new
            elif old is not new:
                before.append(old.data)
                old.data = new.data
                new.__dict__.clear()  # its loader is a method of the twin: the two would keep each other, and with them these values
    for name, child in twin._modules.items():
        if child is not twins.get(live._modules.get(name)):  # type: ignore[arg-type]
            before.append(live._modules.get(name))
            live._modules[name] = child
    for key, value in twin.__dict__.items():
        if key == "quant_method":
            before.append(dict(live.__dict__[key].__dict__))
            live.__dict__[key].__dict__.update(value.__dict__)
        elif key not in STRUCTURE and live.__dict__.get(key) is not value:
            before.append(live.__dict__.get(key))
            live.__dict__[key] = value
    return before
