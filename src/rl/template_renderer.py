"""A model's own chat template as renderer, and the same with tools as text for templates that leave tools out.

The ids of earlier turns are never encoded again, because sampled ids need not be the ones a tokenizer would choose. What a later turn
adds is rendered alone and put behind them.
"""

import hashlib
import json
from typing import Any

from rl.chat import (
    CALL,
    CALL_END,
    THINK,
    THINK_END,
    Answer,
    Message,
    RendererError,
    Tool,
    ToolCall,
    arguments_object,
    call_text,
    read_calls,
    read_thinking,
    wire,
    with_arguments,
)
from rl.renderer_config import RendererConfig

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
PLACEHOLDER = "RL-PLACEHOLDER"
"""Stands for an answer, to find the text that a template puts behind it."""
QUESTION, RESULT = "Which word is probed?", "probe-result"
PROBE_ARGUMENTS = '{"probe_key": "a"}'
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}, "required": ["probe_key"]},
    },
}
ASKED: list[Message] = [{"role": "user", "content": QUESTION}]
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callprobe", "type": "function", "function": {"name": "probe_tool", "arguments": PROBE_ARGUMENTS}}],
}
CYCLE: list[Message] = [*ASKED, CALLED, {"role": "tool", "tool_call_id": "callprobe", "content": RESULT}]


class TokenizerRenderer:
    """What all renderers do alike with a tokenizer."""

    supports_tools = True
    stop_token_ids: list[int]

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.special_ids = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
        tags = {tokenizer.convert_tokens_to_ids(tag) for tag in (CALL, CALL_END, THINK, THINK_END)}
        self.hidden_ids = self.special_ids - (tags - {tokenizer.unk_token_id})

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def text(self, ids: list[int]) -> str:
        """All of it, special tokens as well."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def said(self, ids: list[int]) -> list[int]:
        """Sampled ids up to the first stop token."""
        return ids[: next((at for at, id in enumerate(ids) if id in self.stop_token_ids), len(ids))]

    def check_tools(self, tools: list[Tool] | None) -> None:
        if tools and not self.supports_tools:
            raise RendererError(
                "the model's chat template shows no tools to the model, or none in a known format; "
                'set renderer.name = "chatml" to describe them in the system message, or give a template with model.chat_template'
            )

    def numbered(self, calls: list[tuple[str, str]], completion_ids: list[int], prompt_ids: list[int] | None) -> list[ToolCall]:
        """Calls with ids that depend on nothing but the tokens."""
        digest = hashlib.blake2b(repr((prompt_ids, completion_ids)).encode(), digest_size=8).hexdigest() if calls else ""
        return [ToolCall(f"call_{digest}_{at}", name, arguments) for at, (name, arguments) in enumerate(calls)]


class TemplateRenderer(TokenizerRenderer):
    """The model's own chat template; earlier turns are extended as text behind the end-of-turn token."""

    def __init__(self, tokenizer: Any, config: RendererConfig):
        super().__init__(tokenizer)
        self.retention = config.thinking_retention
        self.switches = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
        template = tokenizer.chat_template
        self.thinks = THINK_END in (template if isinstance(template, str) else "".join(template.values()))
        self.dict_arguments = False
        with_header, without = self.render(ASKED), self.render(ASKED, header=False)
        self.header = with_header.removeprefix(without) if with_header.startswith(without) else ""
        self.closing = self.render([*ASKED, {"role": "assistant", "content": PLACEHOLDER}], header=False).rpartition(PLACEHOLDER)[2]
        self.end_id = next((id for id in self.encode(self.closing) if id in self.special_ids), None)
        self.end = "" if self.end_id is None else tokenizer.convert_ids_to_tokens(self.end_id)
        self.stop_token_ids = [id for id in dict.fromkeys((self.end_id, tokenizer.eos_token_id)) if id is not None]
        self.supports_tools = self._shows_tools()

    def _shows_tools(self) -> bool:
        """Whether a tool, a call and a result all reach the model, and the call in the form that we read."""
        for self.dict_arguments in (False, True):  # some templates quote a string once more, some cannot take one
            try:
                asked, played = self.render(ASKED, [PROBE_TOOL]), self.render(CYCLE, [PROBE_TOOL])
            except RendererError:
                continue
            _, calls, _ = read_calls(played.rpartition(QUESTION)[2])
            if "probe_key" in asked and RESULT in played and calls == [("probe_tool", PROBE_ARGUMENTS)]:
                return True
        self.dict_arguments = False
        return False

    def prepared(self, messages: list[Message], tools: list[Tool] | None) -> tuple[list[Message], list[Tool] | None]:
        """Messages and tools in the form in which the template takes them."""
        if not self.dict_arguments:
            return messages, tools
        calls = [[with_arguments(call, arguments_object) for call in message.get("tool_calls", [])] for message in messages]
        return [{**message, "tool_calls": made} if made else message for message, made in zip(messages, calls, strict=True)], tools

    def render(self, messages: list[Message], tools: list[Tool] | None = None, header: bool = True) -> str:
        """The conversation as text; `header`: with what the template puts before an answer."""
        from jinja2 import TemplateError

        messages, tools = self.prepared(messages, tools)
        try:
            return self.tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=header, **self.switches)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            remedy = "change them, or give another template with model.chat_template"
            raise RendererError(f"the model's chat template cannot render messages of {roles}: {error}; {remedy}") from error

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        self.check_tools(tools)
        return self.encode(self.render(wire(messages), tools))

    def next_prompt_ids(
        self, before: list[int], messages: list[Message], num_old: int, tools: list[Tool] | None = None
    ) -> list[int] | None:
        self.check_tools(tools)
        messages = wire(messages)
        if self.end_id is None or num_old < 2 or messages[num_old - 1]["role"] != "assistant":
            return None
        behind = self._behind_answer(messages, num_old, tools)
        asks = any(message["role"] == "user" for message in messages[num_old:])
        keeps = self.retention == "all" or (self.retention == "tool_cycle" and not asks)
        close = [] if before[-1] in self.stop_token_ids else [*self._close_of_thinking(before), self.end_id]
        if behind is None or (not keeps and not self._is_faithful([*before, *close], messages, behind, tools)):
            return None
        # Encoded behind the token it follows: some tokenizers treat the start of a text, or the space after a token, differently.
        ids = self.encode(self.end + behind)
        return [*before, *close, *ids[ids.index(self.end_id) + 1 :]]

    def answer_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        self.check_tools(tools)
        messages = wire(messages)
        asked, told = self.render(messages[:-1], tools), self.render(messages, tools, header=False)
        thinking = ""
        if self._opens_thinking(asked) and not told.startswith(asked):  # templates that leave out the thinking that they ask for
            asked = asked.rstrip()[: -len(THINK)]
            thinking = f"{messages[-1].get('reasoning_content', '').strip()}\n{THINK_END}\n\n"
        if not told.startswith(asked):
            remedy = "see renderer.enable_thinking and renderer.name, or give another template with model.chat_template"
            raise RendererError(f"the chat template does not write an answer behind the prompt that asks for it; {remedy}")
        said = told[len(asked) :]
        text = thinking + (said.rpartition(self.end)[0] if self.end else said.removesuffix(self.closing))
        if not self.stop_token_ids:
            raise RendererError("neither the chat template nor the tokenizer has a token that ends an answer; give model.chat_template")
        # Encoded behind the header: some tokenizers treat the start of a text differently.
        header, whole = self.encode(self.header), self.encode(self.header + text)
        ids = whole[len(header) :] if whole[: len(header)] == header else self.encode(text)
        return [*ids, self.stop_token_ids[0]]

    def _behind_answer(self, messages: list[Message], num_old: int, tools: list[Tool] | None) -> str | None:
        """What the template puts behind the end of the last old answer; None if it also changes what is before that answer.

        Old answers are rendered without what they say, so neither their thinking nor an end of turn spelled in them matters.
        """
        old = [hollow(message, self.end) for message in messages[:num_old]]
        asked = self.render(old[:-1], tools)
        head, found, rest = self.render([*old[:-1], {**old[-1], "content": PLACEHOLDER}, *messages[num_old:]], tools).partition(PLACEHOLDER)
        _, ended, behind = rest.partition(self.end)
        return behind if found and ended and asked.startswith(head) else None

    def _is_faithful(self, before: list[int], messages: list[Message], behind: str, tools: list[Tool] | None) -> bool:
        """Whether the template keeps exactly the thinking that `before` has."""
        full = self.render(messages, tools)
        kept = full.removesuffix(self.end + behind)
        return kept != full and kept.count(THINK_END) == self.text(before).count(THINK_END)

    def _opens_thinking(self, prompt: str) -> bool:
        return self.thinks and prompt.rstrip().endswith(THINK)

    def _close_of_thinking(self, before: list[int]) -> list[int]:
        """An answer cut off while thinking must not leave the next messages inside its thinking."""
        answer = self.text(before).rpartition(self.header)[2] if self.header and self.thinks else ""
        is_open = self._opens_thinking(self.header) or answer.lstrip().startswith(THINK)
        return self.encode(f"\n{THINK_END}\n\n") if is_open and THINK_END not in answer else []

    def parse(self, completion_ids: list[int], tools: list[Tool] | None = None, prompt_ids: list[int] | None = None) -> Answer:
        text, thinking = self.text([id for id in self.said(completion_ids) if id not in self.hidden_ids]), None
        if self.thinks:
            thinking, text = read_thinking(text, self._opens_thinking(self.text(prompt_ids[-8:]) if prompt_ids else self.header))
        if not tools:
            return Answer(text, thinking, [], [])
        content, calls, bad = read_calls(text)
        return Answer(content, thinking, self.numbered(calls, completion_ids, prompt_ids), bad)


def hollow(message: Message, end: str) -> Message:
    """An answer without what it says; which tools it called stays, for templates look results up by it."""
    if message["role"] != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": "-"}
    if calls := rest.get("tool_calls"):
        names = [call["function"]["name"].replace(end, "") for call in calls]
        rest["tool_calls"] = [{**call, "function": {"name": name, "arguments": "{}"}} for call, name in zip(calls, names, strict=True)]
    return rest


class ChatMLRenderer(TemplateRenderer):
    """A template that leaves tools out, with tools, calls and results as text in its messages. Without them it is the template."""

    def __init__(self, tokenizer: Any, config: RendererConfig):
        self.default_system = ""
        super().__init__(tokenizer, config)
        before = self.render(ASKED).partition(QUESTION)[0]
        self.default_system = before.partition(f"{IM_START}system\n")[2].partition(IM_END)[0]

    def prepared(self, messages: list[Message], tools: list[Tool] | None) -> tuple[list[Message], None]:
        told: list[Message] = []
        for at, message in enumerate(messages):
            if message["role"] == "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if at and messages[at - 1]["role"] == "tool":
                    told[-1] = {"role": "user", "content": f"{told[-1]['content']}\n{result}"}
                else:
                    told.append({"role": "user", "content": result})
            elif calls := message.get("tool_calls"):
                texts = [message["content"], *map(call_text, calls)]
                rest = {key: value for key, value in message.items() if key != "tool_calls"}
                told.append({**rest, "content": "\n".join(text for text in texts if text)})
            else:
                told.append(message)
        if tools:
            own = told.pop(0)["content"] if told and told[0]["role"] == "system" else self.default_system
            told.insert(0, {"role": "system", "content": "\n\n".join(text for text in (own, tools_text(tools)) if text)})
        return told, None


def tools_text(tools: list[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nThese functions can be called, one JSON description in each line:\n<tools>\n{lines}\n</tools>\n\n"
        "A call is a JSON object with the function's name and its arguments, between tags; write one block for each call:\n"
        f'{CALL}\n{{"name": "the-function", "arguments": {{"an-argument": "its value"}}}}\n{CALL_END}\n'
        "You get the results between <tool_response> and </tool_response>."
    )
