"""The interface of renderers, and two that use a model's own chat template: unchanged, or with
tools written as text if it has none.

The ids of earlier turns are never encoded again, because sampled ids need not be those that the
tokenizer would choose. The messages of a later turn are rendered alone and appended.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.chat import (
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
    is_unicode,
    read_calls,
    read_thinking,
    wire,
    with_arguments,
)
from rl.models.tokenizer import named_ends, text_ids

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
PLACEHOLDER = "RL-PLACEHOLDER"
"""Stands for an answer, to find the text that a template puts after it."""
MARK = "\ufdd0"
"""A character that no text has. Within a special token's text it makes ordinary text of it."""


Ids = list[int]
Tools = list[Tool] | None


class BaseRenderer:
    """What all renderers have. They turn chat messages into the token ids of one model, and sampled
    ids back into messages, exactly, across turns and tools."""

    supports_tools = True
    stop_token_ids: Ids
    fault = ""
    """Why the model hardly knows where its answers begin or end; empty if nothing seems wrong."""

    def __init__(self, tokenizer: Any, config: RendererConfig):
        self.tokenizer = tokenizer
        alone, marked = (
            tokenizer.encode(text, add_special_tokens=False) for text in ("a", f"a{MARK}")
        )
        self.mark_ids: Ids = marked[len(alone) :]
        self.as_text: list[str] = []
        """Special tokens that are text where a user or a tool spells them."""
        self.special_ids = {
            id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        } | set(tokenizer.all_special_ids)
        written = self.special_ids.intersection(self.encode(str(tokenizer.chat_template)))
        self.structure = written.difference(
            tokenizer.convert_tokens_to_ids([CALL, CALL_END, THINK, THINK_END])
        )
        """The special tokens that the template writes. Others may be a user's own tags, which
        are text of an answer."""
        special = self.structure | {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
        # a tokenizer without bytes drops MARK, or has only its unknown token for it
        if self.text(marked) == f"a{MARK}" and not config.special_tokens_in_text:
            self.as_text = tokenizer.convert_ids_to_tokens([*special])

    def unmarked(self, ids: Ids) -> Ids:
        """Ids without those of MARK."""
        if not self.as_text or self.mark_ids[-1] not in ids:
            return ids
        text, mark = (f" {' '.join(map(str, numbers))} " for numbers in (ids, self.mark_ids))
        return [*map(int, text.replace(mark, " ").split())]

    def wire(self, messages: list[Message]) -> list[Message]:
        """As `chat.wire`, with MARK in each special token that users and tools spell."""
        messages = wire(messages)
        for message in messages:
            for token in self.as_text if message["role"] in ("user", "tool") else ():
                marked = token[0] + MARK + token[1:]
                message["content"] = message["content"].replace(token, marked)
        return messages

    def encode(self, text: str) -> Ids:
        """The ids of text. Raises RendererError if it has half of a character."""
        return self.unmarked(self.tokenizer.encode(whole(text), add_special_tokens=False))

    def text_ids(self, text: str) -> Ids:
        """The ids of a prompt that is plain text; see tokenizer.text_ids."""
        return text_ids(self.tokenizer, whole(text))

    def decode(self, ids: Ids) -> str:
        """The text of sampled ids before the first stop token."""
        return self.text([id for id in self.until_stop(ids) if id not in self.structure])

    def text(self, ids: Ids) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def until_stop(self, ids: Ids) -> Ids:
        """Sampled ids before the first stop token."""
        return ids[: next((at for at, id in enumerate(ids) if id in self.stop_token_ids), len(ids))]

    def check_tools(self, tools: Tools) -> None:
        if tools and not self.supports_tools:
            raise RendererError(
                "the model's chat template does not show tools to the model, or not in a "
                "known format; "
                'set renderer.name = "chatml" to describe them in the system message, or set '
                "model.chat_template to another template"
            )

    def with_ids(
        self, calls: list[tuple[str, str]], completion_ids: Ids, prompt_ids: Ids | None
    ) -> list[ToolCall]:
        """Turns pairs (name, arguments) into calls with ids that depend only on the tokens."""
        if not calls:  # of most answers; to write all ids takes milliseconds
            return []
        tokens = repr((prompt_ids, completion_ids)).encode()
        digest = hashlib.blake2b(tokens, digest_size=8).hexdigest()
        return [ToolCall(f"call_{digest}_{at}", *call) for at, call in enumerate(calls)]


def whole(text: str) -> str:
    """Returns text that can be encoded. Raises RendererError if it has half of a character."""
    if not is_unicode(text):
        raise RendererError(
            "a message has half of a character, like \\ud83d, which cannot be encoded; remove it"
        )
    return text


class TemplateRenderer(BaseRenderer):
    """Renders with the model's own chat template; a later turn is text appended after the
    previous turn's end-of-turn token."""

    def __init__(self, tokenizer: Any, config: RendererConfig):
        super().__init__(tokenizer, config)
        self.retention = config.thinking_retention
        self.switches = (
            {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
        )
        self.thinks = THINK_END in str(tokenizer.chat_template)
        self.dict_arguments = False
        prompt, without = self.render(probes.ASK), self.render(probes.ASK, header=False)
        self.header = prompt.removeprefix(without) if prompt.startswith(without) else ""
        answered = [*probes.ASK, {"role": "assistant", "content": PLACEHOLDER}]
        opening, _, self.closing = self.render(answered, header=False).rpartition(PLACEHOLDER)
        self.end_id = next((id for id in self.encode(self.closing) if id in self.special_ids), None)
        self.end = "" if self.end_id is None else tokenizer.convert_ids_to_tokens(self.end_id)
        ends = [self.end_id, tokenizer.eos_token_id, *named_ends(Path(tokenizer.name_or_path))]
        self.stop_token_ids = [id for id in dict.fromkeys(ends) if id is not None]
        self.supports_tools = self._shows_tools()
        # a model that was trained with another template would not stop, or would begin with what
        # its template leaves out
        opening = opening.removeprefix(without)
        if self.end_id is None:
            self.fault = (
                "the chat template writes no special token after an answer: a model that was not "
                "fine-tuned with it hardly stops"
            )
        elif prompt == without and any(id in self.special_ids for id in self.encode(opening)):
            self.fault = (
                "the chat template ignores add_generation_prompt, so a prompt lacks "
                f"{opening.strip()!r}, with which an answer begins"
            )

    def _shows_tools(self) -> bool:
        """Whether the template writes tools, results, and calls in the form that chat.read_calls
        reads."""
        # some templates quote a string again, others do not accept one
        for self.dict_arguments in (False, True):
            try:
                prompt = self.render(probes.ASK, [probes.TOOL])
                cycle = self.render(probes.TOOL_CYCLE, [probes.TOOL])
            except RendererError:
                continue
            calls = read_calls(cycle.rpartition(probes.QUESTION)[2])[1]
            shown = "probe_key" in prompt and probes.RESULT in cycle
            if shown and calls == [("probe_tool", probes.ARGUMENTS)]:
                return True
        self.dict_arguments = False
        return False

    def prepared(self, messages: list[Message], tools: Tools) -> tuple[list[Message], Tools]:
        """Messages and tools in the form that the template accepts."""
        if not self.dict_arguments:
            return messages, tools
        return [
            {**message, "tool_calls": [with_arguments(call, arguments_object) for call in calls]}
            if (calls := message.get("tool_calls"))
            else message
            for message in messages
        ], tools

    def render(self, messages: list[Message], tools: Tools = None, header: bool = True) -> str:
        """The conversation as text; `header` adds the text that the template writes before an
        answer. Raises RendererError."""
        from jinja2 import TemplateError

        messages, tools = self.prepared(messages, tools)
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools or None,
                tokenize=False,
                add_generation_prompt=header,
                **self.switches,
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            remedy = "change them, or set model.chat_template to another template"
            raise RendererError(
                f"the model's chat template cannot render messages of {roles}: {error}; {remedy}"
            ) from error

    def prompt_ids(self, messages: list[Message], tools: Tools = None) -> Ids:
        """The ids of a conversation up to the start of the assistant's answer. Raises
        RendererError."""
        self.check_tools(tools)
        return self.encode(self.render(self.wire(messages), tools))

    def next_prompt_ids(
        self, before: Ids, messages: list[Message], num_old: int, tools: Tools = None
    ) -> Ids | None:
        """The ids of a conversation whose first `num_old` messages are already in `before`: the
        last prompt and the sampled answer.

        The result starts with `before`, id for id; an answer that was cut off is closed. None if
        the template rewrites earlier messages: then the caller renders the whole conversation
        again. Raises RendererError.
        """
        self.check_tools(tools)
        messages = self.wire(messages)
        if self.end_id is None or num_old < 2 or messages[num_old - 1]["role"] != "assistant":
            return None
        behind = self._behind_answer(messages, num_old, tools)
        if behind is None:
            return None
        ids = list(before)
        if before[-1] not in self.stop_token_ids:
            ids += [*self._close_of_thinking(before), self.end_id]
        has_user = any(message["role"] == "user" for message in messages[num_old:])
        if self.retention != "all" and (self.retention != "tool_cycle" or has_user):
            # the template must keep exactly the thinking that is there
            full = self.render(messages, tools)
            kept = full.removesuffix(self.end + behind)
            if kept == full or kept.count(THINK_END) != self.text(ids).count(THINK_END):
                return None
        # Encoded together with the preceding token: some tokenizers treat the start of a text, or
        # the space after a token, differently.
        new = self.encode(self.end + behind)
        return [*ids, *new[new.index(self.end_id) + 1 :]]

    def answer_ids(self, messages: list[Message], tools: Tools = None) -> Ids:
        """The ids that the policy would sample after all earlier messages to produce the last
        one, the assistant's, including the token that ends it. Text that the template leaves out
        is not included. Raises RendererError."""
        self.check_tools(tools)
        messages = self.wire(messages)
        prompt, text = self.render(messages[:-1], tools), self.render(messages, tools, header=False)
        thinking = ""
        # some templates leave out the thinking that they ask for
        if self._opens_thinking(prompt) and not text.startswith(prompt):
            prompt = prompt.rstrip()[: -len(THINK)]
            thinking = f"{messages[-1].get('reasoning_content', '').strip()}\n{THINK_END}\n\n"
        if not text.startswith(prompt):
            raise RendererError(
                "the chat template does not write an answer directly after its prompt; see "
                "renderer.enable_thinking and renderer.name, or set model.chat_template to "
                "another template"
            )
        if not self.stop_token_ids:
            raise RendererError(
                "neither the chat template nor the tokenizer has a token that ends an "
                "answer; set model.chat_template"
            )
        answer = text.removeprefix(prompt)
        answer = answer.rpartition(self.end)[0] if self.end else answer.removesuffix(self.closing)
        # Encoded together with the header: some tokenizers treat the start of a text differently.
        header, ids = self.encode(self.header), self.encode(self.header + thinking + answer)
        if ids[: len(header)] != header:
            header, ids = [], self.encode(thinking + answer)
        return [*ids[len(header) :], self.stop_token_ids[0]]

    def _behind_answer(self, messages: list[Message], num_old: int, tools: Tools) -> str | None:
        """The text that the template writes after the end of the last old answer; None if it also
        changes the text before that answer.

        Old answers are rendered without their text, so that neither their thinking nor an end of
        turn spelled out in them matters.
        """
        old = [without_text(message, self.end) for message in messages[:num_old]]
        prompt = self.render(old[:-1], tools)
        text = self.render(
            [*old[:-1], {**old[-1], "content": PLACEHOLDER}, *messages[num_old:]], tools
        )
        head, _, rest = text.partition(PLACEHOLDER)
        _, ended, behind = rest.partition(self.end)
        is_unique = text.count(PLACEHOLDER) == 1  # unless a message spells it
        return behind if is_unique and ended and prompt.startswith(head) else None

    def _opens_thinking(self, prompt: str) -> bool:
        return self.thinks and prompt.rstrip().endswith(THINK)

    def _close_of_thinking(self, before: Ids) -> Ids:
        """The ids that close the thinking of an answer that was cut off in it, so that later
        messages do not become part of it."""
        answer = self.text(before).rpartition(self.header)[2] if self.header and self.thinks else ""
        is_open = self._opens_thinking(self.header) or answer.lstrip().startswith(THINK)
        return self.encode(f"\n{THINK_END}\n\n") if is_open and THINK_END not in answer else []

    def parse(
        self, completion_ids: Ids, tools: Tools = None, prompt_ids: Ids | None = None
    ) -> Answer:
        """Parses the answer in sampled ids, up to the first stop token. Without `tools` nothing is
        parsed as a call.

        `prompt_ids` shows whether the prompt opened the thinking, and makes the ids of calls unique
        within a conversation.
        """
        text, thinking = self.decode(completion_ids), None
        if self.thinks:
            prompt = self.text(prompt_ids[-8:]) if prompt_ids else self.header
            thinking, text = read_thinking(text, self._opens_thinking(prompt))
        content, calls, bad = read_calls(text) if tools else (text, [], [])
        return Answer(content, thinking, self.with_ids(calls, completion_ids, prompt_ids), bad)


def without_text(message: Message, end: str) -> Message:
    """A copy of an answer without text, thinking and arguments. Call names and ids stay, because
    templates look up results by them."""
    if message["role"] != "assistant":
        return message
    bare = {**message, "content": "-"}
    bare.pop("reasoning_content", None)
    if calls := bare.get("tool_calls"):
        bare["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"].replace(end, ""),
                    "arguments": "{}",
                },
            }
            for call in calls
        ]
    return bare


class ChatMLRenderer(TemplateRenderer):
    """Renders with a template that omits tools: writes tools, calls and results as text of its
    messages."""

    def __init__(self, tokenizer: Any, config: RendererConfig):
        self.default_system = ""
        super().__init__(tokenizer, config)
        before = self.render(probes.ASK).partition(probes.QUESTION)[0]
        self.default_system = before.partition(f"{IM_START}system\n")[2].partition(IM_END)[0]

    def prepared(self, messages: list[Message], tools: Tools) -> tuple[list[Message], None]:
        prepared: list[Message] = []
        for at, message in enumerate(messages):
            if message["role"] == "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if at and messages[at - 1]["role"] == "tool":
                    result = f"{prepared.pop()['content']}\n{result}"
                message = {"role": "user", "content": result}
            elif calls := message.get("tool_calls"):
                texts = [message["content"], *map(call_text, calls)]
                message = {**message, "content": "\n".join(filter(None, texts))}
                del message["tool_calls"]
            prepared.append(message)
        if tools:
            system = self.default_system
            if prepared and prepared[0]["role"] == "system":
                system = prepared.pop(0)["content"]
            content = "\n\n".join(filter(None, (system, tools_text(tools))))
            prepared.insert(0, {"role": "system", "content": content})
        return prepared, None


def tools_text(tools: list[Tool]) -> str:
    """The part of a system message that describes tools and how to call them."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nThese functions can be called, one JSON description in each "
        f"line:\n<tools>\n{lines}\n</tools>\n\n"
        "A call is a JSON object with the function's name and its arguments, between tags; "
        "write one block for each call:\n"
        f'{CALL}\n{{"name": "the-function", "arguments": {{"an-argument": "its '
        f'value"}}}}\n{CALL_END}\n'
        "You get the results between <tool_response> and </tool_response>."
    )
