"""Data of the user's as JSONL: one object a line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.system.errors import RunError


def json_objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not blank. Raises RunError for a line that is something else than, like `example`, an
    object. The file may be compressed by gzip. Lines are split as bytes: text has line ends inside JSON strings."""
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
