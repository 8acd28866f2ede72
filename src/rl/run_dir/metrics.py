"""`metrics.jsonl`, the only way of a run's numbers: processes append whole lines; console, W&B and curves read them."""

import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rl.run_dir.files import LineReader, with_path, write_all, write_file
from rl.system import faults

Lines = dict[tuple[int, str], dict[str, Any]]
"""The lines of metrics.jsonl by (step, source): see read_metrics."""
Curve = tuple[list[int], list[float]]
"""Steps, and the values of a metric at them."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
ALWAYS = ("step", "time", "source")
"""Fields of every line."""
NEWEST_BYTES = 1 << 22
"""The end of a metrics file that has the newest steps for sure: a line has some kilobytes."""
WHOLE = re.compile(rb'\{"step": (\d{1,15}), .*\}\n')


class MetricsLog:
    """Appends the lines of one process, each with one write call, so that lines of several processes never mix."""

    def __init__(self, path: Path, source: str):
        self.path, self.source = path, source
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self.file).st_size
        if size and os.pread(self.file, 1, size - 1) != b"\n":  # a writer was killed, or the disk full, in the middle of a line
            os.write(self.file, b"\n")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends `{"step", "time", "source", **metrics}`; a value that is not finite is written as null."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), "source": self.source, **finite})
        data = line.encode() + b"\n"
        try:
            write_all(self.file, data, "metrics")
        except OSError as error:
            raise with_path(error, self.path) from None
        faults.point("metrics.done")


class MetricsReader(LineReader):
    """Follows a metrics file. It gives as many lines at once as memory may hold: whoever wants all asks until there are none."""

    def new(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The content of the lines that were completed since the last call, without damaged ones."""
        return [content for content in map(parse_line, super().new()) if content]


def parse_line(line: bytes, wanted: Callable[[str], bool] | None = None) -> dict[str, Any] | None:
    """The content of a line, of its metrics those that are `wanted`, else all. None for one that its writer did not finish: it was killed,
    or the disk full."""
    try:
        content = msgspec.json.decode(line)
    except UNREADABLE:
        whole = line.rfind(b'{"step": ')  # another process's line after one that was not finished
        return parse_line(line[whole:], wanted) if whole > 0 else None
    if not (isinstance(content, dict) and type(content.get("step")) is int and isinstance(content.get("source"), str)):
        return None
    if wanted is not None:
        content = {name: value for name, value in content.items() if name in ALWAYS or wanted(name)}
    return {key: value for key, value in content.items() if key == "source" or value is None or isinstance(value, (int, float))}


def merge_lines(into: Lines, lines: list[dict[str, Any]]) -> None:
    """Adds lines by (step, source). Of two values of a metric the later one counts, so a resume never doubles a curve."""
    for line in lines:
        key = (line["step"], line["source"])
        into[key] = into[key] | line if key in into else line


def read_metrics(path: Path, source: str = "", wanted: Callable[[str], bool] | None = None, last_bytes: int | None = None) -> Lines:
    """The values of a run by (step, source); see merge_lines.

    `source`: the only one whose lines are read. `wanted`: whether a metric is kept, by its name. `last_bytes`: of the file that are read.
    """
    merged: Lines = {}
    mark = f'"source": "{source}"'.encode()  # as MetricsLog writes it
    try:
        with path.open("rb") as file:
            if last_bytes is not None and (start := os.fstat(file.fileno()).st_size - last_bytes) > 0:
                file.seek(start)
                file.readline()
            for line in file:
                if line.endswith(b"\n") and (not source or mark in line) and (content := parse_line(line, wanted)):
                    merge_lines(merged, [content])
    except FileNotFoundError:
        pass
    return {key: line for key, line in merged.items() if key[1] == source} if source else merged


def curve(lines: Lines, source: str, metric: str) -> Curve:
    """The finite values of a metric over steps."""
    points = sorted((step, line[metric]) for (step, of), line in lines.items() if of == source and line.get(metric) is not None)
    return [step for step, _ in points], [value for _, value in points]


def environment_rewards(line: dict[str, Any]) -> dict[str, float]:
    """Environment -> mean training reward, from a line of the orchestrator."""
    keys = (key.split("/") for key in line)
    return {parts[1]: line["/".join(parts)] for parts in keys if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean"}


def cut_metrics(path: Path, last_step: int) -> list[bytes]:
    """Removes the lines of steps after `last_step`, and damaged ones, atomically. Returns the removed lines."""
    if not path.exists() or not has_lines_after(path, last_step):
        return []
    kept: list[bytes] = []
    gone: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        content = parse_line(line)
        (kept if content and content["step"] <= last_step else gone).append(line)
    if gone:
        write_file(path, b"".join(kept))
    return gone


def has_lines_after(path: Path, last_step: int) -> bool:
    """Whether a line may be of a later step, or is damaged: by how lines begin and end, for a long run has a gigabyte of them."""
    with path.open("rb") as file:
        return any((match := WHOLE.fullmatch(line)) is None or int(match[1]) > last_step for line in file)
