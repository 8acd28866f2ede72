"""Token ids of conversations that are given as text: those that the policy would have been sent
and would have had to sample."""

from collections.abc import Iterable, Iterator

from rl.models.chat import THINK, THINK_END, Message, Tool, arguments_object, arguments_text, wire
from rl.models.renderer import Renderer

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data sets store an assistant's reasoning."""


def conversation_ids(
    renderer: Renderer, messages: list[Message], answers: Iterable[int], tools: list[Tool] | None
) -> Iterator[tuple[int, bool, list[int], list[int]]]:
    """Yields (index, whether the prompt continues the ids of the answer before, prompt, answer)
    of the answers at these indices, each after exactly the ids that would precede it in a
    rollout. Raises RendererError."""
    ids: list[int] = []
    last = -1
    for i in answers:
        prompt = renderer.next_prompt_ids(ids, messages[:i], last + 1, tools) if ids else None
        continues = prompt is not None
        prompt = renderer.prompt_ids(messages[:i], tools) if prompt is None else prompt
        answer = renderer.answer_ids(messages[: i + 1], tools)
        yield i, continues, prompt, answer
        ids, last = prompt + answer, i


def has_content(message: Message) -> bool:
    return any(message.get(key) for key in ("content", "tool_calls", *REASONING))


def letters_of(text: str) -> str:
    """Returns text without white space and thinking tags, in which templates differ."""
    return "".join(text.replace(THINK, "").replace(THINK_END, "").split())


def as_encoded(renderer: Renderer, text: str) -> str:
    """Returns text as the ids spell it: some tokenizers write accents in one form, or all in
    lower case."""
    return renderer.text(renderer.encode(text))


def missing_text(
    renderer: Renderer,
    prompt: list[int],
    answer: list[int],
    message: Message,
    tools: list[Tool] | None,
) -> str | None:
    """Names the part of a message that is missing from the ids of its answer, with the remedy;
    None if nothing is missing."""
    written = letters_of(renderer.decode(answer))
    content = wire([message])[0]["content"]
    for key in REASONING:
        if (text := message.get(key)) and letters_of(
            as_encoded(renderer, str(text))
        ) not in written:
            return (
                f"the chat template leaves out the {key} of an answer; use one that shows it "
                "(model.chat_template), write it into the "
                "content, or leave it out with sft.drop_reasoning = true"
            )
    calls = [
        (
            call["function"]["name"],
            as_encoded(renderer, arguments_text(call["function"].get("arguments") or "{}")),
        )
        for call in message.get("tool_calls") or []
    ]
    read = renderer.parse(
        answer,
        tools or [{"type": "function", "function": {"name": name}} for name, _ in calls],
        prompt,
    ).tool_calls
    if calls and [(name, arguments_object(text)) for name, text in calls] != [
        (c.name, arguments_object(c.arguments)) for c in read
    ]:
        return (
            "an answer's tool calls cannot be parsed from the template's own output; see "
            "renderer.name and model.chat_template"
        )
    if letters_of(as_encoded(renderer, content)) not in written:
        return (
            "the chat template leaves out a part of an answer's content, or the content has the "
            "template's special tokens: change it"
        )
    return None
