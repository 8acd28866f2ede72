"""Chat messages, and the text form of tool calls and thinking: types, writing and parsing."""

import json
import re
from dataclasses import dataclass
from typing import Any

from rl.system.errors import RunError
from rl.system.jsonl import without_duplicates

Message = dict[str, Any]
"""A message as in chat APIs: role, content (text, a list of text parts, or None),
reasoning_content?, tool_calls?, tool_call_id?"""
Tool = dict[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}"""

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
SPACE = re.compile(r"\s*")
CLOSE = re.compile(rf"\s*{CALL_END}")
END_OF_BAD_CALL = re.compile(rf"{CALL_END}|(?={CALL})|\Z")


class RendererError(RunError):
    """Messages cannot be rendered for this model; the error names the remedy. It fails only the
    rollout in which it occurs."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. The environment checks whether the tool exists."""

    id: str
    name: str
    arguments: str  # a JSON object as text, with normalised spaces


@dataclass(frozen=True)
class Answer:
    """One turn of the policy, parsed."""

    content: str  # includes the text of `bad_tool_calls`
    reasoning: str | None
    tool_calls: list[ToolCall]
    bad_tool_calls: list[str]  # text between call tags that is not a valid call, verbatim


def assistant_message(answer: Answer) -> Message:
    """An answer as a message of chat APIs."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls := answer.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def wire(messages: list[Message]) -> list[Message]:
    """Copies of messages in normalized form: content is text, arguments are JSON text, and empty
    fields are left out, because templates test for them in different ways. Raises RendererError
    for content that is not text."""
    return [
        {key: value for key, value in message.items() if value and key != "tool_calls"}
        | {"content": content_text(message)}
        | (
            {"tool_calls": [with_arguments(call, arguments_text) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else {}
        )
        for message in messages
    ]


def content_text(message: Message) -> str:
    """The content of a message as one text. Raises RendererError for parts that are not text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = sorted(
        {
            str(part.get("type")) if isinstance(part, dict) else type(part).__name__
            for part in content
        }
        - {"text"}
    )
    if kinds:
        raise RendererError(
            f"a {message['role']} message has content of type {', '.join(kinds)}; only text "
            "can be rendered: remove it"
        )
    return "".join(part["text"] for part in content)


def chat_call(call: Any) -> dict[str, Any]:
    """A call in the form of chat APIs, with arguments as JSON text: from an object or a dict
    that may lack `function`, or JSON text."""
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function") or call
    arguments = arguments_text(function.get("arguments") or {})
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def chat_tools(tools: list[Tool] | None) -> list[Tool] | None:
    """Definitions of tools in the form of chat APIs, from that or from verifiers', which is the
    function alone."""
    return [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in tools or ()
    ] or None


def with_arguments(call: dict[str, Any], change: Any) -> dict[str, Any]:
    """A copy of a call with the function `change` applied to its arguments."""
    return {
        **call,
        "function": {
            **call["function"],
            "arguments": change(call["function"].get("arguments") or "{}"),
        },
    }


def arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str) -> Any:
    """The value of JSON text; the text itself if it is not valid JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def call_text(call: dict[str, Any]) -> str:
    """A call as the text that read_calls reads; its arguments, JSON text, are not changed."""
    function = call["function"]
    return (
        f'{CALL}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        f"{function['arguments']}}}\n{CALL_END}"
    )


def read_calls(text: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Parses <tool_call> blocks. Returns the text without the valid ones, their (name,
    arguments), and the verbatim invalid ones."""
    kept, calls, bad, at = "", [], [], 0
    while (start := text.find(CALL, at)) >= 0:
        kept += text[at:start]
        call, at = read_call(text, start)
        if call:
            calls.append(call)
        else:
            bad.append(text[start:at])
            kept += bad[-1]
    kept += text[at:]
    return (kept.strip() if calls else kept), calls, bad


def read_call(text: str, start: int) -> tuple[tuple[str, str] | None, int]:
    """Returns the call in the block at `start` (None if invalid), and where the block ends. A
    closing tag in a JSON string is ignored."""
    call, end = None, SPACE.match(text, start + len(CALL)).end()
    try:
        value, end = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode(text, end)
    # not JSON, a key twice, or more digits or nesting than Python parses, as a looping policy
    # writes
    except (ValueError, RecursionError):
        return None, END_OF_BAD_CALL.search(text, end).end()
    # One without arguments has nothing else that could be meant as such, like `parameters`.
    if isinstance(value, dict) and not value.keys() - {"name", "arguments", "id", "type"}:
        call = checked_call(value.get("name"), value.get("arguments", {}))
    if closing := CLOSE.match(text, end):
        return call, closing.end()
    return None, END_OF_BAD_CALL.search(text, end).end()


def checked_call(name: object, arguments: object) -> tuple[str, str] | None:
    """(name, arguments as JSON text) if they are a name and an object that every JSON parser
    accepts; else None."""
    if not (isinstance(name, str) and name and is_unicode(name) and isinstance(arguments, dict)):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return name, text if is_unicode(text) else json.dumps(arguments)


def is_unicode(text: str) -> bool:
    r"""Returns False for text with half of a surrogate pair, which JSON can spell (\ud83d) but
    tokenizers and files do not accept."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_thinking(text: str, opened: bool) -> tuple[str | None, str]:
    """Returns (thinking or None, the text after it). `opened`: the prompt ends with the opening
    tag. No text follows cut-off thinking."""
    if not opened:
        if not text.lstrip().startswith(THINK):
            return None, text
        text = text.lstrip()[len(THINK) :]
    thinking, closed, rest = text.partition(THINK_END)
    return thinking.strip("\n") or None, rest.lstrip("\n") if closed else ""
