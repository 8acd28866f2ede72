"""Where each byte of a policy version lies in its files, and which of them each rank holds.

This follows from names, shapes, types and placements alone, so every rank knows it without asking.
A tensor of the files is usually a contiguous part of one parameter (all of it, or one expert of
many), and FSDP cuts parameters into rows: a rank's part of the tensor is a range of its bytes,
which that rank casts, hashes and writes by itself. Only tensors that files hold in another order
than the model (transposed, or joined out of several) are gathered, one at a time, each by one rank.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl.system.errors import RunError
from rl.trainer.model import lora

PAGE = 1 << 16
"""Bytes, a multiple of the pages of any machine's memory and of any disk's blocks."""
FORMAT = b'{"__metadata__":{"format":"pt"}'
"""The beginning of the header of a file on disk, as the safetensors library writes it."""
ATEN = torch.ops.aten


@dataclass(frozen=True)
class VersionTensor:
    """A tensor of a version's files."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    """Its first byte, counted from the first byte of the first tensor; tensors follow each other
    without gaps."""
    sources: tuple[str, ...]
    """The model's parameters and buffers that it is made of."""
    offset: int | None
    """Index in its only source of its first element; None if it is no contiguous part of one
    source, and must be converted."""

    @property
    def size(self) -> int:
        """In bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Slice:
    """The bytes first..end of a tensor, which this rank holds."""

    tensor: VersionTensor
    first: int
    end: int
    element: int = 0
    """Index in this rank's part of the tensor's source of the first element."""


class Tracing(TorchDispatchMode):
    """Follows tensors on the meta device through a conversion. A contiguous copy stays a view of
    what is copied, so that strides tell how elements are ordered; `sources` has the names of the
    tensors that the content of each storage is made of."""

    def __init__(self, named: dict[str, Tensor]):
        super().__init__()
        self.named, self.seen = named, list(named.values())
        self.sources = {storage(tensor): (name,) for name, tensor in named.items()}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is ATEN.clone.default:
            return ATEN.alias(args[0])
        try:
            result = function(*args, **(kwargs or {}))
        except RuntimeError:
            if function not in (ATEN.view.default, ATEN._unsafe_view.default):
                raise
            # of what is no copy here: its elements are in another order
            result = torch.empty(args[1], dtype=args[0].dtype, device="meta")
        inputs = [
            self.sources[storage(tensor)]
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        ]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage(tensor) not in self.sources:
                self.sources[storage(tensor)] = tuple(
                    sorted({name for names in inputs for name in names})
                )
                self.seen.append(tensor)  # kept, or a later storage might get its address
        return result

    def offset(self, tensor: Tensor) -> int | None:
        """See VersionTensor.offset."""
        source = self.named[self.sources[storage(tensor)][0]]
        return (
            tensor.storage_offset()
            if storage(source) == storage(tensor) and tensor.is_contiguous()
            else None
        )


def storage(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def published(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the tensors of a version by their names in the model: parameters (a tied head
    once) and persistent buffers, or of a model with adapters these alone."""
    if lora.has_adapters(model):
        return {**lora.trainable(model)}
    persistent = model.state_dict().keys()
    return {
        **dict(model.named_parameters()),
        **{name: buffer for name, buffer in model.named_buffers() if name in persistent},
    }


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which a tensor is published: parameters in the one in which they are
    computed with, which is `dtype` unless parallel/loading.py has found another in the files.
    Buffers stay as they are, for nothing casts them: with the biases of a router in bfloat16,
    tokens would go to other experts than in the trainer."""
    return (
        getattr(tensor, "file_type", dtype)
        if tensor.is_floating_point() and isinstance(tensor, Parameter)
        else tensor.dtype
    )


@torch.no_grad()
def file_tensors(model: PreTrainedModel, dtype: torch.dtype) -> list[VersionTensor]:
    """Returns the tensors of a version's files, in their order. Raises RunError if a part of
    them cannot be converted by itself."""
    empty = {
        name: torch.empty(value.shape, dtype=dtype_of(value, dtype), device="meta")
        for name, value in published(model).items()
    }
    with Tracing(empty) as tracing:
        if lora.has_adapters(model):
            named = {lora.name_in_file(name): tensor for name, tensor in empty.items()}
        else:
            named = revert_weight_conversion(model, dict(empty))
    tensors: list[VersionTensor] = []
    end = 0
    # aligns each to its item size
    for name, tensor in sorted(named.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        sources, offset = tracing.sources[storage(tensor)], tracing.offset(tensor)
        tensors.append(VersionTensor(name, tensor.dtype, tensor.shape, end, sources, offset))
        end = tensors[-1].end
    for sources, group in converted(tensors).items():
        alone = revert_weight_conversion(model, {name: empty[name] for name in sources})
        for tensor in group:
            if tensor.name not in alone or alone[tensor.name].shape != tensor.shape:
                raise RunError(
                    f"{type(model).__name__}: {tensor.name} cannot be made of "
                    f"{', '.join(sources)} alone; please report this"
                )
    return tensors


def converted(tensors: Sequence[VersionTensor]) -> dict[tuple[str, ...], list[VersionTensor]]:
    """Returns the tensors that must be converted, by what they are made of."""
    groups = defaultdict[tuple[str, ...], list[VersionTensor]](list)
    for tensor in tensors:
        if tensor.offset is None:
            groups[tensor.sources].append(tensor)
    return groups


def runs(value: Tensor, is_main: bool) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, element) of the elements of a tensor that this rank publishes, in
    row-major order: first..end in the whole tensor are the elements from `element` on of the rank's
    own part.

    Of several replicas the first publishes; what is not distributed belongs to rank 0 (`is_main`).
    """
    whole, shape, offset = tuple(value.shape), tuple(value.shape), (0,) * value.ndim
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None or any(
            index and placement.is_replicate()
            for index, placement in zip(coordinate, placements, strict=True)
        ):
            return
        shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    elif not is_main:
        return
    if not prod(shape):
        return
    # later dimensions are whole
    last = max((dim for dim in range(value.ndim) if shape[dim] != whole[dim]), default=0)
    length = prod(shape[last:])
    for number, index in enumerate(itertools.product(*map(range, shape[:last]))):
        first = 0
        for size, start, step in itertools.zip_longest(whole, offset, index, fillvalue=0):
            first = first * size + start + step
        yield first, first + length, number * length


def own_slices(
    tensors: Sequence[VersionTensor], values: dict[str, Tensor], rank: int, size: int
) -> list[Slice]:
    """Returns what rank `rank` of `size` ranks publishes of each tensor; converted ones are
    dealt out to the ranks in turn."""
    held = {name: list(runs(value, rank == 0)) for name, value in values.items()}
    slices = []
    for tensor in tensors:
        offset, width = tensor.offset, tensor.dtype.itemsize
        for first, end, element in held[tensor.sources[0]] if offset is not None else ():
            low, high = max(first, offset), min(end, offset + tensor.shape.numel())
            if low < high:
                bounds = (low - offset) * width, (high - offset) * width
                slices.append(Slice(tensor, *bounds, element + low - first))
    for number, group in enumerate(converted(tensors).values()):
        if number % size == rank:
            slices += [Slice(tensor, 0, tensor.size) for tensor in group if tensor.size]
    return sorted(slices, key=lambda part: part.tensor.start + part.first)


@cache
def name_of(dtype: torch.dtype) -> str:
    """Returns the format's name of a type."""
    return json.loads(save({"none": torch.empty(0, dtype=dtype)})[8:])["none"]["dtype"]


def header(tensors: Sequence[VersionTensor], begins: bytes = FORMAT) -> bytes:
    """Returns what a safetensors file with these tensors has in front of them: the length of its
    JSON and the JSON, which `begins` so. Its size is whole pages, so that a byte of a version lies
    at the same place of its page in memory and on disk, as `write_pages` needs it."""
    entries = {
        tensor.name: {
            "dtype": name_of(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.end],
        }
        for tensor in tensors
    }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()[1:]
    text = begins + (b"," if entries else b"") + text
    text += b" " * ((-8 - len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text
