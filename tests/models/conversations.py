"""Messages, tools and answers that the tests of this room share."""

import re

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def user(content) -> dict:
    return {"role": "user", "content": content}


def system(content) -> dict:
    return {"role": "system", "content": content}


def assistant(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def tool(content, tool_call_id=None) -> dict:
    return {"role": "tool", "tool_call_id": tool_call_id, "content": content}


QUESTION, THREE, SURE = user("What is 1 + 2?"), assistant("3"), user("Sure?")


def call_of(name="add", arguments='{"a": 1}', id="1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def odd_ids(renderer, text):
    """Ids of `text` that no tokenizer would choose: each character alone, but tags that are one
    token stay one."""
    pieces = [
        [tag] if len(renderer.encode(tag)) == 1 else tag
        for tag in re.split("(</?tool_call>)", text)
    ]
    ids = [id for piece in pieces for character in piece for id in renderer.encode(character)]
    assert ids != renderer.encode(text) and renderer.decode(ids) == text
    return ids


def added(renderer, before, messages, num_old=2, tools=None) -> str:
    """What the next prompt adds, as text, to the ids before, which it leaves as they are."""
    ids = renderer.next_prompt_ids(before, messages, num_old, tools)
    assert ids[: len(before)] == before
    return renderer.text(ids[len(before) :])


GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


PARSED = [
    ("Just text. ", "Just text. ", [], []),
    (GOOD, "", [("add", '{"a": 1}')], []),
    (f"Both:\n{GOOD}\n{GOOD}", "Both:", [("add", '{"a": 1}')] * 2, []),
    # unknown tools are calls
    (
        '<tool_call>{"arguments":{"s":"é"},"name":"other"}</tool_call>',
        "",
        [("other", '{"s": "é"}')],
        [],
    ),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], []),
    (
        "<tool_call>add(1)</tool_call>",
        "<tool_call>add(1)</tool_call>",
        [],
        ["<tool_call>add(1)</tool_call>"],
    ),
    (
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        [],
        ['<tool_call>{"arguments": {}}</tool_call>'],
    ),
    (
        'x <tool_call>\n{"name": "add", "a',
        'x <tool_call>\n{"name": "add", "a',
        [],
        ['<tool_call>\n{"name": "add", "a'],
    ),
]
