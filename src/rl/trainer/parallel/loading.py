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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
from rl.trainer.parallel.experts import experts_of, placements_of
from rl.trainer.parallel.world import World

GIB = 1024**3
ROUTER = re.compile(r"\b(gate|router)\.")
"""What models call the layers that choose experts."""


class LocalShards:
    """This rank's rows of the matrices of a model, which holds tensors on the meta device
    instead while FSDP shards it: FSDP takes no DTensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.rows: dict[str, Tensor] = {}
        """The rows by the parameter's name."""
        names = {parameter: name for name, parameter in model.named_parameters()}

        def take(parameter: nn.Parameter) -> nn.Parameter:
            if not isinstance(parameter, DTensor):
                return parameter
            self.rows[names[parameter]] = parameter.detach().to_local()
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            # FSDP divides further what this rank's experts are
            if "expert" in (parameter.device_mesh.mesh_dim_names or ()):
                empty = distribute_tensor(
                    empty, parameter.device_mesh["expert"], [Shard(0)], src_data_rank=None
                )
            return nn.Parameter(empty, requires_grad=parameter.requires_grad)

        replace_parameters(model, take)

    def attach_shards(self, model: PreTrainedModel) -> None:
        """Gives the sharded model its rows. Raises RunError naming the parameters and buffers
        that have no values."""
        names = {parameter: name for name, parameter in model.named_parameters()}

        def fill(parameter: nn.Parameter) -> nn.Parameter:
            if names[parameter] not in self.rows:
                return parameter
            assert isinstance(parameter, DTensor)
            rows = self.rows.pop(names[parameter])
            value = dtensor(rows, parameter.device_mesh, parameter.placements, parameter.shape)
            return nn.Parameter(value, requires_grad=parameter.requires_grad)

        replace_parameters(model, fill)
        tensors = (*model.named_parameters(), *model.named_buffers())
        if empty := [*(name for name, tensor in tensors if tensor.is_meta), *self.rows]:
            raise RunError(
                f"{type(model).__name__}: {', '.join(empty)} got no values from its files; "
                "please report this"
            )


def replace_parameters(model: nn.Module, new_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replaces each parameter by `new_of` it; a parameter that is used in several places remains
    a single one."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in replaced:
                replaced[parameter] = new_of(parameter)
            if replaced[parameter] is not parameter:
                setattr(module, name, replaced[parameter])


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
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **arguments
        )
    for name in reader.kept:
        model.get_parameter(name).file_type = torch.float32  # see layout.dtype_of
    # those of a model that was read whole
    for experts in experts_of(model).values() if world and world.experts else ():
        for leaf, parameter in list(experts.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):
                setattr(
                    experts,
                    leaf,
                    nn.Parameter(
                        reader.rows_of(experts, parameter), requires_grad=parameter.requires_grad
                    ),
                )
    if missing := sorted(found["missing_keys"]):
        few = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise RunError(
            f"{folder}: its files lack {few}, which {type(model).__name__} needs; are they "
            "complete, and of this model?"
        )
    if world and world.is_main and (note := reader.note(model)):
        print(f"{folder}: {note}", flush=True)
    return model


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
        self.converted: dict[str, int] = {}
        """Bytes of the parameters that were made whole, by name."""

    @contextmanager
    def in_transformers(self) -> Iterator[None]:
        """Context in which `from_pretrained` uses this reader."""
        original = PreTrainedModel._load_pretrained_model

        def load(
            model: PreTrainedModel, state_dict: None, files: list[str], settings: Any, **more: Any
        ) -> Any:
            with ExitStack() as opened:
                self.whole = why_whole(model, settings)
                if not self.whole:
                    state_dict = {
                        name: part for file in files for name, part in slices(opened, file)
                    }
                    self.place_rows(model, state_dict, settings.weight_mapping or [])
                    if self.world:
                        opened.enter_context(self.keeping_rows(model))
                return original(model, state_dict, files, settings, **more)

        PreTrainedModel._load_pretrained_model = staticmethod(load)
        try:
            yield
        finally:
            PreTrainedModel._load_pretrained_model = staticmethod(original)

    def place_rows(self, model: PreTrainedModel, parts: dict[str, Any], mapping: list[Any]) -> None:
        """Replaces matrices of the model (on the meta device) that a file stores as such by
        DTensors: transformers reads their rows."""
        mapping = copy.deepcopy(mapping)  # some rules remember what they have seen
        renamings, converters = (
            [rule for rule in mapping if isinstance(rule, kind)]
            for kind in (WeightRenaming, WeightConverter)
        )
        state, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
        stacked: dict[str, list[list[int]]] = defaultdict(list)
        mixed = len({part.get_dtype() for part in parts.values()}) > 1
        for key in sorted(parts, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, model.base_model_prefix, state
            )
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
            if name in parameters and pattern and self.world:
                rule = next(rule for rule in converters if pattern in rule.source_patterns)
                stacked[name].append(parts[key].get_shape())
                module = model.get_submodule(name.rpartition(".")[0])
                if self.stacks_rows(rule, module, parameters[name], stacked[name]):
                    self.place(model, name, parameters[name])
            elif name in parameters and list(parameters[name].shape) == parts[key].get_shape():
                self.place(model, name, parameters[name], mixed and parts[key].get_dtype() == "F32")

    def place(
        self, model: PreTrainedModel, name: str, parameter: nn.Parameter, in_float32: bool = False
    ) -> None:
        """Replaces a matrix on the meta device by a DTensor, and what stays in float32 by a
        parameter of that type."""
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        is_layer = not [*module.children()]
        if (
            in_float32
            and (ROUTER.search(name) or not is_layer)
            and not hasattr(module, "_is_expert_parallel")
        ):
            self.kept.append(name)
            setattr(module, leaf, nn.Parameter(parameter.float()))
            if is_layer:  # it may not take a weight of another type than its inputs
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))
        elif parameter.ndim >= 2 and self.world:
            value = self.rows_of(module, parameter)
            # transformers decides by type whether a parameter has a gradient, whatever its class
            # has set.
            setattr(module, leaf, nn.Parameter(value, requires_grad=value.is_floating_point()))

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
        rows, sources, ranks = (
            parameter.shape[0],
            len(rule.source_patterns),
            self.world.mesh.size(-1),
        )
        _, placements = self.layout(module, parameter)
        by_rows = not any(placement.is_shard(1) for placement in placements)
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
            name = f"{names.get(module)}.{leaf}"
            if (
                not loaded
                or isinstance(parameter, DTensor)
                or parameter.ndim < 2
                or name in self.kept
            ):
                return None
            self.converted[name] = parameter.nbytes
            rows = nn.Parameter(
                self.rows_of(module, parameter), requires_grad=parameter.requires_grad
            )
            rows._is_hf_initialized = True
            return rows

        before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        handle = register_module_parameter_registration_hook(keep)
        try:
            yield
        finally:
            handle.remove()
            os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD")
            if before is not None:
                os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before

    def layout(
        self, module: nn.Module, parameter: nn.Parameter
    ) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Returns how FSDP will place a parameter of `module`."""
        if self.world.experts and experts_of(module):
            return self.world.experts, placements_of(parameter, self.world.experts)
        return self.world.mesh, (Replicate(),) * (self.world.mesh.ndim - 1) + (Shard(0),)

    def rows_of(self, module: nn.Module, parameter: nn.Parameter) -> DTensor:
        """Returns the matrix as a DTensor with a copy of this rank's rows."""
        mesh, placements = self.layout(module, parameter)
        sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        own = tuple(
            slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
        )
        return dtensor(
            parameter.detach()[own].clone(memory_format=torch.contiguous_format),
            mesh,
            placements,
            parameter.shape,
        )

    def note(self, model: PreTrainedModel) -> str:
        """Describes what was not read row by row and its memory; empty if everything was."""
        if self.whole:
            size = sum(parameter.nbytes for parameter in model.parameters()) / GIB
            return f"each rank reads the whole model, {size:.2f} GiB, because {self.whole}"
        if self.converted:
            largest, count = max(self.converted.values()) / GIB, len(self.converted)
            return (
                f"each rank loads {count} whole matrices, one after the other, and keeps its "
                f"rows; the largest has {largest:.2f} GiB"
            )
        return ""


def why_whole(model: PreTrainedModel, settings: Any) -> str:
    """Returns why a model cannot be read row by row; empty if it can."""
    if settings.hf_quantizer is not None:
        return "its files are quantised"
    if model.is_custom_code():
        return "its code came with it (model.trust_remote_code)"
    if changes_loaded_embeddings(model):
        return "its class changes embeddings after they are loaded"
    return ""


def changes_loaded_embeddings(model: PreTrainedModel) -> bool:
    """Whether the code that initialises missing parameters also changes a loaded embedding
    (Youtu's does, at the padding token)."""
    loaded = nn.Embedding.from_pretrained(torch.ones(2, 1), freeze=False, padding_idx=0)
    loaded.weight._is_hf_initialized = True  # type: ignore[assignment]
    try:
        model.base_model._init_weights(loaded)
    except AttributeError:  # it expects its own class of embedding, so this cannot be tested
        return True
    return bool((loaded.weight != 1).any())


def slices(opened: ExitStack, file: str) -> list[tuple[str, Any]]:
    """Returns (name, reader of any part) for the tensors of a safetensors file, which stays open as
    long as `opened`.

    Files are read, not mapped, because mapped pages count as this process's memory, once for each
    rank.
    """
    handle = opened.enter_context(safe_open(file, framework="pt", device="cpu", backend="pread"))
    return [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118
