"""Loads a model's tokenizer and chat template with transformers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rl.system.functions import Blame


def hide_torch() -> None:
    """Keeps transformers from importing torch in a process that needs only a tokenizer: that saves
    5 s of CPU and 0.7 GB.

    A model's own code may need torch.
    """
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]


def load_tokenizer(model_path: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the model folder `model_path`. Raises RunError if it cannot be loaded,
    e.g. because a package is missing."""
    from transformers import AutoTokenizer

    needs = (
        "if this names a package, add it: orchestrator.environment.requirements = "
        '["sentencepiece"]; else copy the model again'
    )
    with Blame(f"the tokenizer of {model_path} cannot be loaded: transformers", needs):
        return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a plain text with nothing before it. They begin with the BOS token if the
    tokenizer adds one, as texts did in pretraining; other tokens that it adds, such as EOS at
    the end, are left out."""
    ids, bos = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids


def named_ends(folder: Path) -> list[int | None]:
    """The tokens at which programs that read a model's files stop: those of
    generation_config.json, or if it has none of config.json."""
    fields: dict[str, Any] = {}
    for file in (folder / "config.json", folder / "generation_config.json"):
        fields |= json.loads(file.read_bytes()) if file.is_file() else {}
    ids = fields.get("eos_token_id")
    return ids if isinstance(ids, list) else [ids]


def without_row(tokenizer: Any, ids: list[int], rows: int) -> str:
    """Names a token for which the model's embedding, of `rows` rows if they are known, has none,
    and the remedy; empty if there is none."""
    largest = max(ids, default=0)
    if not 0 < rows <= largest:
        return ""
    remedy = "give it one (transformers: resize_token_embeddings), or leave the token out"
    return (
        f"{tokenizer.convert_ids_to_tokens(largest)!r} is token {largest}, the model's embedding "
        f"has {rows} rows; {remedy}"
    )
