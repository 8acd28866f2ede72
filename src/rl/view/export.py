"""Exports a run: as one self-contained page, with all answers of the server and as many rollouts
as the size allows, or its timeline."""

import base64
import html
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rl.records.rollouts import Rollouts
from rl.records.run import Run
from rl.run_dir.files import write_file
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.system.terminal import size
from rl.view import curves, health, rollouts, runs, tasks, timeline, tokens
from rl.view.bundle import document
from rl.view.library import Library
from rl.view.redaction import Redaction
from rl.view.responses import Health
from rl.view.server import PAGE

AXES: tuple[curves.Axis, ...] = ("step", "rollouts", "tokens", "time")
TASKS_SHARE = 0.2
"""Share of the size for tasks and their versions."""
TOKEN_SHARE = 0.3
"""Share of the size for values of single tokens."""
LOG_LINES = 200


def write_page(library: Library, path: Path, max_bytes: int) -> list[str]:
    """Writes a library's first run as a page of about `max_bytes` at most. Returns messages for
    the user. Raises RunError."""
    key = next(iter(library.keys()))
    run = library.run(key)
    content, left_out = recorded(key, run, max_bytes)
    places, icon = Redaction(run), content.pop("icon")
    shown = places.hide(msgspec.to_builtins(content)) | {"icon": icon}
    shown["logs"] = {places.text(process): lines for process, lines in shown["logs"].items()}
    data = redact_json(msgspec.json.encode(shown)).decode()
    text = document(PAGE, data, html.escape(f"{run.root.name} · rl view"))
    write_file(path.absolute(), text.encode())
    return [f"{path}: {size(len(text.encode()))}, opens in any browser without a server", *left_out]


def write_trace(library: Library, path: Path) -> list[str]:
    """Writes the timeline of a library's first run as Chrome trace events. Returns messages for
    the user. Raises RunError."""
    key = next(iter(library.keys()))
    run = library.run(key)
    trace = run.timeline().trace()
    if not trace["traceEvents"]:
        raise RunError(f"{key}: has no spans: the run has not begun")
    write_file(path.absolute(), json.dumps(Redaction(run).hide(trace)).encode())
    return [f"{path}: {len(trace['traceEvents']):,} events, for https://ui.perfetto.dev"]


def recorded(key: str, run: Run, max_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the data that the page gets in place of a server, and sentences about what is left
    out."""
    metrics = curves.metrics([run])
    names = [metric.name for metric in metrics.metrics]
    row = runs.RunList(library=Library([run.root]))
    content: dict[str, Any] = {
        "icon": "data:image/svg+xml;base64,"
        + base64.b64encode((PAGE / "icon.svg").read_bytes()).decode(),
        "runs": {
            "runs": [msgspec.structs.replace(one, key=key) for one in row.all()],
            "place": "this file",
        },
        "made": time.time(),
        "metrics": metrics,
        "curves": {axis: curves.curves([key], [run], names, axis, None, None) for axis in AXES},
        "tasks": {},
        "task": {},
        "timeline": timeline.timeline(run, 0.0, None),
        "health": with_newest_logs(health.health(run)),
        "logs": dict(logs(run)),
        "rollouts": {},
        "sorts": {"rollouts": rollouts.sorts_of(run.rollouts("train")), "tasks": tasks.SORTS},
        "tokens": {},
    }
    left = (
        max_bytes
        - len(msgspec.json.encode(content))
        - sum(path.stat().st_size for path in PAGE.rglob("*.*js"))
    )
    if left <= 0:
        raise RunError(f"--max-mib: curves and logs alone take {size(max_bytes - left)}; give more")
    used, content["tasks_left_out"] = add_tasks(content, run, int(left * TASKS_SHARE))
    content["left_out"] = add_rollouts(content, run, left - used)
    return content, [text for text in (content["tasks_left_out"], content["left_out"]) if text]


def with_newest_logs(found: Health) -> Health:
    """Lists only the newest log of each process, as the file has no others."""
    processes = [
        msgspec.structs.replace(one, attempts=one.attempts[-1:]) for one in found.processes
    ]
    return msgspec.structs.replace(found, processes=processes)


def add_tasks(content: dict[str, Any], run: Run, room: int) -> tuple[int, str]:
    """Adds the tasks that changed most, with all their versions, within `room` bytes, half of
    them for held-out tasks. Returns the bytes used, and a sentence about what is left out."""
    kept, total, left = 0, 0, room
    for kind, reserved in (("train", room // 2), ("eval", 0)):
        rows, every = tasks.ordered(run, kind), tasks.without_rollouts(run, kind)
        listed, own = content["tasks"].setdefault(kind, []), content["task"].setdefault(kind, {})
        for row in rows:
            one = every[row.env, row.task]
            bytes_ = len(msgspec.json.encode([row, one])) + len(row.env)
            if bytes_ > left - reserved:
                break
            left -= bytes_
            listed += tasks.with_prompts(run.rollouts(kind), [row])
            own[f"{row.env}/{row.task}"] = one
        kept, total = kept + len(listed), total + len(rows)
    left_out = (
        f"{kept:,} of {total:,} tasks are in this file, those that changed most; raise "
        "--max-mib for more"
        if kept < total
        else ""
    )
    return room - left, left_out


def logs(run: Run) -> Iterator[tuple[str, Any]]:
    """Yields the end of each process's newest log."""
    for process in run.logs:
        yield process, health.log(run, process, None, LOG_LINES)


def add_rollouts(content: dict[str, Any], run: Run, left: int) -> str:
    """Adds rollouts, and the tokens of trained ones, up to `left` bytes. Returns a sentence
    about what is left out."""
    for_tokens, total, kept = int(left * TOKEN_SHARE), 0, 0
    left -= for_tokens
    for some in ordered(run):
        total += len(some)
        for i in range(len(some) if left > 0 else 0):
            try:
                name, detail = with_group(run, some, i)
            except RunError:
                continue
            left -= len(msgspec.json.encode(detail)) + len(name)
            if left <= 0:
                break
            content["rollouts"][name] = detail
            kept += 1
            if detail.has_tokens and for_tokens > 0:
                for_tokens -= add_tokens(content, run, detail.row, for_tokens)
    content["rollouts"] = {
        name: msgspec.structs.replace(detail, has_tokens=name in content["tokens"])
        for name, detail in content["rollouts"].items()
    }
    return (
        f"{kept:,} of {total:,} rollouts are in this file, the newest steps first; raise "
        "--max-mib for more"
        if kept < total
        else ""
    )


def ordered(run: Run) -> Iterator[Rollouts]:
    """All rollouts by priority: the newest step, the newest evaluation, the first evaluation,
    then the others, newest first."""
    train, evals = run.rollouts("train").by("step"), run.rollouts("eval").by("version")
    steps, versions = sorted(train, reverse=True), sorted(evals, reverse=True)
    yield from (train[step] for step in steps[:1])
    yield from (evals[version] for version in dict.fromkeys([*versions[:1], *versions[-1:]]))
    yield from (train[step] for step in steps[1:])
    yield from (evals[version] for version in versions[1:-1])
    yield run.rollouts("pending")


def with_group(run: Run, some: Rollouts, i: int) -> tuple[str, Any]:
    """Returns a rollout's name in the page and the rollout in full. Raises RunError if its text
    is gone."""
    row = rollouts.row_of(some[i])
    names = {
        name: getattr(row, name) for name in ("kind", "group", "version", "env", "task", "agent")
    }
    found = rollouts.find(run, rollouts.Which(run="", rollout=row.rollout or 0, **names))
    name = (
        f"{row.version}/{row.env}/{row.task}/{row.rollout}/{row.agent}"
        if row.kind == "eval"
        else f"{row.group}/{row.rollout}"
    )
    return name, rollouts.in_full(run, *found)


def add_tokens(content: dict[str, Any], run: Run, row: Any, room: int) -> int:
    """Adds a rollout's tokens if they fit into `room` bytes. Returns the bytes used (all of
    `room` if they do not fit)."""
    try:
        found = tokens.tokens(run, row.step, row.group, row.rollout)
    except RunError:
        return 0
    used = len(msgspec.json.encode(found))
    if used > room:
        return room
    content["tokens"][f"{row.group}/{row.rollout}"] = found
    return used
