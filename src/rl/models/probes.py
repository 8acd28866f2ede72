"""Conversations that show what a chat template does: whether it presents tools, and whether a
renderer writes the same text."""

from rl.models.chat import Message, Tool

QUESTION, RESULT = "Which word is probed?", "probe-result"
ARGUMENTS = '{"probe_key": "a"}'
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string"}},
            "required": ["probe_key"],
        },
    },
}
ASK: list[Message] = [{"role": "user", "content": QUESTION}]
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "callprobe",
            "type": "function",
            "function": {"name": "probe_tool", "arguments": ARGUMENTS},
        }
    ],
}
TOOL_CYCLE: list[Message] = [
    *ASK,
    CALL,
    {"role": "tool", "tool_call_id": "callprobe", "content": RESULT},
]

CONVERSATIONS: list[tuple[list[Message], list[Tool] | None]] = [
    (ASK, None),
    ([{"role": "system", "content": "Be brief."}, *ASK], None),
    (
        [
            *ASK,
            {"role": "assistant", "content": "b", "reasoning_content": "Hm."},
            {"role": "user", "content": "And now?"},
        ],
        None,
    ),
    ([{"role": "system", "content": "Be brief."}, *ASK], [TOOL]),
    ([*TOOL_CYCLE, {**TOOL_CYCLE[-1], "content": "more"}], [TOOL]),
    ([*ASK, {**CALL, "content": "I look.", "reasoning_content": "Hm."}, TOOL_CYCLE[-1]], [TOOL]),
]
"""A renderer that agrees with a model's template on all of these writes the model's format."""
TEXT = (
    "The sun rises in the east and sets in the west, and the night is as long as the day. "
    "1 + 1 = 2, 1 + 2 = 3, 2 + 2 = 4, 2 + 3 = 5, 3 + 3 = 6, 3 + 4 = 7. "
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12. "
    "def add(a, b): return a + b. for i in range(10): print(i)."
)
"""Language, numbers and code: any trained model predicts some of it."""
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": TEXT},
]
"""Has a system message, because templates that agree otherwise differ in their default one."""
