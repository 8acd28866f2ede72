"""Stages new weights beside the served ones: a second set of the model's modules is loaded and
packed while the first keeps computing.

vLLM's own reload works inside the running model: it counts every tensor on the meta device, loads,
packs and copies back, a pause of 0.35 s for 135M parameters on two cores. Here the engine pauses
only while pointers change. The second set is made like the first, by the model's own loaders and
packing, so the result is what a server started with the new weights would hold. On GPUs the second
set waits in the host's memory, and packing and copying are part of the pause.

Works with weights that are not quantized (`can_stage`). A worker's part of the weights is in memory
twice from staging to the swap.
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
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.platforms import current_platform

STRUCTURE = ("_modules", "_parameters", "_buffers")
PROCESSED = "_already_called_process_weights_after_loading"
"""vLLM's mark of a layer that would skip its packing."""


def can_stage(config: VllmConfig) -> bool:
    """Whether `Staged` works: packed formats of quantized weights have their own state, and
    adapters and drafts their own modules."""
    special = (config.model_config.quantization, config.lora_config, config.speculative_config)
    return all(setting is None for setting in special)


class Staged:
    """The second set of one model's modules; `put_in_place` makes the model compute with what
    was loaded into it."""

    def __init__(self, model: nn.Module, config: VllmConfig, in_host: bool):
        """Makes the modules. With `in_host` the model is on a GPU: the second set waits in the
        host's memory, and packing is left to `put_in_place`."""
        self.model, self.config, self.in_host = model, config, in_host
        self.twins = make_twins(model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads all tensors of the model's files, by name; may run in a thread while the model
        computes."""
        # The current config is global, but a running engine does not read it.
        with torch.no_grad(), set_current_vllm_config(self.config):
            self.twins[self.model].load_weights(weights)
            if not self.in_host:
                self.pack(self.twins.values())

    def pack(self, modules: Iterable[nn.Module]) -> None:
        """Gives loaded modules the layout that their kernels want."""
        has_head = any(isinstance(module, ParallelLMHead) for module in self.twins)
        for module in modules:
            method = getattr(module, "quant_method", None)
            if current_platform.is_cpu() and type(module) is VocabParallelEmbedding and has_head:
                # only the head is multiplied by, and a packed embedding would add a third to a
                # small model
                module.cpu_linear = linear
            elif isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)

    def put_in_place(self) -> list[Any]:
        """Exchanges the weights; no step may run meanwhile. Returns the old content of the
        model: freeing it takes time and can wait."""
        attention = [module for module in self.twins if is_deferred_attention_layer(module)]
        others = {live: twin for live, twin in self.twins.items() if live not in attention}
        before: list[Any] = []
        if self.in_host:
            self.copy_in_place(others)
        else:
            for live, twin in others.items():
                before.append(exchange(live, twin, self.twins, copies=False))
        for module in attention:  # its scales, and what it derives from other layers' weights
            module.process_weights_after_loading(self.config.model_config.dtype)
        return before

    def copy_in_place(self, twins: dict[nn.Module, nn.Module]) -> None:
        """Copies the twins' weights, one module after the other, into the memory that captured
        graphs of the model know."""
        with torch.no_grad(), set_current_vllm_config(self.config):
            for live, twin in twins.items():
                move(twin, live)
                self.pack([twin])
                exchange(live, twin, self.twins, copies=True)
                # the device has room for the second set of one module
                for tensors in (twin._parameters, twin._buffers):
                    tensors.clear()
        torch.cuda.empty_cache()  # the trainer may share the device


def make_twins(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Maps every module of the model to a twin with its own tensors, laid out as before loading;
    everything else is shared, not copied."""
    twins: dict[nn.Module, nn.Module] = {}
    for live in model.modules():
        twin = twins[live] = object.__new__(type(live))
        twin.__dict__.update(live.__dict__)
        twin.__dict__.pop(PROCESSED, None)
        if "quant_method" in live.__dict__:
            twin.__dict__["quant_method"] = copy.copy(live.__dict__["quant_method"])
    tensors: dict[int, Tensor] = {}  # by the live tensor: what is tied stays tied
    for live, twin in twins.items():
        children = live._modules.items()
        twin.__dict__["_modules"] = {name: twins.get(child) for name, child in children}
        # the names before packing, and the current ones
        names = {**get_layerwise_info(live).restore_metadata[0], **live._parameters}
        parameters = {name: twin_parameter(live, twin, name, tensors) for name in names}
        twin.__dict__["_parameters"] = parameters
    for live, twin in twins.items():  # after all parameters, since a buffer may be a view of one
        buffers = {name: twin_buffer(live, name, tensors) for name in live._buffers}
        twin.__dict__["_buffers"] = buffers
    for twin in twins.values():
        method = getattr(twin, "quant_method", None)  # which may be a module of its own
        if current_platform.is_cpu() and getattr(method, "moe_kernel", None) is not None:
            # experts are packed when their kernel is made, and only then
            method.moe_kernel = None
    return twins


def twin_parameter(
    live: nn.Module, twin: nn.Module, name: str, tensors: dict[int, Tensor]
) -> Tensor | None:
    """An empty parameter as it was before loading; a copy where vLLM keeps no record (biases and
    the like are never packed)."""
    now, record = live._parameters.get(name), get_layerwise_info(live).restore_metadata[0].get(name)
    if now is not None and id(now) in tensors:
        return tensors[id(now)]
    if record is not None:
        new = restore_layer_refs(materialize_meta_tensor(record), twin)
        if not current_platform.is_cpu():
            new.data = new.data.pin_memory()  # for a fast transfer
    elif now is not None:
        new = nn.Parameter(now.detach().clone(), requires_grad=False)
        new.__class__ = type(now)
        for key, value in now.__dict__.items():
            if isinstance(value, MethodType) and value.__self__ is live:
                value = value.__func__.__get__(twin)
            new.__dict__[key] = value
    else:
        return None
    if now is not None:
        tensors[id(now)] = new
    return new


def twin_buffer(live: nn.Module, name: str, tensors: dict[int, Tensor]) -> Tensor | None:
    """A copy if a checkpoint may hold the buffer. A non-persistent view of a parameter
    (Mamba-2's convolutions) becomes the same view of the twin's parameter; other non-persistent
    buffers (rotary tables) never change and are shared."""
    now = live._buffers[name]
    if now is None:
        return None
    if name not in live._non_persistent_buffers_set:
        return tensors.setdefault(id(now), now.clone())
    if (viewed := tensors.get(id(now._base))) is None:
        return now
    return viewed.data.as_strided(now.size(), now.stride(), now.storage_offset())


def pairs_of(live: nn.Module, twin: nn.Module) -> tuple[tuple[dict, dict], ...]:
    """The parameters of both modules, and their buffers."""
    return (live._parameters, twin._parameters), (live._buffers, twin._buffers)


def move(twin: nn.Module, live: nn.Module) -> None:
    """Moves the tensors of a twin to the device of the live module's."""
    for ours, theirs in pairs_of(live, twin):
        device = next((old.device for old in ours.values() if old is not None), None)
        for tensor in theirs.values():
            if tensor is not None and device is not None:
                tensor.data = tensor.data.to(device, non_blocking=True)


def exchange(
    live: nn.Module, twin: nn.Module, twins: dict[nn.Module, nn.Module], copies: bool
) -> list[Any]:
    """Gives `live` the tensors of `twin` and everything that packing has set on it. Returns its old
    content.

    Tensor objects stay and get the new values, with `copies` in the memory that they have, so that
    other references to them, and captured graphs, see those.
    """
    before: list[Any] = []

    def put(old: Tensor, new: Tensor) -> None:
        if copies:
            old.data.copy_(new.data)
        else:
            old.data = new.data

    for ours, theirs in pairs_of(live, twin):
        for name, new in theirs.items():
            old = ours.get(name)
            if old is None or new is None:
                ours[name] = new
            elif old is not new:
                before.append(old.data)
                put(old, new)
                # its loader is a method of the twin: the cycle would keep both and these values
                # alive
                new.__dict__.clear()
    for name, child in twin._modules.items():
        old = live._modules.get(name)
        if child is not twins.get(old):  # type: ignore[arg-type]
            before.append(old)
            live._modules[name] = child
    ours = live.__dict__
    for key, value in twin.__dict__.items():
        old = ours.get(key)
        if key == "quant_method":
            before.append(dict(old.__dict__))
            old.__dict__.update(value.__dict__)
        elif key not in STRUCTURE and old is not value:
            before.append(old)
            if isinstance(value, Tensor) and isinstance(old, Tensor):
                put(old, value)
            else:
                ours[key] = value
    return before
