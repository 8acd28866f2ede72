"""Loads a model's tokenizer and chat template with transformers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rl.system.errors import RunError
from rl.system.functions import Blame


def hide_torch() -> None:
    """Keeps transformers from importing torch in a process that needs only a tokenizer: that saves 5 s of CPU and 0.7 GB.

    A model's own code may need torch.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model folder `model_path`. Raises RunError if it cannot be loaded, e.g. because a package is missing."""
    from transformers import AutoTokenizer

    needs = 'if this names a package, add it: orchestrator.environment.requirements = ["sentencepiece"]; else copy the model again'
    with Blame(f"the tokenizer of {model_path} cannot be loaded: transformers", needs):
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a plain text with nothing before it. They begin with the BOS token if the tokenizer adds one, as texts did in pretraining;
    other tokens that it adds, such as EOS at the end, are left out."""
    ids, bos = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def read_json(path: Path, remedy: str = "copy the model again") -> dict[str, Any]:
    """The object in a JSON file. Raises RunError whose message ends with the remedy."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: not readable as JSON ({error}); {remedy}") from None
    if not isinstance(fields, dict):
        raise RunError(f"{path}: expected a JSON object, not {type(fields).__name__}; {remedy}")
    return fields


def generation_ends(folder: Path) -> list[int]:
    """The tokens at which other programs stop an answer: those of generation_config.json, or if it names none of config.json."""
    files = (folder / "generation_config.json", folder / "config.json")
    named = (read_json(file).get("eos_token_id") for file in files if file.is_file())
    found = next((ids for ids in named if ids is not None), [])
    return found if isinstance(found, list) else [found]
