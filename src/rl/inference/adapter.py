"""Reads peft adapters, which runs with trainer.lora publish, checks them against the base model, and adds them to its weights."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl.inference.weight_files import Tensors, refuse_faults, weight_files
from rl.run_dir.safetensors import read_header
from rl.system.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""peft's names for the two factors of the matrix `<layer>.weight`: PREFIX + layer + A, PREFIX + layer + B."""

PLAIN = {"peft_type": ("LORA",), "bias": ("none", None)}
ABSENT = ("use_dora", "use_qalora", "use_bdlora", "modules_to_save", "alpha_pattern", "target_parameters", "trainable_token_indices")
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

    @property
    def layers(self) -> list[str]:
        return sorted(name.removeprefix(PREFIX).removesuffix(A) for name in self.tensors if name.endswith(A))


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Reads the settings and the header of the weights. Raises RunError if they are damaged or not a plain LoRA."""
    try:
        fields = json.loads((folder / CONFIG).read_text())
        base, rank, alpha = Path(fields["base_model_name_or_path"]), int(fields["r"]), float(fields["lora_alpha"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / CONFIG}: not readable as the settings of a LoRA adapter: {error!r}") from None
    special = [key for key, allowed in PLAIN.items() if fields.get(key) not in allowed] + [key for key in ABSENT if fields.get(key)]
    if special:
        found = ", ".join(f"{key} = {fields[key]!r}" for key in special if key in fields) or f"no {special[0]}"
        raise RunError(f"{folder / CONFIG}: {found}: only plain LoRA adapters can be served; merge it into its base with peft")
    rooted, transposed = bool(fields.get("use_rslora")), bool(fields.get("fan_in_fan_out"))
    return Adapter(folder, base, rank, alpha, rooted, transposed, read_header(folder / WEIGHTS))


def check_adapter(adapter: Adapter, base: Path, expected: Tensors) -> None:
    """Raises RunError unless the adapter fits the model at `base`, whose tensors are `expected`; names at most eight faults.

    If the adapter's own base is not on this machine (the run was moved), only shapes are compared.
    """
    if adapter.base.is_dir() and not same_files(adapter.base, base):
        raise RunError(f"{adapter.folder} is an adapter of {adapter.base}; this server was started with {base}")
    faults = [f"{name} is not a factor of a matrix" for name in adapter.tensors if not name.endswith((A, B))]
    found = {name.removeprefix(PREFIX).removesuffix(B) for name in adapter.tensors if name.endswith(B)}
    faults += [f"{layer} has only one of its two factors" for layer in found ^ set(adapter.layers)]
    for layer in found & set(adapter.layers):
        (rank, width), (height, rank_b) = (adapter.tensors[PREFIX + layer + end].shape for end in (A, B))
        matrix = expected.get(f"{layer}.weight")
        if matrix is None:
            faults.append(f"{layer}.weight is not in the model")
        elif rank != rank_b or matrix.shape not in {(height, width), (width, height) if adapter.transposed else ()}:
            faults.append(f"{layer} has factors {[height, rank_b]} x {[rank, width]}, the model {list(matrix.shape)}")
    refuse_faults(adapter.folder, faults)


def same_files(one: Path, other: Path) -> bool:
    """Whether two models have the same weight files on disk: one may be a folder of links with another chat template."""
    return [file.resolve() for file in weight_files(one)] == [file.resolve() for file in weight_files(other)]


def merge(adapter: Adapter, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
    """The base's `weights` with the adapter added, W + scale B A; changed weights are float32 (the caller rounds them once).

    "LoRA: Low-Rank Adaptation of Large Language Models" (https://arxiv.org/abs/2106.09685): scale = alpha / rank; alpha / sqrt(rank) in
    "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA" (https://arxiv.org/abs/2312.03732).
    """
    from safetensors import safe_open

    layers = {f"{layer}.weight": layer for layer in adapter.layers}
    with safe_open(adapter.folder / WEIGHTS, framework="pt", device="cpu") as factors:
        for name, weight in weights:
            if name not in layers:
                yield name, weight
                continue
            a, b = (factors.get_tensor(PREFIX + layers[name] + end).float() for end in (A, B))  # [rank, in], [out, rank]
            scale = adapter.alpha / (a.shape[0] ** 0.5 if adapter.root_scaled else a.shape[0])
            update = scale * (b @ a)
            yield name, weight.float() + (update.T if adapter.transposed else update)
