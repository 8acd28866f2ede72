"""Chat completions with tokens in their messages, as NeMo Gym trains with them.

`choices[0].message` of an answer has its token ids and log-probabilities. When that message comes
back in a later turn, the new prompt begins with exactly those ids, which the chat template's
rendering of the text need not. But only if the conversation up to there is the one that was
answered: a client may have rewritten it.
"""

import json
import re
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from itertools import takewhile
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from rl.inference.engine import QUEUES, CutOffError, finished, version_spans
from rl.wire.messages import VersionSpan
from rl.wire.turns import answer_digest

FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
KEPT_ANSWERS = 1 << 16
THOUGHT = re.compile("<think>.*?</think>", re.DOTALL)


class Answers:
    """The newest answers by their digest: a digest of the conversation up to and including each,
    and its policy versions."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, tuple[bytes, list[VersionSpan]]] = OrderedDict()

    def keep(self, digest: str, conversation: bytes, versions: list[VersionSpan]) -> None:
        self.kept[digest] = conversation, versions
        self.kept.move_to_end(digest)
        if len(self.kept) > KEPT_ANSWERS:
            self.kept.popitem(last=False)

    def versions(self, digest: str) -> list[VersionSpan] | None:
        return self.kept[digest][1] if digest in self.kept else None


@dataclass
class Exchange:
    """A request that wants tokens, and what the engine answers."""

    body: dict[str, Any]
    queues: list[Any] = field(default_factory=list)
    output: Any = None


EXCHANGE: ContextVar[Exchange | None] = ContextVar("EXCHANGE", default=None)


class TokenChat(OpenAIServingChat):
    """vLLM's chat completions. It takes the place of the class of vLLM's own object, so it has
    no constructor."""

    answers: Answers

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Any = None
    ) -> Any:
        wanted = request.return_tokens_as_token_ids or request.return_token_ids
        several = request.stream or (request.n or 1) > 1
        if not (wanted and request.logprobs and raw_request) or several:
            return await super().create_chat_completion(request, raw_request)
        exchange = Exchange(await raw_request.json())
        if "skip_special_tokens" not in exchange.body:  # a user's own tags may be special tokens
            request.skip_special_tokens = False
        EXCHANGE.set(exchange)
        QUEUES.set(exchange.queues)
        response = await super().create_chat_completion(request, raw_request)
        if isinstance(response, ChatCompletionResponse):
            try:
                finished(exchange.output.outputs[0])
            except CutOffError as error:
                return self.create_error_response(
                    str(error), "ServiceUnavailableError", HTTPStatus.SERVICE_UNAVAILABLE
                )
            self.add_tokens(response.choices[0].message, exchange)
        return response

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """The engine's prompt: the ids of the newest earlier answer that is known, and what
        follows it."""
        rendered = await super().render_chat_request(request)
        exchange = EXCHANGE.get()
        if exchange is None or isinstance(rendered, ErrorResponse):
            return rendered
        if request.extract_structured_outputs() is not None:
            return self.create_error_response(
                "a grammar (response_format, tool_choice, or a parser that enforces schemas) would "
                "choose tokens: they are not the policy's own; leave it out"
            )
        if rendered[1][0].get("type") != "token":
            return rendered
        if (ids := await self.continued(exchange.body)) is not None:
            limit = self.model_config.max_model_len
            wanted = request.max_completion_tokens or request.max_tokens or 1
            if len(ids) + wanted > limit:
                return self.create_error_response(
                    f"This model's maximum context length is {limit} tokens, but the conversation "
                    f"has {len(ids)} tokens and {wanted} more are asked for"
                )
            rendered[1][0]["prompt_token_ids"] = ids
        return rendered

    async def continued(self, body: dict[str, Any]) -> list[int] | None:
        """The ids of a conversation, beginning with those of its last answer that has tokens;
        None if it cannot be continued."""
        messages = body["messages"]
        with_tokens = [
            number for number, m in enumerate(messages) if all(m.get(key) for key in FIELDS)
        ]
        if not with_tokens or with_tokens[-1] == len(messages) - 1:
            return None
        last = with_tokens[-1]
        answer, before, after = messages[last], messages[:last], messages[last + 1 :]
        prompt_ids, new_ids, logprobs = (answer[key] for key in FIELDS)
        try:
            digest = answer_digest(prompt_ids, new_ids, logprobs)
        except (TypeError, OverflowError):  # they are no token ids
            return None
        conversation, _ = self.answers.kept.get(digest, (b"", []))
        if conversation != conversation_digest([*before, answer], body):
            return None
        # what two renderings with other texts have in common at their ends follows the answer
        renderings = [
            await self.rendered(body | {"messages": [*before, marked(answer, text), *after]})
            for text in "-x"
        ]
        special = {*self.renderer.tokenizer.all_special_ids}
        pairs = zip(*map(reversed, renderings), strict=False)
        common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1]
        if len(common) == min(map(len, renderings)) or not special & {*common}:
            return None
        end = next(number for number, token in enumerate(common) if token in special)
        return [*prompt_ids, *new_ids, *common[end + (new_ids[-1] in special) :]]

    async def rendered(self, body: dict[str, Any]) -> list[int]:
        """The ids of a conversation as vLLM renders it."""
        request = ChatCompletionRequest.model_validate(body)
        rendered: Any = await self.online_renderer.render_chat(request)
        if isinstance(rendered, ErrorResponse):
            return []
        return list(rendered[1][0]["prompt_token_ids"])

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: Any, *args: Any, **options: Any
    ) -> Any:
        async def watched() -> Any:
            async for output in result_generator:
                if exchange := EXCHANGE.get():
                    exchange.output = output
                yield output

        return await super().chat_completion_full_generator(request, watched(), *args, **options)

    def add_tokens(self, message: Any, exchange: Exchange) -> None:
        """Puts an answer's tokens on its message, and keeps what its return is compared with."""
        answer, prompt_ids = exchange.output.outputs[0], list(exchange.output.prompt_token_ids)
        new_ids = list(answer.token_ids)
        choices = zip(new_ids, answer.logprobs or (), strict=True)
        logprobs = [entry[token].logprob for token, entry in choices]
        for key, value in zip(FIELDS, (prompt_ids, new_ids, logprobs), strict=True):
            setattr(message, key, value)
        messages = [*exchange.body["messages"], message.model_dump()]
        versions = version_spans(exchange.queues[0].version_starts, len(new_ids))
        digest = answer_digest(prompt_ids, new_ids, logprobs)
        self.answers.keep(digest, conversation_digest(messages, exchange.body), versions)


def marked(answer: dict[str, Any], text: str) -> dict[str, Any]:
    """An answer with `text` in place of its own. The names and ids of its calls stay, because
    templates look results up by them."""
    message = {"role": "assistant", "content": text}
    if calls := [*(answer.get("tool_calls") or ())]:
        function = calls[-1]["function"] | {"arguments": json.dumps({"x": text})}
        calls[-1] = calls[-1] | {"function": function}
        message["tool_calls"] = calls
    return message


def conversation_digest(messages: list[dict[str, Any]], body: dict[str, Any]) -> bytes:
    """A digest of what a conversation says, with the tools that are offered; not of reasoning,
    which clients keep in different places."""
    texts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            content = THOUGHT.sub("", content).strip()
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        calls = [[function.get(key) for key in ("name", "arguments")] for function in functions]
        texts.append((message["role"], content, calls, message.get("tool_call_id")))
    content = json.dumps([texts, body.get("tools"), body.get("chat_template_kwargs")])
    return blake2b(content.encode(), digest_size=16).digest()


def serve_tokens(app: Any) -> Answers:
    """Makes the chat completions of vLLM's app return tokens. Returns the answers that they will
    keep."""
    answers, chat = Answers(), getattr(app.state, "openai_serving_chat", None)
    if type(chat) is OpenAIServingChat:
        chat.__class__ = TokenChat
        chat.answers = answers
    return answers
