"""Loads a model with transformers such that each rank reads and holds only its own rows of every
matrix.

Matrices that a file stores as the model has them (same name, after transformers' renamings, and
shape), or expert by expert, are read row by row. Matrices that transformers converts in another way
(fused projections, another order of dimensions) are made whole, one parameter after the other, and
all but this rank's rows are dropped at once. `from_pretrained` itself makes everything else:
buffers, values derived from the config, tied weights.
"""

import copy
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from rl.system.errors import RunError
from rl.trainer.parallel.experts import check_experts, experts_of, placements_of
from rl.trainer.parallel.world import World

SYNCHRONOUS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable with which transformers loads in the calling thread alone, from the first
model on."""
ROUTER = re.compile(r"\b(gate|router)\.")
"""What models call the layers that choose experts."""


class LocalShards:
    """This rank's rows of the matrices of a model, which holds tensors on the meta device
    instead while FSDP shards it: FSDP takes no DTensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: dict[str, Tensor] = {}
        """The rows by the parameter's name."""

        def take(name: str, parameter: nn.Parameter) -> Tensor | None:
            if not isinstance(parameter, DTensor):
                return None
            self.rows[name] = parameter.detach().to_local()
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            # FSDP divides further what this rank's experts are
            if "expert" in (parameter.device_mesh.mesh_dim_names or ()):
                mesh = parameter.device_mesh["expert"]
                empty = distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None)
            return empty

        replace_parameters(model, take)

    def attach_shards(self, model: PreTrainedModel) -> None:
        """Gives the sharded model its rows. Raises RunError naming the parameters and buffers
        that have no values."""

        def fill(name: str, parameter: nn.Parameter) -> Tensor | None:
            if name not in self.rows:
                return None
            assert isinstance(parameter, DTensor)
            layout = (parameter.device_mesh, parameter.placements)
            return dtensor(self.rows.pop(name), *layout, parameter.shape)

        replace_parameters(model, fill)
        tensors = (*model.named_parameters(), *model.named_buffers())
        if empty := [*(name for name, tensor in tensors if tensor.is_meta), *self.rows]:
            raise RunError(
                f"{type(model).__name__}: {', '.join(empty)} got no values from its files; "
                "please report this"
            )


def replace_parameters(
    model: nn.Module, new_of: Callable[[str, nn.Parameter], Tensor | None]
) -> None:
    """Replaces the parameters of which `new_of` gives another tensor; one that is used in several
    places remains a single one."""
    for name, parameter in list(model.named_parameters()):
        if (value := new_of(name, parameter)) is None:
            continue
        new = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for module in model.modules():
            for leaf, other in list(module._parameters.items()):
                if other is parameter:
                    setattr(module, leaf, new)


def dtensor(
    rows: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """Returns the tensor of `shape` of which this rank has `rows`, on the device of the mesh."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def load_rows(folder: str | Path, world: World | None, **arguments: Any) -> PreTrainedModel:
    """Returns the causal language model of `folder`, made by `from_pretrained` with `arguments`;
    its matrices are DTensors, cut by rows. Without a world it is whole.

    Needs memory for these rows and one tensor. Every rank calls this. Raises RunError for
    parameters and buffers that are missing from the files.
    """
    reader = Reader(world)
    with reader.in_transformers():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **arguments
        )
    for name in reader.kept:
        model.get_parameter(name).file_type = torch.float32  # see image.dtype_of
    # those of a model that was read whole
    for experts in experts_of(model).values() if world and world.experts else ():
        for leaf, parameter in list(experts.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                setattr(experts, leaf, reader.rows_of(experts, parameter))
    model.unused = few(report["unexpected_keys"])
    refuse_missing(model, report["missing_keys"])
    if reader.whole and world and world.is_main:
        size = sum(parameter.nbytes for parameter in model.parameters()) / 2**30
        print(
            f"{folder}: each rank reads the whole model, {size:.2f} GiB, because {reader.whole}",
            flush=True,
        )
    return model


def few(names: Collection[str]) -> str:
    """Returns the first five names in their order, and how many others there are."""
    others = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + others


def refuse_missing(model: PreTrainedModel, names: Collection[str]) -> None:
    """Raises RunError for tensors that the files of a model lack, if there are any."""
    if names:
        raise RunError(
            f"{model.name_or_path}: its files lack {few(names)}, which {type(model).__name__} "
            "needs; are they complete, and of this model?"
        )


class Reader:
    """Reads the files of one model row by row where possible."""

    def __init__(self, world: World | None) -> None:
        self.world = world
        self.kept: list[str] = []
        """Parameters that stay in float32, as files have them that are in another type else:
        routers, and what is no layer's weight, such as rates of state spaces. Rounded, a router
        sends tokens to other experts. They are small, so each rank holds them whole."""
        self.whole = "its class has its own way of loading"
        """The reason why the model is read whole; empty if it is not."""

    @contextmanager
    def in_transformers(self) -> Iterator[None]:
        """Context in which `from_pretrained` uses this reader."""
        original = PreTrainedModel._load_pretrained_model

        def load(
            model: PreTrainedModel,
            state_dict: None,
            files: list[str],
            settings: Any,
            **options: Any,
        ) -> Any:
            if self.world:
                check_experts(model, self.world)
            self.whole = why_whole(model, settings)
            with ExitStack() as opened:
                if not self.whole:
                    # Files are read, not mapped, because mapped pages count as this process's
                    # memory, once for each rank.
                    handles = [
                        opened.enter_context(safe_open(file, "pt", device="cpu", backend="pread"))
                        for file in files
                    ]
                    state_dict = {
                        name: handle.get_slice(name)
                        for handle in handles
                        for name in handle.keys()  # noqa: SIM118
                    }
                    self.place_rows(model, state_dict, settings.weight_mapping or [])
                    if self.world:
                        opened.enter_context(self.keeping_rows(model))
                return original(model, state_dict, files, settings, **options)

        with patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load)):
            yield

    def place_rows(self, model: PreTrainedModel, slices: dict[str, Any], rules: list[Any]) -> None:
        """Replaces matrices of the model (on the meta device) that a file stores as such by
        DTensors: transformers reads their rows. Raises RunError if the files lack the head."""
        rules = copy.deepcopy(rules)  # some remember what they have seen
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
        head, known = model.get_output_embeddings(), set[str]()
        of_head = {name for name in parameters if head and parameters[name] is head.weight}
        stacked: dict[str, list[list[int]]] = defaultdict(list)
        mixed = len({stored.get_dtype() for stored in slices.values()}) > 1
        for key in sorted(slices, key=dot_natural_key):
            prefix, shape = model.base_model_prefix, slices[key].get_shape()
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            known.add(name)
            if name not in parameters:
                continue
            module, parameter = model.get_submodule(name.rpartition(".")[0]), parameters[name]
            if pattern and self.world:
                rule = next(rule for rule in converters if pattern in rule.source_patterns)
                stacked[name].append(shape)
                if self.stacks_rows(rule, module, parameter, stacked[name]):
                    self.place(module, name, parameter)
            elif list(parameter.shape) == shape:
                self.place(module, name, parameter, mixed and slices[key].get_dtype() == "F32")
        # what is tied, transformers knows: a model's config and that of its text may differ in it
        if known.isdisjoint(of_head) and of_head.isdisjoint(model.all_tied_weights_keys):
            refuse_missing(model, of_head)

    def place(
        self, module: nn.Module, name: str, parameter: nn.Parameter, in_float32: bool = False
    ) -> None:
        """Replaces a matrix on the meta device by a DTensor, and what stays in float32 by a
        parameter of that type."""
        leaf, is_layer = name.rpartition(".")[2], not [*module.children()]
        is_router = ROUTER.search(name) or not is_layer
        if in_float32 and is_router and not hasattr(module, "_is_expert_parallel"):
            self.kept.append(name)
            setattr(module, leaf, nn.Parameter(parameter.float()))
            if is_layer:  # it may not take a weight of another type than its inputs
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
        elif parameter.ndim >= 2 and self.world:
            rows = self.rows_of(module, parameter)
            # transformers decides by type whether a parameter has a gradient, whatever its class
            # has set.
            setattr(module, leaf, rows.requires_grad_(rows.is_floating_point()))

    def stacks_rows(
        self,
        rule: WeightConverter,
        module: nn.Module,
        parameter: nn.Parameter,
        shapes: list[list[int]],
    ) -> bool:
        """Whether a rule builds a parameter from exactly these tensors, one per row (experts),
        and every rank has rows: transformers then reads only this rank's tensors."""
        kinds = [
            (type(operation), getattr(operation, "dim", None)) for operation in rule.operations
        ]
        rows, sources = parameter.shape[0], len(rule.source_patterns)
        ranks = self.world.mesh.size(-1)
        by_rows = not any(placement.is_shard(1) for placement in self.layout(module, parameter)[1])
        return (
            len(shapes) == rows * sources
            and kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
            and len(rule.target_patterns) == 1
            and all(len(shape) == parameter.ndim - 1 for shape in shapes)
            and (-(-rows // ranks) * (ranks - 1) < rows if by_rows else sources == 1)
        )

    @contextmanager
    def keeping_rows(self, model: PreTrainedModel) -> Iterator[None]:
        """Context in which a matrix that is loaded whole is cut to its rows when it is set on a
        module, one matrix after the other."""
        names = {module: name for name, module in model.named_modules()}

        def keep(module: nn.Module, leaf: str, parameter: nn.Parameter) -> nn.Parameter | None:
            # parameters missing from the files are initialised whole
            loaded = getattr(parameter, "_is_hf_initialized", False)
            cut = isinstance(parameter, DTensor) or parameter.ndim < 2
            if not loaded or cut or f"{names.get(module)}.{leaf}" in self.kept:
                return None
            rows = self.rows_of(module, parameter)
            rows._is_hf_initialized = True
            return rows

        handle = register_module_parameter_registration_hook(keep)
        os.environ[SYNCHRONOUS] = "1"
        try:
            yield
        finally:
            handle.remove()

    def layout(
        self, module: nn.Module, parameter: nn.Parameter
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Returns how FSDP will place a parameter of `module`."""
        if self.world.experts and experts_of(module):
            return self.world.experts, placements_of(parameter, self.world.experts)
        return self.world.mesh, (Replicate(),) * (self.world.mesh.ndim - 1) + (Shard(0),)

    def rows_of(self, module: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the matrix as a DTensor with a copy of this rank's rows."""
        mesh, placements = self.layout(module, parameter)
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        index = tuple(
            slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)
        )
        rows = parameter.detach()[index].clone(memory_format=torch.contiguous_format)
        value = dtensor(rows, mesh, placements, parameter.shape)
        return nn.Parameter(value, requires_grad=parameter.requires_grad)


def why_whole(model: PreTrainedModel, settings: Any) -> str:
    """Returns why a model cannot be read row by row; empty if it can."""
    if settings.hf_quantizer is not None:
        return "its files are quantised"
    if model.is_custom_code():
        return "its code came with it (model.trust_remote_code)"
    # the code that initialises missing parameters may change a loaded embedding, too (Youtu's does,
    # at the padding token)
    loaded = nn.Embedding.from_pretrained(torch.ones(2, 1), freeze=False, padding_idx=0)
    loaded.weight._is_hf_initialized = True  # type: ignore[assignment]
    try:
        model.base_model._init_weights(loaded)
    except AttributeError:  # it expects its own class of embedding, so this cannot be tested
        loaded.weight.data.zero_()
    return "its class changes embeddings after they are loaded" * bool((loaded.weight != 1).any())
