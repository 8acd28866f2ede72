"""Where the answers of a model end, for programs that do not render its chat template: vLLM's own routes, and who loads its files."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from rl.config.run import RendererConfig
from rl.models.chat import RendererError
from rl.models.folder import has_tokenizer
from rl.models.renderer import build
from rl.models.template import Renderer
from rl.models.tokenizer import generation_ends, load_tokenizer, read_json

KEYS = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
}
"""The files that say where answers end -> their key."""


def end_ids(tokenizer: Any) -> list[int]:
    """The tokens at which answers end; the first is that of the chat template, if there is one."""
    try:
        return build(tokenizer, RendererConfig(), "template").stop_token_ids
    except RendererError:  # there is none, or one that does not render our probes
        return Renderer(tokenizer).stop_token_ids


@cache
def unnamed_ends(base: Path, trusted: bool) -> dict[str, Any]:
    """The values of KEYS for a model whose files do not name the end of its template, with which it is trained; empty if they do."""
    if not has_tokenizer(base):
        return {}
    tokenizer = load_tokenizer(str(base), trust_remote_code=trusted)
    ids = end_ids(tokenizer)
    if not ids or ids[0] in generation_ends(base):
        return {}
    return {"eos_token_id": ids, "eos_token": tokenizer.convert_ids_to_tokens(ids[0])}


def write_ends(base: Path, folder: Path, trusted: bool) -> None:
    """Has the files of `folder`, copies of those of `base`, name the end of its template: other programs stop nowhere else."""
    ends = unnamed_ends(base, trusted)
    for name, key in KEYS.items() if ends else ():
        if (file := folder / name).is_file():
            file.write_text(json.dumps(read_json(file) | {key: ends[key]}, indent=2) + "\n")
