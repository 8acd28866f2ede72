"""Renderers of the `renderers` package, the choice of a model's renderer, and the token ids of
conversations that are given as text: those that the policy would have been sent and would have had
to sample. Importing this module is light.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl.config.run import RendererConfig
from rl.models import probes
from rl.models.chat import (
    CALL,
    THINK,
    THINK_END,
    Answer,
    Message,
    RendererError,
    Tool,
    arguments_object,
    arguments_text,
    checked_call,
    read_calls,
    wire,
)
from rl.models.template import (
    IM_END,
    IM_START,
    BaseRenderer,
    ChatMLRenderer,
    Ids,
    TemplateRenderer,
    Tools,
)
from rl.models.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

JSON_CALL = re.compile(rf"\s*{CALL}\s*\{{")
PACKAGE_ERRORS = (AssertionError, AttributeError, KeyError, TypeError, ValueError)
"""Exceptions that the package's renderers raise for a tokenizer or messages that do not fit
their model."""


class PackageRenderer(BaseRenderer):
    """A renderer of the `renderers` package, which has one for each model family. Its methods are
    those of TemplateRenderer."""

    def __init__(self, tokenizer: Any, config: RendererConfig, name: str):
        from renderers.base import create_renderer
        from renderers.configs import config_from_name

        super().__init__(tokenizer, config)
        self.name = name
        settings: dict[str, Any] = {}
        if config.thinking_retention != "template":
            settings["thinking_retention"] = config.thinking_retention
        try:
            kind = type(config_from_name(name))
            if config.enable_thinking is not None and "enable_thinking" in kind.model_fields:
                settings["enable_thinking"] = config.enable_thinking
            self.inner = create_renderer(tokenizer, kind(**settings))
        except PACKAGE_ERRORS as error:
            raise RendererError(
                f'renderer.name = "{name}" does not fit this model: {error}; use "auto" or '
                "another name"
            ) from error
        self.stop_token_ids = list(self.inner.get_stop_token_ids())
        self.header = self.render(probes.ASK)[len(self.render(probes.ASK, header=False)) :]

    def render(self, messages: list[Message], tools: Tools = None, header: bool = True) -> Ids:
        try:
            ids = self.inner.render_ids(
                self.wire(messages), tools=tools or None, add_generation_prompt=header
            )
        except PACKAGE_ERRORS as error:
            raise RendererError(
                f'renderer "{self.name}" cannot render these messages: {error}; change them, '
                "or renderer.name"
            ) from error
        return self.unmarked(list(ids))

    def prompt_ids(self, messages: list[Message], tools: Tools = None) -> Ids:
        return self.render(messages, tools)

    def next_prompt_ids(
        self, before: Ids, messages: list[Message], num_old: int, tools: Tools = None
    ) -> Ids | None:
        size = len(self.header)
        for at in range(len(before), size - 1, -1):
            if before[at - size : at] == self.header:
                bridge = self.inner.bridge_to_next_turn(
                    before[:at], before[at:], self.wire(messages[num_old:]), tools=tools or None
                )
                if bridge and bridge.token_ids[: len(before)] == before:
                    return before + self.unmarked(list(bridge.token_ids[len(before) :]))
                return None
        return None

    def answer_ids(self, messages: list[Message], tools: Tools = None) -> Ids:
        prompt, ids = self.render(messages[:-1], tools), self.render(messages, tools, header=False)
        if ids[: len(prompt)] != prompt:
            raise RendererError(
                f'renderer "{self.name}" does not write an answer directly after its prompt; see '
                'renderer.enable_thinking, or set renderer.name = "template"'
            )
        answer = ids[len(prompt) :]
        stops = [at for at, id in enumerate(answer) if id in self.stop_token_ids]
        if stops:
            return answer[: stops[-1] + 1]
        # GLM writes nothing after an answer: it ends with the role of whoever speaks next.
        role = self.tokenizer.convert_tokens_to_ids(
            "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
        )
        return [*answer, role if role in self.stop_token_ids else self.stop_token_ids[0]]

    def parse(
        self, completion_ids: Ids, tools: Tools = None, prompt_ids: Ids | None = None
    ) -> Answer:
        answer = self.until_stop(completion_ids)
        try:
            parsed = self.inner.parse_response(
                completion_ids, tools=tools or None, prompt_ids=prompt_ids
            )
        # more digits or nesting than Python's JSON parses: see chat.read_call
        except (ValueError, RecursionError):
            return Answer(self.text(answer), None, [], [self.text(answer)] if tools else [])
        calls, bad = [], []
        for call in parsed.tool_calls:
            written = self.text(answer[slice(*call.token_span)]) if call.token_span else call.raw
            good = None
            if call.status in ("ok", "unknown_tool") and tools:
                good = checked_call(call.name, call.arguments)
            # of a key twice, or another than `arguments`, the package says nothing
            if good and JSON_CALL.match(written):
                good = next(iter(read_calls(written)[1]), None)
            if good:
                calls.append(good)
            else:
                bad.append(written)
        content = "\n".join(filter(None, (parsed.content, *bad)))
        calls = self.with_ids(calls, completion_ids, prompt_ids)
        return Answer(content, parsed.reasoning_content, calls, bad if tools else [])


Renderer = TemplateRenderer | PackageRenderer


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
"""Token of the vocabulary -> the package's renderers for models with that token."""


def load_renderer(
    model_path: str, config: RendererConfig, *, trust_remote_code: bool = False
) -> Renderer:
    """The renderer for a model folder, which already contains the template that model.chat_template
    names.

    Raises RendererError, and RunError if the tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    name, why = config.name, "configured"
    if name == "auto":
        name, why = choose(tokenizer, model_path)
    renderer = build(tokenizer, config, name)
    log.info(
        "renderer %s: %s; tools %s",
        name,
        why,
        "can be used" if renderer.supports_tools else "cannot be shown to the model",
    )
    return renderer


def build(tokenizer: Any, config: RendererConfig, name: str) -> Renderer:
    if name not in ("template", "chatml"):
        return PackageRenderer(tokenizer, config, name)
    if not tokenizer.chat_template:
        raise RendererError(
            "the model's tokenizer has no chat template; set model.chat_template to chatml "
            "or a file"
        )
    return (TemplateRenderer if name == "template" else ChatMLRenderer)(tokenizer, config)


def choose(tokenizer: Any, model_path: str) -> tuple[str, str]:
    """Chooses a renderer by the model's published name if its template is unchanged, else by
    what its template does. Returns its name and the reason."""
    from renderers.base import MODEL_RENDERER_MAP

    published, inherited = published_names(tokenizer, model_path)
    if published in MODEL_RENDERER_MAP:  # a folder with another template is outside the hub's cache
        return MODEL_RENDERER_MAP[published], f"known for {published}"
    template = build(tokenizer, RendererConfig(), "template")
    vocabulary = tokenizer.get_vocab()
    names = [MODEL_RENDERER_MAP[inherited]] if inherited in MODEL_RENDERER_MAP else []
    names += [name for token, names in CANDIDATES.items() if token in vocabulary for name in names]
    for name in dict.fromkeys(names):
        if agrees(tokenizer, name, template):
            return (
                name,
                f"it equals the model's template on {len(probes.CONVERSATIONS)} "
                "conversations with and without tools",
            )
    if template.supports_tools:
        return "template", "the model's template shows tools, and no specific renderer matches it"
    if f"{IM_START}user\n{probes.QUESTION}{IM_END}\n{IM_START}assistant\n" in template.render(
        probes.ASK
    ):
        return "chatml", "the model's template is ChatML and shows no tools"
    return "template", "no specific renderer matches the model's template"


def published_names(tokenizer: Any, model_path: str) -> tuple[str, str]:
    """Returns the hub's name for this very model, and that of the model it was made from, whose
    template may differ; "" if unknown."""
    # the layout of the hub's cache
    cached = next((part for part in Path(model_path).parts if part.startswith("models--")), "")
    config = Path(model_path) / "config.json"
    inherited = json.loads(config.read_text()).get("_name_or_path", "") if config.is_file() else ""
    return cached.removeprefix("models--").replace(
        "--", "/", 1
    ) or tokenizer.name_or_path, inherited


def agrees(tokenizer: Any, name: str, template: TemplateRenderer) -> bool:
    """Whether a renderer of the package gives the template's ids on every probe conversation."""
    try:
        renderer = PackageRenderer(tokenizer, RendererConfig(thinking_retention="template"), name)
        return all(
            renderer.prompt_ids(messages, tools)
            == template.encode(template.render(messages, tools))
            for messages, tools in probes.CONVERSATIONS
        )
    except RendererError:
        return False


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
