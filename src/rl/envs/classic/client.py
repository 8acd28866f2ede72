"""How a classic environment asks the policy: verifiers' client interface on top of our conversations, or of an endpoint."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from rl.envs.policy import Conversation, Past, Policy, RolloutError
from rl.models.chat import Answer, Message, Tool
from rl.wire.inference_client import PromptTooLongError
from rl.wire.turns import Turn, Turns
from rl.wire.worker_messages import Endpoint, PlayGroup

NativeResponse = tuple[int, Turn, Answer]
"""An answer, behind its index in the client's turns."""
ENDPOINT_RETRIES = 4
"""How often a request to an endpoint is repeated: such servers limit rates."""


def chat_message(message: Any) -> Message:
    """A message of verifiers, an object or a dict, in the form of chat APIs and without empty fields. Plain text is the user's."""
    get = message.get
    role, content = get("role"), get("content")
    if isinstance(content, list):
        content = [part if isinstance(part, dict) else part.model_dump(exclude_none=True) for part in content]
    plain: Message = {"role": "user" if role == "text" else role, "content": "" if content is None else content}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if value := get(key):
            plain[key] = value
    if calls := get("tool_calls"):
        plain["tool_calls"] = [chat_call(call) for call in calls]
    return plain


def chat_call(call: Any) -> dict[str, Any]:
    """A tool call of verifiers (an object, a dict of either form, or its JSON text) in the form of chat APIs."""
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function") or call
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": call.get("id") or "", "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def chat_tool(tool: Any) -> Tool:
    """A tool of verifiers, an object or a dict, in the form of chat APIs."""
    function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def completion_prompt(messages: list[Any]) -> str:
    """Messages as one text, for completion style. What follows an answer follows it directly, so that its ids can be kept; verifiers' own
    client puts an empty line there as between other messages."""
    text, after_answer = "", True
    for message in messages:
        plain = chat_message(message)
        content = plain["content"]
        content = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        is_answer = plain["role"] == "assistant"
        text += content if after_answer or is_answer else "\n\n" + content
        after_answer = is_answer
    return text


class LazyList(Sequence[int]):
    """A list that is made whenever it is looked at: verifiers keeps every turn's whole prompt until the rollout is scored."""

    def __init__(self, length: int, make: Callable[[], list[int]]):
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.make())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.make() == list(other)

    def __add__(self, other: Sequence[int]) -> list[int]:
        return self.make() + list(other)

    def __radd__(self, other: Sequence[int]) -> list[int]:
        return list(other) + self.make()


class TextConversation:
    """A conversation in completion style: text in, text out. A prompt that begins with an earlier turn's text continues its ids."""

    def __init__(self, policy: Policy, server: int, sampling: dict[str, Any], turns: Turns):
        self.policy, self.server, self.sampling, self.turns = policy, server, sampling, turns
        self.history: list[Past] = []
        """In the order in which the completions came."""

    async def answer(self, text: str, tools: list[Tool] | None, overrides: dict[str, Any]) -> tuple[Turn, Answer]:
        """The policy's continuation of a text, without tools. Raises what `Policy.sample` raises."""
        renderer = self.policy.renderer
        for before in reversed(self.history):
            if text.startswith(known := "".join(before.whole())):
                new = text[len(known) :]
                ids = self.turns.token_ids(before.index) + renderer.encode(new)
                break
        else:
            self.policy.check_append_only(len(self.history))
            before, new, ids = None, text, renderer.encode(text)
        turn = await self.policy.sample(self.server, ids, self.sampling, overrides)
        completion = renderer.decode(turn.completion_ids)
        self.history.append(Past(len(self.turns), before, [new, completion]))
        self.turns.add(turn)
        return turn, Answer(completion, None, [], [])


class PolicyClient(Client):
    """The policy as one rollout's environment calls it. `turns` has every answer; a response's id is its answer's index there."""

    def __init__(self, policy: Policy, order: PlayGroup, completion: bool):
        super().__init__(policy)  # type: ignore[arg-type]
        self.policy = policy
        self.order = order
        self.completion = completion
        self.conversations: dict[str, Conversation | TextConversation] = {}
        self.turns = Turns()
        self.overlong = False
        self.failure: RolloutError | None = None
        """Why a call failed. Kept here, because an environment's code may swallow the exception and score what it has."""
        self.offered_tools = False
        self.bad_tool_calls = 0

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("made from a live policy, never from a ClientConfig")

    async def close(self) -> None:
        """Does nothing: the policy belongs to the worker."""

    async def to_native_tool(self, tool: Any) -> Tool:
        return chat_tool(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return (completion_prompt(messages) if self.completion else [chat_message(message) for message in messages]), {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Tool] | None = None, **kwargs: Any
    ) -> NativeResponse:
        conversation = self._conversation(kwargs.get("state"))
        overrides = sampling_args | {"max_tokens": sampling_args.get("max_completion_tokens", sampling_args.get("max_tokens"))}
        try:
            turn, answer = await conversation.answer(prompt, tools, overrides)
        except PromptTooLongError as error:
            self.overlong = True
            raise vf.OverlongPromptError(str(error)) from error
        except RolloutError as error:
            self.failure = self.failure or error
            raise
        self.offered_tools = self.offered_tools or bool(tools)
        self.bad_tool_calls += len(answer.bad_tool_calls)
        return conversation.history[-1].index, turn, answer

    def _conversation(self, state: Any) -> Conversation | TextConversation:
        """The conversation of a trajectory, of which an environment can play several in one rollout."""
        key = state["trajectory_id"] if state else ""
        if key not in self.conversations:
            kind = TextConversation if self.completion else Conversation
            self.conversations[key] = kind(self.policy, self.order.server, self.order.sampling, self.turns)
        return self.conversations[key]

    async def raise_from_native_response(self, response: NativeResponse) -> None:
        """Raises nothing: an immediate end of turn is a legal answer, and can be trained on."""

    async def from_native_response(self, response: NativeResponse) -> Response:
        index, turn, answer = response
        num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.tool_calls]
        truncated = turn.finish_reason == "length"
        tokens = ResponseTokens.model_construct(  # unchecked: they are long, and ours
            prompt_ids=LazyList(num_prompt, lambda: self.turns.prompt_ids(index)),
            prompt_mask=LazyList(num_prompt, lambda: [0] * num_prompt),
            completion_ids=turn.completion_ids,
            completion_mask=[1] * num_new,
            completion_logprobs=turn.logprobs,
        )
        message = ResponseMessage.model_construct(
            content=answer.content,
            reasoning_content=answer.reasoning or None,
            tool_calls=calls or None,
            tokens=tokens,
            finish_reason="length" if truncated else "tool_calls" if calls else "stop",
            is_truncated=truncated,
        )
        usage = Usage(prompt_tokens=num_prompt, reasoning_tokens=0, completion_tokens=num_new, total_tokens=num_prompt + num_new)
        return Response.model_construct(id=str(index), created=0, model="policy", usage=usage, message=message)

    def kept_turns(self, trajectory: list[Any]) -> Turns:
        """The turns that are steps of the environment's trajectory; all turns if none of them is."""
        ids = [step["response"].id for step in trajectory if step.get("response")]
        kept = [int(id) for id in ids if id.isdecimal() and int(id) < len(self.turns)]
        return Turns.of(self.turns[i] for i in kept) if kept and kept != list(range(len(self.turns))) else self.turns

    def messages(self) -> tuple[list[Message], list[Message]]:
        """The newest chat as far as it came, for a rollout whose environment gave no messages: its first prompt, and what followed."""
        chats = [conversation for conversation in self.conversations.values() if isinstance(conversation, Conversation)]
        turns = [turn for chat in chats for turn in chat.history]
        whole = turns[-1].whole() if turns else []
        num_prompt = turns[-1].num_prompt if turns else 0
        return whole[:num_prompt], whole[num_prompt:]


def endpoint_clients(endpoint: Endpoint) -> dict[bool, Client]:
    """Clients of an endpoint for chat (False) and completion style (True), which share their connections."""
    key = os.environ.get(endpoint.api_key_var) or "EMPTY"
    shared = AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=ENDPOINT_RETRIES)
    return {False: OpenAIChatCompletionsClient(shared), True: OpenAICompletionsClient(shared)}


def endpoint_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as OpenAI's interface takes them: its own by name, others in the body."""
    extra = {key: sampling[key] for key in ("top_k", "min_p") if key in sampling}
    return {key: value for key, value in sampling.items() if key not in extra} | ({"extra_body": extra} if extra else {})
