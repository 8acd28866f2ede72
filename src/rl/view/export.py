"""Exports a run: as one self-contained page, with all answers of the server and as many rollouts
as the size allows, or its timeline."""

import base64
import contextlib
import html
import json
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rl.records.rollouts import Rollouts
from rl.records.run import Run
from rl.run_dir.files import write_file
from rl.run_dir.nodes import Nodes
from rl.system.credentials import redact_json
from rl.system.errors import RunError
from rl.system.terminal import size
from rl.view import curves, health, rollouts, runs, tasks, timeline, tokens
from rl.view.library import Library
from rl.view.responses import RolloutDetail, TaskRow, Tokens
from rl.view.server import PAGE

AXES: tuple[curves.Axis, ...] = ("step", "rollouts", "tokens", "time")
TASKS_SHARE = 0.2
"""Share of the size for tasks and their versions."""
TOKEN_SHARE = 0.3
"""Share of the size for values of single tokens."""
LOG_LINES = 200
CONVERSATION = ("messages", "prompt", "pieces")
"""Fields with texts of a model, a tool or a task: a word there may equal a host name by chance,
and a path may belong to the task."""
PATH = re.compile(r"(?:(?<=\bfile://)|(?<![\w./~-]))(?:/[\w.@+%=-]+)+(/[\w.@+%=-]+)")
"""An absolute path of at least two parts, with its last part as a group; not a part of a URL,
except of one of a file."""
IMPORT = re.compile(r'\bfrom\s*"[^"]*/([\w.]+)"')
"""Where a module of the page says which one it imports from, with its name as a group."""


def write_page(library: Library, path: Path, max_bytes: int) -> list[str]:
    """Writes a library's first run as a page of about `max_bytes` at most. Returns messages for
    the user. Raises RunError."""
    key = next(iter(library.keys()))
    run = library.run(key)
    content, left_out = recorded(key, run, max_bytes)
    redaction, icon = Redaction(run), content.pop("icon")
    hidden = redaction.hide(msgspec.to_builtins(content)) | {"icon": icon}
    hidden["logs"] = {redaction.text(name): lines for name, lines in hidden["logs"].items()}
    data = redact_json(msgspec.json.encode(hidden)).decode()
    text = document(data, html.escape(f"{run.root.name} · rl view")).encode()
    write_file(path.absolute(), text)
    return [f"{path}: {size(len(text))}, opens in any browser without a server", *left_out]


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
    rows = runs.RunList(library=Library([run.root])).all()
    icon = base64.b64encode((PAGE / "icon.svg").read_bytes()).decode()
    diagnosis = health.health(run)
    content: dict[str, Any] = {
        "icon": f"data:image/svg+xml;base64,{icon}",
        "runs": {
            "runs": [msgspec.structs.replace(row, key=key) for row in rows],
            "folders": "this file",
        },
        "made": time.time(),
        "metrics": metrics,
        "curves": {axis: curves.curves([key], [run], names, axis, None, None) for axis in AXES},
        "timeline": timeline.timeline(run, 0.0, None),
        "health": msgspec.structs.replace(
            diagnosis,
            processes=[  # the file has the newest log of each process alone
                msgspec.structs.replace(process, attempts=process.attempts[-1:])
                for process in diagnosis.processes
            ],
        ),
        "logs": {name: health.log(run, name, None, LOG_LINES) for name in run.logs},
        "sorts": {"rollouts": rollouts.sorts_of(run.rollouts("train")), "tasks": tasks.SORTS},
    }
    left = max_bytes - bytes_of(content) - len(document("", ""))
    if left <= 0:
        raise RunError(f"--max-mib: curves and logs alone take {size(max_bytes - left)}; give more")
    for_tasks = int(left * TASKS_SHARE)
    content["tasks_left_out"] = add_tasks(content, run, for_tasks)
    content["left_out"] = add_rollouts(content, run, left - for_tasks)
    return content, [text for text in (content["tasks_left_out"], content["left_out"]) if text]


def bytes_of(answer: Any) -> int:
    return len(msgspec.json.encode(answer))


def left_out(kept: int, total: int, what: str, which: str) -> str:
    """A sentence about what is left out; empty if nothing."""
    text = f"{kept:,} of {total:,} {what} are in this file, {which}; raise --max-mib for more"
    return text if kept < total else ""


def add_tasks(content: dict[str, Any], run: Run, room: int) -> str:
    """Adds the tasks that changed most, with all their versions, within `room` bytes, half of
    them for held-out tasks. Returns a sentence about what is left out."""
    kept, total = 0, 0
    content["tasks"], content["task"] = {}, {}
    for kind in ("train", "eval"):
        rows, chosen, left = tasks.ordered(run, kind), list[TaskRow](), room // 2
        content["task"][kind] = {}
        total += len(rows)
        for row in rows:
            task = tasks.one_task(run, kind, row.env, row.task, with_rollouts=False)
            left -= bytes_of([row, task]) + len(row.env)
            if left < 0:
                break
            chosen.append(row)
            content["task"][kind][f"{row.env}/{row.task}"] = task
        content["tasks"][kind] = tasks.with_prompts(run.rollouts(kind), chosen)
        kept += len(chosen)
    return left_out(kept, total, "tasks", "those that changed most")


def add_rollouts(content: dict[str, Any], run: Run, room: int) -> str:
    """Adds rollouts, and the tokens of trained ones, up to `room` bytes. Returns a sentence
    about what is left out."""
    for_tokens, total = int(room * TOKEN_SHARE), 0
    left = room - for_tokens
    kept, with_tokens = dict[str, RolloutDetail](), dict[str, Tokens]()
    for chosen in ordered(run):
        total += len(chosen)
        for rollout in chosen if left > 0 else ():
            row = rollouts.row_of(rollout)
            try:
                detail = rollouts.in_full(run, rollout, rollouts.group_of(run, row))
            except RunError:
                continue
            name = f"{row.group}/{row.rollout}"
            if row.kind == "eval":
                name = f"{row.version}/{row.env}/{row.task}/{row.rollout}/{row.agent}"
            left -= bytes_of(detail) + len(name)
            if left <= 0:
                break
            kept[name] = detail
            if detail.has_tokens and for_tokens > 0:
                with contextlib.suppress(RunError):
                    answer = tokens.tokens(run, row.step or 0, row.group or 0, row.rollout or 0)
                    for_tokens -= bytes_of(answer)
                    if for_tokens >= 0:
                        with_tokens[name] = answer
    content["tokens"] = with_tokens
    content["rollouts"] = {
        name: msgspec.structs.replace(detail, has_tokens=name in with_tokens)
        for name, detail in kept.items()
    }
    return left_out(len(kept), total, "rollouts", "the newest steps first")


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


def document(data: str, title: str) -> str:
    """A self-contained page. data: JSON, which becomes `window.recorded`; it cannot end the
    element around it. An import map has the page's modules as `data:` URLs."""
    styles = ("vendor/uPlot.min.css", "style.css", "parts.css")
    style = "\n".join((PAGE / name).read_text() for name in styles)
    plots = (PAGE / "vendor/uPlot.iife.min.js").read_text()
    modules = dict[str, str]()
    for path in (*PAGE.glob("*.js"), *PAGE.glob("vendor/*.mjs")):
        text = base64.b64encode(IMPORT.sub(r'from "\1"', path.read_text()).encode()).decode()
        modules[path.name] = f"data:text/javascript;base64,{text}"
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )
    # `<` occurs only in strings of the JSON, where it can be escaped
    content = data.replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="content-security-policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style nonce="{nonce}">{style}</style></head>
<body><div id="app"></div>
<script type="application/json" id="recorded">{content}</script>
<script nonce="{nonce}">{plots}
window.recorded = JSON.parse(document.getElementById("recorded").textContent);</script>
<script type="importmap" nonce="{nonce}">{json.dumps({"imports": modules})}</script>
<script type="module" nonce="{nonce}">import "main.js";</script>
</body></html>
"""


class Redaction:
    """Replaces paths and hosts in an exported page: a path starts at the run or is cut to its
    last part, a host becomes HOST."""

    def __init__(self, run: Run):
        parents = [folder for folder in (run.root.parent, run.root.resolve().parent) if folder.name]
        self.parents = any_of("", [f"{folder}/" for folder in parents], "")
        self.home = any_of("", [str(Path.home())] if Path.home().name else [], r"(?![\w.-])")
        processes, machines = run.status, Nodes(run.run_dir).statuses()
        hosts = {status.host for status in (*processes.values(), *machines.values())}
        hosts = {socket.gethostname(), *hosts} - {"", "localhost", *processes}
        self.hosts = any_of(r"(?<![^\W_])", sorted(hosts), r"(?![^\W_])")

    def hide(self, value: Any, is_said: bool = False) -> Any:
        """A value with all its texts replaced. is_said: whether it is from a conversation, where
        only the run's path and HOME are hidden."""
        if isinstance(value, str):
            return self.text(value, is_said)
        if isinstance(value, dict):
            return {
                name: self.hide(entry, is_said or name in CONVERSATION)
                for name, entry in value.items()
            }
        return [self.hide(entry, is_said) for entry in value] if isinstance(value, list) else value

    def text(self, text: str, is_said: bool = False) -> str:
        text = self.home.sub("~", self.parents.sub("", text))
        return text if is_said else self.hosts.sub("HOST", PATH.sub(r"...\1", text))


def any_of(before: str, texts: Sequence[str], after: str) -> re.Pattern[str]:
    """A pattern of any of some texts between two patterns; of nothing if there are none."""
    return re.compile(f"{before}(?:{'|'.join(map(re.escape, texts))}){after}" if texts else r"(?!)")
