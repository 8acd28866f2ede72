"""Lets classic environments query the policy: verifiers' client interface on top of our
conversations, or of an endpoint."""

import os
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from pydantic import ValidationError
from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient
from verifiers.errors import InvalidModelResponseError
from verifiers.types import Response, ResponseMessage, ToolCall, Usage

from rl.envs.policy import Conversation, Policy, RolloutError
from rl.models.chat import Answer, Message, Tool, chat_call
from rl.wire.inference_client import PromptTooLongError
from rl.wire.turns import Turn, Turns
from rl.wire.worker_messages import Endpoint, PlayOrder

NativeResponse = tuple[int, Turn, Answer]
"""An answer, preceded by its index in the client's turns."""
ENDPOINT_RETRIES = 4
"""Retries of a request to an endpoint: such servers have rate limits."""


def chat_message(message: Any) -> Message:
    """Converts a verifiers message (object or dict) to chat API form, without empty fields.
    Plain text gets the role `user`."""
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = [
            part if isinstance(part, dict) else part.model_dump(exclude_none=True)
            for part in content
        ]
    plain = {"role": "user" if role == "text" else role, "content": content or ""}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if value := message.get(key):
            plain[key] = value
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [chat_call(call) for call in calls]
    return plain


def chat_tool(tool: Any) -> Tool:
    """Converts a verifiers tool (object or dict) to chat API form."""
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool.get(key) for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def completion_prompt(messages: list[Any]) -> str:
    """Joins messages into one text, for completion style. Unlike verifiers' own client, puts no
    empty line after an answer, so that the answer's ids can be kept."""
    text, after_answer = "", True
    for message in messages:
        plain = chat_message(message)
        content, is_answer = plain["content"], plain["role"] == "assistant"
        if not isinstance(content, str):
            content = " ".join(part.get("text", "") for part in content)
        text += content if after_answer or is_answer else f"\n\n{content}"
        after_answer = is_answer
    return text


class TextConversation(Conversation):
    """A conversation in completion style: text in, text out. A prompt that begins with an
    earlier turn's text continues its ids."""

    async def answer(
        self, text: Any, tools: list[Tool] | None, overrides: dict[str, Any]
    ) -> tuple[Turn, Answer]:
        """The policy's continuation of a text; tools are ignored. Raises the errors of
        `Policy.sample`."""
        renderer = self.policy.renderer
        for before in reversed(self.history):
            known = "".join(before.messages)
            if text.startswith(known):
                ids = self.turns.token_ids(before.index) + renderer.encode(text[len(known) :])
                break
        else:
            ids = renderer.text_ids(text)
        turn = await self.sample(ids, overrides)
        completion = renderer.decode(turn.completion_ids)
        self.keep(turn, None, [text, completion])
        return turn, self.before_stop(Answer(completion, None, [], []), overrides)


class ClassicClient(Client):
    """A verifiers client for one rollout. `turns` holds every answer; a response's id is the
    index of its answer there."""

    def __init__(self, policy: Policy, order: PlayOrder, completion: bool):
        super().__init__(policy)  # type: ignore[arg-type]
        self.policy = policy
        self.order = order
        self.completion = completion
        self.conversations: dict[str, Conversation] = {}
        self.turns = Turns()
        self.overlong = False
        self.failure: RolloutError | None = None
        """The first failed call. Kept because an environment's code may swallow the exception
        and score an incomplete rollout."""
        self.offered_tools = False
        self.bad_tool_calls = 0

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("made from a live policy, never from a ClientConfig")

    async def close(self) -> None:
        """Does nothing: the policy belongs to the worker."""

    async def to_native_tool(self, tool: Any) -> Tool:
        return chat_tool(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return (
            completion_prompt(messages)
            if self.completion
            else [chat_message(message) for message in messages]
        ), {}

    async def get_native_response(
        self,
        prompt: Any,
        model: str,
        sampling_args: dict[str, Any],
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> NativeResponse:
        conversation = self._conversation(kwargs.get("state"))
        try:
            turn, answer = await conversation.answer(prompt, tools, sampling_args)
        except PromptTooLongError as error:
            self.overlong = True
            raise vf.OverlongPromptError(str(error)) from error
        except RolloutError as error:
            self.failure = self.failure or error
            raise
        self.offered_tools = self.offered_tools or bool(tools)
        self.bad_tool_calls += len(answer.bad_tool_calls)
        return conversation.history[-1].index, turn, answer

    def _conversation(self, state: Any) -> Conversation:
        """The conversation of a trajectory. An environment can play several of them in one
        rollout."""
        key = state["trajectory_id"] if state else ""
        if key not in self.conversations:
            kind = TextConversation if self.completion else self.policy.chat
            seed = self.order.seeded("conversation", len(self.conversations)).seed
            self.conversations[key] = kind(
                self.policy, self.order.session, self.order.sampling, self.turns, seed=seed
            )
        return self.conversations[key]

    async def raise_from_native_response(self, response: NativeResponse) -> None:
        """Raises nothing: an immediate end of turn is a valid answer and can be trained on."""

    async def from_native_response(self, response: NativeResponse) -> Response:
        """As of an API without tokens: verifiers' classic API would keep every turn's whole
        prompt."""
        index, turn, answer = response
        num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
        calls = [
            ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in answer.tool_calls
        ]
        truncated = turn.finish_reason == "length"
        message = ResponseMessage.model_construct(
            content=answer.content,
            reasoning_content=answer.reasoning or None,
            tool_calls=calls or None,
            tokens=None,
            finish_reason="length" if truncated else "tool_calls" if calls else "stop",
            is_truncated=truncated,
        )
        usage = Usage(
            prompt_tokens=num_prompt,
            reasoning_tokens=0,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
        )
        return Response.model_construct(
            id=str(index), created=0, model="policy", usage=usage, message=message
        )

    def kept_turns(self, trajectory: list[Any]) -> Turns:
        """The turns that appear in the environment's trajectory; all turns if none does."""
        ids = [step["response"].id for step in trajectory if step.get("response")]
        kept = [int(id) for id in ids if id.isdecimal() and int(id) < len(self.turns)]
        if not kept or kept == [*range(len(self.turns))]:
            return self.turns
        return Turns.of(self.turns[i] for i in kept)

    def messages(self) -> tuple[list[Message], list[Message]]:
        """The newest chat so far, for a rollout without messages of its environment: its first
        prompt, and the messages after it."""
        chats = [] if self.completion else self.conversations.values()
        history = [past for chat in chats for past in chat.history]
        if not history:
            return [], []
        newest = history[-1]
        return newest.messages[: newest.num_prompt], newest.messages[newest.num_prompt :]


class AsOurs(Client):
    """An endpoint's answers are taken as the own policy's are: one may be empty, and has text
    beside its reasoning or calls."""

    raise_from_native_response = ClassicClient.raise_from_native_response

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            response = await super().get_native_response(*args, **kwargs)  # ty: ignore
        except ValidationError as error:
            response = error.errors()[0]["input"]
        if getattr(response, "choices", None):
            return response
        raise InvalidModelResponseError(
            f"the endpoint answered no completion: {str(response)[:500]}"
        )

    async def from_native_response(self, response: Any) -> Response:
        answer = await super().from_native_response(response)  # ty: ignore
        answer.message.content = answer.message.content or ""
        return answer


class EndpointChat(AsOurs, OpenAIChatCompletionsClient):
    """In chat style."""


class EndpointText(AsOurs, OpenAICompletionsClient):
    """In completion style."""


def endpoint_clients(endpoint: Endpoint) -> dict[bool, Client]:
    """Clients of an endpoint for chat (False) and completion style (True), with shared
    connections."""
    key = os.environ.get(endpoint.api_key_var) or "EMPTY"
    shared = AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=ENDPOINT_RETRIES)
    return {False: EndpointChat(shared), True: EndpointText(shared)}


def endpoint_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Converts sampling parameters to OpenAI's interface: its own by name, others in
    `extra_body`."""
    extra = {key: sampling[key] for key in ("top_k", "min_p") if key in sampling}
    return {key: value for key, value in sampling.items() if key not in extra} | (
        {"extra_body": extra} if extra else {}
    )
