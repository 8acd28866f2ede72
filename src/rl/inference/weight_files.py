"""The files of policy versions: whole models, and the peft adapters that runs with trainer.lora
publish. Their headers are checked before anything is changed; adapters are added to the weights of
their base."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.run_dir.safetensors import TensorEntry, model_files, read_header
from rl.system.errors import RESTART, RunError

FLOATS = {"BF16", "F16", "F32"}
"""Types of weights that loading can convert between."""
MOST_FAULTS = 8

Tensors = dict[str, TensorEntry]
"""Tensors by name."""


class WeightsGoneError(RunError):
    """The weights do not exist, or the trainer has replaced or deleted them; nothing is damaged.
    Caught by the route that loads them, which answers 404 instead of 422."""

    exit_code = RESTART


def weight_files(directory: Path) -> list[Path]:
    """As `model_files`, for what another process may delete. Raises RunError."""
    if not directory.exists():
        raise WeightsGoneError(f"{directory}: no such directory")
    return model_files(directory)


def read_tensors(directory: Path) -> Tensors:
    """All tensors of a model directory. Raises RunError if a file is not whole."""
    headers = map(read_header, weight_files(directory))
    return {name: tensor for header in headers for name, tensor in header.items()}


def empty_model(base: Path) -> Any:
    """The model that is trained of the one in `base`, as the trainer makes it, without values.
    Raises ValueError, OSError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def trained_names(base: Path, names: Iterable[str]) -> dict[str, str]:
    """The trained model's name of each of its tensors in files, by the name there: GPT-2's files
    leave out a prefix, Qwen3.5's add one, and some hold what is not trained, such as masks, drafts,
    and what sees images. All names, if the model's own code would have to run.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    try:
        model = empty_model(base)
    except (ValueError, OSError):
        return {name: name for name in names}
    rules, state = get_model_conversion_mapping(model), model.state_dict()
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    trained = {}
    for name in names:
        renamed, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if renamed in state:
            trained[name] = name if converter else renamed
    return trained


def check_weights(
    directory: Path, base: Path, expected: Tensors, tied: bool, tensors: Tensors | None = None
) -> None:
    """Raises RunError unless `directory` holds exactly the tensors of the served model, `expected`
    in the files of `base`, that are trained; names at most eight faults. `tensors`: its tensors,
    if they are known.

    With a tied head, the head itself (`lm_head.weight`) is optional.
    """
    tensors = read_tensors(directory) if tensors is None else tensors
    optional = {"lm_head.weight"} if tied else set()
    if (expected.keys() ^ tensors.keys()) - optional:
        names = trained_names(base, expected.keys() | tensors.keys())
        expected = {names[name]: tensor for name, tensor in expected.items() if name in names}
        tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    faults = [f"{name} is missing" for name in expected.keys() - tensors.keys() - optional]
    unknown = tensors.keys() - expected.keys() - optional
    faults += [f"{name} is not in the model" for name in unknown]
    for name in expected.keys() & tensors.keys():
        tensor, wanted = tensors[name], expected[name]
        if tensor.shape != wanted.shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, the model {list(wanted.shape)}")
        if tensor.dtype != wanted.dtype and not {tensor.dtype, wanted.dtype} <= FLOATS:
            faults.append(f"{name} is {tensor.dtype}, the model's {wanted.dtype}")
    refuse_faults(directory, faults)


def refuse_faults(directory: Path, faults: list[str]) -> None:
    """Raises RunError if there are faults; names at most eight."""
    if faults:
        rest = len(faults) - MOST_FAULTS
        names = "; ".join(sorted(faults)[:MOST_FAULTS]) + (f" and {rest} more" if rest > 0 else "")
        raise RunError(f"{directory} does not fit the served model: {names}")


if TYPE_CHECKING:
    from torch import Tensor


# Adapters -----------------------------------------------------------------------------------------


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
    path = folder / CONFIG
    try:
        fields = json.loads(path.read_text())
        base, rank = Path(fields["base_model_name_or_path"]), int(fields["r"])
        alpha = float(fields["lora_alpha"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}: not readable as the settings of a LoRA adapter: {error!r}"
        ) from None
    special = {
        key: fields.get(key) for key, allowed in PLAIN.items() if fields.get(key) not in allowed
    }
    special |= {key: fields[key] for key in ABSENT if fields.get(key)}
    if special:
        shown = ", ".join(f"{key} = {value!r}" for key, value in special.items())
        raise RunError(
            f"{path}: {shown}: only plain LoRA adapters can be served; merge it into its base "
            "with peft"
        )
    return Adapter(
        folder,
        base,
        rank,
        alpha,
        bool(fields.get("use_rslora")),
        bool(fields.get("fan_in_fan_out")),
        read_header(folder / WEIGHTS),
        tuple(fields.get("target_parameters") or ()),
    )


def layers_in_files(adapter: Adapter, base: Path, names: Iterable[str]) -> dict[str, str]:
    """The adapter's layers by the names of their matrices, among the `names` of the base's
    tensors in files."""
    layers = {f"{layer}.weight": layer for layer in adapter.layers}
    if layers.keys() <= set(names):
        return layers
    trained = trained_names(base, names).items()
    return {name: layers[ours] for name, ours in trained if ours in layers}


def check_adapter(adapter: Adapter, base: Path, expected: Tensors) -> None:
    """Raises RunError unless the adapter fits the model at `base`, whose tensors are `expected`;
    names at most eight faults.

    If the adapter's own base is not on this machine (the run was moved), only shapes are compared.
    """
    if adapter.base.is_dir() and not same_files(adapter.base, base):
        raise RunError(
            f"{adapter.folder} is an adapter of {adapter.base}; this server was started with {base}"
        )
    tensors, experts = adapter.tensors, ExpertUpdates(adapter, base) if adapter.stacked else None
    others = [name for name in tensors if not name.endswith((A, B))]
    faults = [f"{name} is not a factor of a matrix" for name in others]
    with_b = {name.removeprefix(PREFIX).removesuffix(B) for name in tensors if name.endswith(B)}
    with_a = set(adapter.layers)
    faults += [f"{layer} has only one of its two factors" for layer in with_b ^ with_a]
    if experts:
        faults += experts.faults(expected)
    names = {layer: name for name, layer in layers_in_files(adapter, base, expected).items()}
    for layer in (with_b & with_a).difference(experts.layers.values() if experts else ()):
        (rank, width), (height, rank_b) = (tensors[PREFIX + layer + end].shape for end in (A, B))
        shapes = {(height, width), (width, height) if adapter.transposed else ()}
        if layer not in names:
            faults.append(f"{layer}.weight is not in the model")
        elif rank != rank_b or expected[names[layer]].shape not in shapes:
            faults.append(
                f"{layer} has factors {[height, rank_b]} x {[rank, width]}, the model "
                f"{list(expected[names[layer]].shape)}"
            )
    refuse_faults(adapter.folder, faults)


def same_files(model: Path, other: Path) -> bool:
    """Whether two models have the same weight files on disk: one may be a folder of links with
    another chat template."""
    ours, theirs = ([file.resolve() for file in weight_files(path)] for path in (model, other))
    return ours == theirs


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
                weight = weight.float() + ready.pop(name)
            elif name in layers:
                update = adapter.update(*factors(layers[name]))  # [rank, in], [out, rank]
                weight = weight.float() + (update.T if adapter.transposed else update)
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
            names = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            stacked = [name for name in names if f".{name}".endswith(ends)]
            for depth, name in enumerate(reversed(stacked)):
                self.layers[name] = path + ".base_layer" * depth
        for source in self.layers:
            tensors = self.in_files(source, self.model.get_parameter(source).detach())
            self.sources |= dict.fromkeys(tensors, source)
            self.shapes |= {name: list(tensor.shape) for name, tensor in tensors.items()}

    def in_files(self, name: str, tensor: "Tensor") -> "dict[str, Tensor]":
        """Divides a tensor of the model into those that its files have."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.model, {name: tensor})

    def update(self, source: str, a: "Tensor", b: "Tensor") -> "dict[str, Tensor]":
        """Returns the updates of a parameter's tensors. `a`: [experts * rank, in], `b`: [out,
        rank * experts], as peft stacks them."""
        module = self.model.get_submodule(source.rpartition(".")[0])
        experts = len(self.model.get_parameter(source))
        a, b = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)
        update = self.adapter.update(a, b)
        is_transposed = getattr(module, "is_transposed", False)
        return self.in_files(source, update.mT if is_transposed else update)

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
