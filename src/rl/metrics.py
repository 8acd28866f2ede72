"""`metrics.jsonl`: the one road of numbers. Processes append whole lines; console, W&B and the curves read them."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rl import faults
from rl.files import named, write_all, write_file


class MetricsLog:
    """Appends one process's lines. One write call a line, so lines of several processes never mix."""

    def __init__(self, path: Path, source: str):
        self.path, self.source = path, source
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self.file).st_size
        if size and os.pread(self.file, 1, size - 1) != b"\n":  # a writer was killed, or the disk was full, within a line
            os.write(self.file, b"\n")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written as null."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), "source": self.source, **finite})
        data = line.encode() + b"\n"
        try:
            write_all(self.file, data, "metrics")
        except OSError as error:
            raise named(error, self.path) from None
        faults.point("metrics.done")


class MetricsReader:
    """Follows a metrics file: `new()` gives the lines that were completed since the last call."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            self.offset = min(self.offset, os.fstat(file.fileno()).st_size)  # a repair has taken lines back
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [line for line in map(parse_line, whole.splitlines()) if line]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line's content, or None for one that its writer did not finish (killed within it, or no space left)."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        whole = line.rfind(b'{"step": ')  # of another process, behind what its neighbour did not finish
        return parse_line(line[whole:]) if whole > 0 else None
    if not (isinstance(content, dict) and type(content.get("step")) is int and isinstance(content.get("source"), str)):
        return None
    return {key: value for key, value in content.items() if key == "source" or value is None or isinstance(value, (int, float))}


def merge_lines(into: dict[tuple[int, str], dict[str, Any]], lines: list[dict[str, Any]]) -> None:
    """Adds lines by (step, source). Of a value that is given twice the later one wins, so a resume never doubles a curve."""
    for line in lines:
        key = (line["step"], line["source"])
        into[key] = into.get(key, {}) | line


def read_metrics(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The values of a run by (step, source); see merge_lines."""
    merged: dict[tuple[int, str], dict[str, Any]] = {}
    merge_lines(merged, MetricsReader(path).new())
    return merged


def environment_rewards(line: dict[str, Any]) -> dict[str, float]:
    """Mean training reward by environment, out of an orchestrator's line."""
    keys = (key.split("/") for key in line)
    return {parts[1]: line["/".join(parts)] for parts in keys if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean"}


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes the lines of steps after `last_step`, and damaged ones (atomically), and returns them."""
    if not path.exists():
        return []
    kept, gone = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        content = parse_line(line)
        (kept if content and content["step"] <= last_step else gone).append(line)
    if gone:
        write_file(path, b"".join(kept))
    return gone
