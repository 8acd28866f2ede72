"""Chat messages, and the text in which a policy writes tool calls and thinking: types, writing, reading."""

import json
import re
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""As chat APIs have it: role, content (text, a list of text parts, or None), reasoning_content?, tool_calls?, tool_call_id?"""
Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}"""

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
SPACE = re.compile(r"\s*")
CLOSE = re.compile(rf"\s*{CALL_END}")
END_OF_BAD_CALL = re.compile(rf"{CALL_END}|(?={CALL})|\Z")


class RendererError(Exception):
    """Messages cannot be rendered for this model; the message says what to change."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made. The tool need not exist: to answer that is the environment's business."""

    id: str
    name: str
    arguments: str  # a JSON object as text, its spaces normalised


@dataclass(frozen=True)
class Answer:
    """What the policy said in one turn."""

    content: str  # with the text of `bad_tool_calls`
    reasoning: str | None
    tool_calls: list[ToolCall]
    bad_tool_calls: list[str]  # what was meant as a call but is none, verbatim


def wire(messages: list[Message]) -> list[Message]:
    """Copies with text as content, JSON text as arguments, and no empty fields, which templates test for in different ways.

    Raises RendererError for content that is not text.
    """
    return [
        {key: value for key, value in message.items() if value and key != "tool_calls"}
        | {"content": content_text(message)}
        | ({"tool_calls": [with_arguments(call, arguments_text) for call in message["tool_calls"]]} if message.get("tool_calls") else {})
        for message in messages
    ]


def content_text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = sorted({str(part.get("type")) for part in content} - {"text"})
    if kinds:
        raise RendererError(f"a {message['role']} message has content of type {', '.join(kinds)}; only text can be rendered: take it out")
    return "".join(part["text"] for part in content)


def with_arguments(call: dict[str, Any], change: Any) -> dict[str, Any]:
    """A copy of a wire-form call with `change` applied to its arguments."""
    return {**call, "function": {**call["function"], "arguments": change(call["function"].get("arguments") or "{}")}}


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str) -> Any:
    """The object that the text says; the text itself if it says none."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def call_text(call: dict[str, Any]) -> str:
    """A wire-form call as text; the arguments stay as they are."""
    function = call["function"]
    return f'{CALL}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {function["arguments"]}}}\n{CALL_END}'


def read_calls(text: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Splits <tool_call> blocks off: the text without the good ones, (name, arguments) of those, the verbatim text of the bad ones."""
    kept, calls, bad, at = "", [], [], 0
    while (start := text.find(CALL, at)) >= 0:
        kept += text[at:start]
        call, at = read_call(text, start)
        if call:
            calls.append(call)
        else:
            bad.append(text[start:at])
            kept += text[start:at]
    kept += text[at:]
    return (kept.strip() if calls else kept), calls, bad


def read_call(text: str, start: int) -> tuple[tuple[str, str] | None, int]:
    """The call in the block at `start`, None if it is none, and where the block ends. A tag inside a JSON string ends nothing."""
    body = SPACE.match(text, start + len(CALL)).end()
    try:
        value, end = json.JSONDecoder().raw_decode(text, body)
    except (ValueError, RecursionError):  # no JSON, or digits or nesting beyond what Python reads, as a policy in a loop writes them
        return None, END_OF_BAD_CALL.search(text, body).end()
    closing = CLOSE.match(text, end)
    call = checked_call(value.get("name"), value.get("arguments", {})) if closing and isinstance(value, dict) else None
    return call, closing.end() if closing else END_OF_BAD_CALL.search(text, end).end()


def checked_call(name: object, arguments: object) -> tuple[str, str] | None:
    """Name and arguments as JSON text, if they are a name and an object that every reader of JSON takes; else None."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if not is_unicode(name):
        return None
    return name, text if is_unicode(text) else json.dumps(arguments)


def is_unicode(text: str) -> bool:
    r"""False for half of a surrogate pair, which JSON can spell (\ud83d) but neither a tokenizer nor a file takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def read_thinking(text: str, opened: bool) -> tuple[str | None, str]:
    """(thinking, rest). `opened`: the prompt has opened it. Thinking that was cut off leaves no rest."""
    if not opened:
        if not text.lstrip().startswith(THINK):
            return None, text
        text = text.lstrip()[len(THINK) :]
    thinking, closed, rest = text.partition(THINK_END)
    return thinking.strip("\n") or None, rest.lstrip("\n") if closed else ""
