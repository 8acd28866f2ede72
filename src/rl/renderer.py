"""Chat messages to token ids, and sampled ids back to messages, exactly: over turns and tools. Which renderer a model gets.

This module knows neither environments nor training; importing it is light.
"""

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from rl.chat import Answer, Message, RendererError, Tool, ToolCall, checked_call, wire
from rl.renderer_config import RendererConfig
from rl.template_renderer import (
    ASKED,
    CALLED,
    CYCLE,
    IM_END,
    IM_START,
    PROBE_TOOL,
    QUESTION,
    ChatMLRenderer,
    TemplateRenderer,
    TokenizerRenderer,
)

log = logging.getLogger(__name__)

__all__ = ["Answer", "Message", "Renderer", "RendererError", "Tool", "ToolCall", "load_renderer"]

PROBES: list[tuple[list[Message], list[Tool] | None]] = [
    (ASKED, None),
    ([{"role": "system", "content": "Be brief."}, *ASKED], None),
    ([*ASKED, {"role": "assistant", "content": "b", "reasoning_content": "Hm."}, {"role": "user", "content": "And now?"}], None),
    ([{"role": "system", "content": "Be brief."}, *ASKED], [PROBE_TOOL]),
    ([*CYCLE, {**CYCLE[-1], "content": "more"}], [PROBE_TOOL]),
    ([*ASKED, {**CALLED, "content": "I look.", "reasoning_content": "Hm."}, *CYCLE[2:]], [PROBE_TOOL]),
]
"""A renderer that agrees with a model's template on these has the model's format."""


class Renderer(Protocol):
    """Messages to ids and back for one model."""

    stop_token_ids: list[int]
    supports_tools: bool

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        """Ids of a conversation up to where the assistant's answer begins. Raises RendererError."""

    def next_prompt_ids(
        self, before: list[int], messages: list[Message], num_old: int, tools: list[Tool] | None = None
    ) -> list[int] | None:
        """Ids of a conversation whose first `num_old` messages are already in `before`, prompt and sampled answer, id for id.

        The result starts with `before`; an answer that was cut off is closed. None if that cannot be, because the template rewrites
        earlier messages: then the caller renders anew. Raises RendererError.
        """

    def answer_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        """Ids that the policy has to sample, behind the prompt of the others, to say the last message, the assistant's; with the token
        that ends it. What the template leaves out is not among them. Raises RendererError."""

    def parse(self, completion_ids: list[int], tools: list[Tool] | None = None, prompt_ids: list[int] | None = None) -> Answer:
        """The answer in sampled ids, up to the first stop token. Without `tools` nothing is taken for a call.

        `prompt_ids` tells whether the prompt opened the thinking, and makes the ids of calls unique within a conversation.
        """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


UNFIT = (AssertionError, AttributeError, KeyError, TypeError, ValueError)
"""What a renderer of the package raises for a tokenizer or a message that is not of its model."""


class PackageRenderer(TokenizerRenderer):
    """A renderer of the `renderers` package, written for one family of models."""

    def __init__(self, tokenizer: Any, config: RendererConfig, name: str):
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        super().__init__(tokenizer)
        self.name = name
        try:
            kind = type(config_from_name(name))
            retention = {} if config.thinking_retention == "template" else {"thinking_retention": config.thinking_retention}
            switch = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
            self.inner = create_renderer(tokenizer, kind(**retention, **{key: switch[key] for key in switch if key in kind.model_fields}))
        except UNFIT as error:
            raise RendererError(f'renderer.name = "{name}" does not fit this model: {error}; use "auto" or another name') from error
        self.stop_token_ids = list(self.inner.get_stop_token_ids())
        with_header, without = self.render(ASKED), self.render(ASKED, header=False)
        self.header = with_header[len(without) :]

    def render(self, messages: list[Message], tools: list[Tool] | None = None, header: bool = True) -> list[int]:
        try:
            return list(self.inner.render_ids(wire(messages), tools=tools or None, add_generation_prompt=header))
        except UNFIT as error:
            raise RendererError(f'renderer "{self.name}" cannot render these messages: {error}; change them, or renderer.name') from error

    def prompt_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        return self.render(messages, tools)

    def next_prompt_ids(
        self, before: list[int], messages: list[Message], num_old: int, tools: list[Tool] | None = None
    ) -> list[int] | None:
        size = len(self.header)
        starts = (at for at in range(len(before), size - 1, -1) if before[at - size : at] == self.header)
        answer_at = next(starts, None)
        if answer_at is None:
            return None
        bridge = self.inner.bridge_to_next_turn(before[:answer_at], before[answer_at:], wire(messages[num_old:]), tools=tools or None)
        return list(bridge.token_ids) if bridge and bridge.token_ids[: len(before)] == before else None

    def answer_ids(self, messages: list[Message], tools: list[Tool] | None = None) -> list[int]:
        asked, told = self.render(messages[:-1], tools), self.render(messages, tools, header=False)
        if told[: len(asked)] != asked:
            remedy = 'see renderer.enable_thinking, or set renderer.name = "template"'
            raise RendererError(f'renderer "{self.name}" does not write an answer behind the prompt that asks for it; {remedy}')
        said = told[len(asked) :]
        last = max((at for at, id in enumerate(said) if id in self.stop_token_ids), default=None)
        return said[: last + 1] if last is not None else [*said, self.stop_token_ids[0]]

    def parse(self, completion_ids: list[int], tools: list[Tool] | None = None, prompt_ids: list[int] | None = None) -> Answer:
        said = self.said(completion_ids)
        try:
            parsed = self.inner.parse_response(completion_ids, tools=tools or None, prompt_ids=prompt_ids)
        except (ValueError, RecursionError):  # digits or nesting beyond what Python's JSON reads: see chat.read_call
            return Answer(self.text(said), None, [], [self.text(said)] if tools else [])
        calls, others = [], []
        for call in parsed.tool_calls:
            good = checked_call(call.name, call.arguments) if call.status in ("ok", "unknown_tool") and tools else None
            if good:
                calls.append(good)
            else:
                others.append(self.text(said[slice(*call.token_span)]) if call.token_span else call.raw)
        content = "\n".join(text for text in (parsed.content, *others) if text)
        return Answer(content, parsed.reasoning_content, self.numbered(calls, completion_ids, prompt_ids), others if tools else [])


CANDIDATES = {
    IM_START: ("qwen3", "qwen3.5", "qwen3.6", "prime-qwen3", "nemotron-3"),
    "<|start_header_id|>": ("llama-3",),
    "[gMASK]": ("glm-4.5", "glm-5"),
    "<|channel|>": ("gpt-oss",),
    "<\uff5cUser\uff5c>": ("deepseek-v3", "deepseek-r1"),
    "<|im_middle|>": ("kimi-k2",),
    "]~b]": ("minimax-m2",),
    "<|turn>": ("gemma4",),
}
"""A token of the vocabulary, and the package's renderers for models that have it."""


def load_renderer(model_path: str, config: RendererConfig, chat_template: str | None = None) -> Renderer:
    """The renderer for a model folder. `chat_template`: a Jinja text, or a file with one, instead of the model's. Raises RendererError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    if chat_template:
        tokenizer.chat_template = chat_template if "{" in chat_template else Path(chat_template).read_text()
    name, why = (config.name, "configured") if config.name != "auto" else choose(tokenizer, model_path, bool(chat_template))
    renderer = build(tokenizer, config, name)
    log.info("renderer %s: %s; tools %s", name, why, "can be used" if renderer.supports_tools else "cannot be shown to the model")
    return renderer


def build(tokenizer: Any, config: RendererConfig, name: str) -> Renderer:
    if name not in ("template", "chatml"):
        return PackageRenderer(tokenizer, config, name)
    if not tokenizer.chat_template:
        raise RendererError("the model's tokenizer has no chat template; give one with model.chat_template = file.jinja")
    return (TemplateRenderer if name == "template" else ChatMLRenderer)(tokenizer, config)


def choose(tokenizer: Any, model_path: str, other_template: bool) -> tuple[str, str]:
    """(name, why): by the model's published name if its template is its own, else by what its template does."""
    from renderers.base import MODEL_RENDERER_MAP

    published, inherited = published_names(tokenizer, model_path)
    if published in MODEL_RENDERER_MAP and not other_template:
        return MODEL_RENDERER_MAP[published], f"known for {published}"
    template = build(tokenizer, RendererConfig(), "template")
    vocabulary = tokenizer.get_vocab()
    names = [MODEL_RENDERER_MAP[inherited]] if inherited in MODEL_RENDERER_MAP else []
    names += [name for token, names in CANDIDATES.items() if token in vocabulary for name in names]
    for name in dict.fromkeys(names):
        if agrees(tokenizer, name, template):
            return name, f"it equals the model's template on {len(PROBES)} conversations with and without tools"
    if template.supports_tools:
        return "template", "the model's template shows tools, and no specific renderer equals it"
    if f"{IM_START}user\n{QUESTION}{IM_END}\n{IM_START}assistant\n" in template.render(ASKED):
        return "chatml", "the model's template is ChatML and shows no tools"
    return "template", "no specific renderer equals the model's template"


def published_names(tokenizer: Any, model_path: str) -> tuple[str, str]:
    """The hub's name for exactly this model, and the one that it was made from (its template may have changed); "" if unknown."""
    cached = next((part for part in Path(model_path).parts if part.startswith("models--")), "")  # the layout of the hub's cache
    config = Path(model_path) / "config.json"
    inherited = json.loads(config.read_text()).get("_name_or_path", "") if config.is_file() else ""
    return cached.removeprefix("models--").replace("--", "/", 1) or tokenizer.name_or_path, inherited


def agrees(tokenizer: Any, name: str, template: TemplateRenderer) -> bool:
    """Whether a renderer of the package gives the template's ids on every probe."""
    try:
        renderer = PackageRenderer(tokenizer, RendererConfig(thinking_retention="template"), name)
        return all(renderer.prompt_ids(messages, tools) == template.encode(template.render(messages, tools)) for messages, tools in PROBES)
    except RendererError:
        return False
