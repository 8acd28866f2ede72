"""Reads the user's JSONL data: one object per line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.system.errors import RunError


def json_objects(path: Path, example: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, object) for every line that is not blank. Raises RunError for a line
    that is not a JSON object; the message quotes `example`. The file may be gzipped. Lines are
    split as bytes: decoded text could have line separators inside JSON strings."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, json_object(line, where, example)


def json_object(line: bytes | str, where: str, example: str) -> dict[str, Any]:
    """Returns the object of a line. Raises RunError for what is not JSON, has a key twice, or
    half of a character."""
    try:
        row = json.loads(line, object_pairs_hook=without_duplicates)
    except DuplicateKeyError as error:
        raise RunError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"{where}: not JSON ({error}); write one object a line, like {example}"
        ) from None
    if not isinstance(row, dict):
        raise RunError(f"{where}: a {type(row).__name__}; write one object a line, like {example}")
    if "\\ud" in str(line).lower():
        check_writable(row, where)
    return row


class DuplicateKeyError(ValueError):
    """An object of JSON with the same key twice, of which readers of JSON keep one in silence."""


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON. Raises DuplicateKeyError if it has a key twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in row if names.count(name) > 1)
        raise DuplicateKeyError(f"the key {twice!r} twice in one object; keep one of them")
    return row


def check_writable(row: dict[str, Any], where: str) -> None:
    """Raises RunError for a column with half of a surrogate pair, which no file or request can
    hold."""
    for column, value in row.items():
        try:
            json.dumps([column, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RunError(
                f"{where}: {column}: \\u{ord(error.object[error.start]):04x} is half of a "
                "character and cannot be written; remove it"
            ) from None
