"""Files of one JSON object a line."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def text(*rows: object) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
