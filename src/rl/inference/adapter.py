"""Reads peft adapters, which runs with trainer.lora publish, checks them against the base model,
and adds them to its weights."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.inference.weight_files import (
    Tensors,
    empty_model,
    read_tensors,
    refuse_faults,
    trained_names,
    weight_files,
)
from rl.run_dir.safetensors import read_header
from rl.system.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""peft's names for the two factors of the matrix `<layer>.weight`: PREFIX + layer + A, PREFIX +
layer + B."""

PLAIN = {"peft_type": ("LORA",), "bias": ("none", None)}
ABSENT = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "modules_to_save",
    "alpha_pattern",
    "trainable_token_indices",
)
"""Settings of adapters that are more than a sum of low-rank products."""


@dataclass(frozen=True)
class Adapter:
    """The content of an adapter's folder."""

    folder: Path
    base: Path
    rank: int
    alpha: float
    root_scaled: bool
    """Scaled by alpha / sqrt(rank) (rsLoRA) instead of alpha / rank."""
    transposed: bool
    """The base holds its matrices as [in, out] (GPT-2's Conv1D)."""
    tensors: Tensors
    stacked: tuple[str, ...] = ()
    """The ends of the names of the parameters that hold one matrix for each expert."""

    @property
    def layers(self) -> list[str]:
        return sorted(
            name.removeprefix(PREFIX).removesuffix(A) for name in self.tensors if name.endswith(A)
        )

    def update(self, a: "Tensor", b: "Tensor") -> "Tensor":
        """The scaled product of two factors, [..., out, in]. alpha / rank is from "LoRA:
        Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685), alpha /
        sqrt(rank) from "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"
        (https://arxiv.org/abs/2312.03732)."""
        rank = a.shape[-2]
        return self.alpha / (rank**0.5 if self.root_scaled else rank) * (b @ a)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Reads the settings and the header of the weights. Raises RunError if they are damaged or
    not a plain LoRA."""
    try:
        fields = json.loads((folder / CONFIG).read_text())
        base, rank, alpha = (
            Path(fields["base_model_name_or_path"]),
            int(fields["r"]),
            float(fields["lora_alpha"]),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{folder / CONFIG}: not readable as the settings of a LoRA adapter: {error!r}"
        ) from None
    special = [key for key, allowed in PLAIN.items() if fields.get(key) not in allowed] + [
        key for key in ABSENT if fields.get(key)
    ]
    if special:
        found = (
            ", ".join(f"{key} = {fields[key]!r}" for key in special if key in fields)
            or f"no {special[0]}"
        )
        raise RunError(
            f"{folder / CONFIG}: {found}: only plain LoRA adapters can be served; merge it "
            "into its base with peft"
        )
    rooted, transposed = bool(fields.get("use_rslora")), bool(fields.get("fan_in_fan_out"))
    stacked = tuple(fields.get("target_parameters") or ())
    return Adapter(
        folder, base, rank, alpha, rooted, transposed, read_header(folder / WEIGHTS), stacked
    )


def layers_in_files(adapter: Adapter, base: Path, names: Iterable[str]) -> dict[str, str]:
    """The adapter's layers by the names of their matrices, among the `names` of the base's
    tensors in files."""
    layers = {f"{layer}.weight": layer for layer in adapter.layers}
    if layers.keys() <= set(names):
        return layers
    return {name: layers[own] for name, own in trained_names(base, names).items() if own in layers}


def check_adapter(adapter: Adapter, base: Path, expected: Tensors) -> None:
    """Raises RunError unless the adapter fits the model at `base`, whose tensors are `expected`;
    names at most eight faults.

    If the adapter's own base is not on this machine (the run was moved), only shapes are compared.
    """
    if adapter.base.is_dir() and not same_files(adapter.base, base):
        raise RunError(
            f"{adapter.folder} is an adapter of {adapter.base}; this server was started with {base}"
        )
    faults = [
        f"{name} is not a factor of a matrix"
        for name in adapter.tensors
        if not name.endswith((A, B))
    ]
    found = {
        name.removeprefix(PREFIX).removesuffix(B) for name in adapter.tensors if name.endswith(B)
    }
    faults += [f"{layer} has only one of its two factors" for layer in found ^ set(adapter.layers)]
    experts = ExpertUpdates(adapter, base) if adapter.stacked else None
    if experts:
        faults += experts.faults(expected)
    matrices = {
        layer: expected[name] for name, layer in layers_in_files(adapter, base, expected).items()
    }
    for layer in (found & set(adapter.layers)).difference(
        experts.layers.values() if experts else ()
    ):
        (rank, width), (height, rank_b) = (
            adapter.tensors[PREFIX + layer + end].shape for end in (A, B)
        )
        matrix = matrices.get(layer)
        if matrix is None:
            faults.append(f"{layer}.weight is not in the model")
        elif rank != rank_b or matrix.shape not in {
            (height, width),
            (width, height) if adapter.transposed else (),
        }:
            faults.append(
                f"{layer} has factors {[height, rank_b]} x {[rank, width]}, the model "
                f"{list(matrix.shape)}"
            )
    refuse_faults(adapter.folder, faults)


def same_files(one: Path, other: Path) -> bool:
    """Whether two models have the same weight files on disk: one may be a folder of links with
    another chat template."""
    return [file.resolve() for file in weight_files(one)] == [
        file.resolve() for file in weight_files(other)
    ]


def merge(
    adapter: Adapter, weights: "Iterable[tuple[str, Tensor]]", base: Path
) -> "Iterator[tuple[str, Tensor]]":
    """The `weights` of the model at `base` with the adapter added, W + scale B A; changed
    weights are float32 (the caller rounds them once)."""
    from safetensors import safe_open

    layers = layers_in_files(adapter, base, read_tensors(base))
    experts = ExpertUpdates(adapter, base) if adapter.stacked else None
    ready: dict[str, Tensor] = {}
    with safe_open(adapter.folder / WEIGHTS, framework="pt", device="cpu") as file:

        def factors(layer: str) -> "tuple[Tensor, Tensor]":
            a, b = (file.get_tensor(PREFIX + layer + end).float() for end in (A, B))
            return a, b

        for name, weight in weights:
            if experts and name in experts.sources:
                if name not in ready:
                    source = experts.sources[name]
                    ready |= experts.update(source, *factors(experts.layers[source]))
                yield name, weight.float() + ready.pop(name)
            elif name in layers:
                a, b = factors(layers[name])  # [rank, in], [out, rank]
                update = adapter.update(a, b)
                yield name, weight.float() + (update.T if adapter.transposed else update)
            else:
                yield name, weight


class ExpertUpdates:
    """The updates of an adapter for experts, whose matrices the model stacks in one parameter,
    and most files keep one by one."""

    def __init__(self, adapter: Adapter, base: Path) -> None:
        self.model = empty_model(base)
        self.adapter = adapter
        self.layers: dict[str, str] = {}
        """The adapter's layer by the parameter's name: peft wraps the module once for each
        parameter, the first innermost."""
        self.sources: dict[str, str] = {}
        """The parameter's name by that of each of its tensors in files."""
        self.shapes: dict[str, list[int]] = {}
        ends = tuple(f".{name}" for name in adapter.stacked)
        for path, module in self.model.named_modules():
            names = [
                f"{path}.{name}"
                for name, _ in module.named_parameters(recurse=False)
                if f".{path}.{name}".endswith(ends)
            ]
            self.layers |= {
                name: path + ".base_layer" * (len(names) - 1 - i) for i, name in enumerate(names)
            }
        for source in self.layers:
            found = self.in_files(source, self.model.get_parameter(source).detach())
            self.sources |= dict.fromkeys(found, source)
            self.shapes |= {name: list(tensor.shape) for name, tensor in found.items()}

    def in_files(self, name: str, tensor: "Tensor") -> "dict[str, Tensor]":
        """Divides a tensor of the model into those that its files have."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, {name: tensor})

    def update(self, source: str, a: "Tensor", b: "Tensor") -> "dict[str, Tensor]":
        """Returns the updates of a parameter's tensors. `a`: [experts * rank, in], `b`: [out,
        rank * experts], as peft stacks them."""
        module, experts = (
            self.model.get_submodule(source.rpartition(".")[0]),
            len(self.model.get_parameter(source)),
        )
        update = self.adapter.update(
            a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
        )
        return self.in_files(
            source, update.mT if getattr(module, "is_transposed", False) else update
        )

    def faults(self, expected: Tensors) -> list[str]:
        """Says which updates do not fit tensors of the model's files, `expected`."""
        known = {PREFIX + layer + A for layer in self.layers.values()}
        faults = [f"{name} is not in the adapter" for name in known - self.adapter.tensors.keys()]
        shapes = {name: list(tensor.shape) for name, tensor in expected.items()}
        return faults + [
            f"{name} has no experts' matrix for an update"
            for name, shape in self.shapes.items()
            if shapes.get(name) != shape
        ]
