"""Checks by their headers that weight files are whole and fit the model, before anything is
changed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
