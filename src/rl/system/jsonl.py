"""Reads the user's JSONL data: one object per line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.system.errors import RunError


def json_objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, object) for every line that is not blank. Raises RunError for a line that is not a JSON object; the message quotes
    `example`. The file may be gzipped. Lines are split as bytes: decoded text could have line separators inside JSON strings."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunError(f"{place}: not JSON ({error}); write one object a line, like {example}") from None
            if not isinstance(row, dict):
                raise RunError(f"{place}: a {type(row).__name__}; write one object a line, like {example}")
            yield place, row
