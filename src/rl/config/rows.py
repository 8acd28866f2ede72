"""Rows that users write: tasks of an environment and examples of fine-tuning, checked where they
are read and kept as they were written."""

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rl.system.errors import RunError
from rl.system.jsonl import json_objects

TASK = '{"prompt": "What is 2 + 2?", "answer": "4"}'
TABLES = (".csv", ".parquet", ".arrow")
"""Endings of files that are read as tables."""
ROLES = ("system", "user", "assistant", "tool")


def task_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, columns) of a JSONL file of tasks. Raises RunError if there is none, or
    for a row that is not a task."""
    is_empty = True
    for line, row in json_objects(path, TASK):
        prompt_of(row, line)
        info_of(row, line)
        is_empty = False
        yield line, row
    if is_empty:
        raise RunError(f"{path}: no rows; write one JSON object per line, like {TASK}")


def prompt_of(row: dict[str, Any], line: str) -> list[dict[str, Any]]:
    """Returns the messages of `prompt`, or else of `question`. Raises RunError."""
    column = "prompt" if row.get("prompt") is not None else "question"
    prompt = row.get(column)
    if prompt is None:
        raise RunError(
            f"{line}: no prompt or question, only {', '.join(row) or 'an empty object'}; "
            f"write rows like {TASK}"
        )
    messages = chat_messages(prompt, "user", f"{line}: {column}", ROLES)
    if messages[-1]["role"] == "assistant":
        raise RunError(
            f"{line}: {column}: ends with the assistant's words, which are not continued; "
            "end it with what it answers to"
        )
    return messages


def info_of(row: dict[str, Any], line: str) -> Any:
    """Returns the column `info`, which may be an object or JSON text. Raises RunError for what
    verifiers takes for something else."""
    info = row.get("info")
    if isinstance(info, str) and info:
        try:
            info = json.loads(info)
        except ValueError:
            raise RunError(
                f"{line}: info: a text that is not JSON; give an object, or name the column "
                "otherwise"
            ) from None
    if isinstance(info, dict) and info.get("task") is not None:
        raise RunError(
            f"{line}: info.task: verifiers takes it for the whole task; give it another name"
        )
    return info or {}


def chat_messages(value: Any, role: str, line: str, roles: Collection[str]) -> list[dict[str, Any]]:
    """Returns chat messages: `value`, or a text as one message of `role`. Raises RunError with
    the place of what is neither."""
    if isinstance(value, str):
        # as tables without lists have it
        if re.match(r"""\s*\[\s*\{\s*['"](role|content)['"]\s*:""", value):
            raise RunError(f"{line}: a text that spells a list of messages; give the list itself")
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise RunError(f"{line}: {kind_of(value)}; give text or a list of messages")
    for at, message in enumerate(value):
        where = f"{line}[{at}]"
        if not isinstance(message, dict) or message.get("role") not in roles:
            raise RunError(
                f"{where}: not a chat message: it needs a role, one of {', '.join(roles)}"
            )
        if message.get("function_call"):
            raise RunError(f"{where}.function_call: is not read; write the call into tool_calls")
        check_content(message, where)
        check_calls(message.get("tool_calls"), where)
    return value


def check_content(message: dict[str, Any], line: str) -> None:
    """Raises RunError unless the content is text, a list of parts, or, beside the calls of
    tools, absent."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            match part:
                case {"type": "text", "text": str()}:
                    pass
                case _:
                    raise RunError(
                        f"{line}.content: a list with {part!r:.60}; give text, or parts "
                        f'like {{"type": "text", "text": "..."}}'
                    )
    elif not isinstance(content, str) and not (
        content is None and message.get("role") == "assistant" and message.get("tool_calls")
    ):
        raise RunError(f"{line}.content: {kind_of(content)}; give text")


def check_calls(calls: Any, line: str) -> None:
    """Raises RunError unless `tool_calls` is absent, or a list of calls with names: the chat
    API's, or verifiers' without `function`."""
    form = 'a tool call must be {"function": {"name": ..., "arguments": ...}}'
    if not isinstance(calls, list | None):
        raise RunError(f"{line}.tool_calls: {kind_of(calls)}; {form}")
    for call in calls or []:
        try:
            call = json.loads(call) if isinstance(call, str) else call
        except ValueError:
            raise RunError(f"{line}.tool_calls: a text that is not JSON; {form}") from None
        function = call.get("function", call) if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise RunError(f"{line}.tool_calls: {form}")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
        if arguments and not isinstance(arguments, dict):
            raise RunError(
                f"{line}: the arguments of {function['name']} are {kind_of(arguments)}; give an "
                "object"
            )


def kind_of(value: Any) -> str:
    """Names a value of JSON in words."""
    kinds = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        dict: "an object",
    }
    return "an empty list" if value == [] else kinds.get(type(value), f"a {type(value).__name__}")
