"""Reading tool calls from what a policy wrote."""

import itertools

import pytest

from tests.models.conversations import ADD, GOOD, PARSED

STRICT = [
    (
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("add", '{"a": "</tool_call>"}')],
        [],
    ),
    (
        r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>',
        "",
        [("add", r'{"a": "\ud83d"}')],
        [],
    ),
    (f"<tool_call>{GOOD} end", "<tool_call> end", [("add", '{"a": 1}')], ["<tool_call>"]),
    *(
        (
            f"<tool_call>{call}</tool_call>",
            f"<tool_call>{call}</tool_call>",
            [],
            [f"<tool_call>{call}</tool_call>"],
        )
        for call in (
            '{"name": "add", "parameters": {"a": 1}}',
            '{"name": "add", "arguments": {"a": 1}, "arguments": {"a": 2}}',
            '{"name": "add", "arguments": {"a": 1, "a": 2}}',
        )
    ),
    (
        f"<tool_call>no</tool_call>\n{GOOD}",
        "<tool_call>no</tool_call>",
        [("add", '{"a": 1}')],
        ["<tool_call>no</tool_call>"],
    ),
]


BAD_ARGUMENTS = [
    '{"a": 1, "a": 2}',
    '{}, "arguments": {"a": 1}',
    "[1]",
    '"{}"',
    "NaN",
    '{"a": NaN}',
    '{"a": ' + "9" * 5000 + "}",
    '{"a":' * 20000,
    r'"\ud83d"',
]


@pytest.mark.parametrize(("text", "content", "calls", "bad"), PARSED + STRICT)
def test_calls_are_read_and_bad_ones_stay_visible(smol, text, content, calls, bad):
    answer = smol.parse([*smol.encode(text), 2], [ADD], [1, 5])
    assert (answer.content, answer.reasoning, answer.bad_tool_calls) == (content, None, bad)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == calls
    assert smol.parse([*smol.encode(text), 2]).content == text  # without tools nothing is a call


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_what_json_readers_refuse_is_no_call(smol, qwen, arguments):
    written = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    parameters = '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>'
    for renderer, text in itertools.product((smol, qwen()), (written, parameters)):
        answer = renderer.parse(renderer.encode(text), [ADD])
        assert (
            answer.tool_calls == []
            and [len(bad) for bad in answer.bad_tool_calls] == [len(text)]
            and text in answer.content
        )
