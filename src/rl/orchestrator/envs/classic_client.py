"""How a classic environment asks for answers: verifiers' client interface on top of our conversations, or of an endpoint."""

import json
import os
from dataclasses import dataclass
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import Client, OpenAIChatCompletionsClient, OpenAICompletionsClient
from verifiers.types import Response, ResponseMessage, ResponseTokens, ToolCall, Usage

from rl.chat import Answer, Message, RendererError, Tool
from rl.orchestrator.envs.policy import Conversation, InferenceLostError, NotAppendOnlyError, OverlongError, Policy
from rl.orchestrator.rollouts import Cause, Endpoint, PlayGroup, Turn

ENDPOINT_RETRIES = 4
"""How often a request to an endpoint is repeated: such servers limit rates."""


def wire(message: Any) -> Message:
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
        plain["tool_calls"] = [wire_call(call) for call in calls]
    return plain


def wire_call(call: Any) -> dict[str, Any]:
    """A tool call of verifiers (an object, a dict of either form, or its JSON text) in the form of chat APIs."""
    call = json.loads(call) if isinstance(call, str) else call
    function = call.get("function") or call
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": call.get("id") or "", "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def wire_tool(tool: Any) -> Tool:
    """A tool of verifiers, an object or a dict, in the form of chat APIs."""
    function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def joined(messages: list[Any]) -> str:
    """A prompt of completion style. What follows an answer follows it directly, so that its ids can be kept; verifiers' own client puts
    an empty line there as between other messages."""
    text, after_answer = "", True
    for message in messages:
        plain = wire(message)
        content = plain["content"]
        content = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
        is_answer = plain["role"] == "assistant"
        text += content if after_answer or is_answer else "\n\n" + content
        after_answer = is_answer
    return text


@dataclass
class Answered:
    """What the policy answered, and its place among the client's turns."""

    place: int
    turn: Turn
    answer: Answer


class PolicyClient(Client):
    """The policy as one rollout's environment calls it. `turns` has every answer; a response's id is its answer's place there."""

    def __init__(self, policy: Policy, order: PlayGroup, completion: bool):
        super().__init__(policy)  # type: ignore[arg-type]
        self.policy = policy
        self.order = order
        self.completion = completion
        self.conversations: dict[str, Conversation] = {}
        self.turns: list[Turn] = []
        self.overlong = False
        self.fault: tuple[Cause, str] | None = None
        """Kept here, because an environment's code may swallow the exception and score what it has."""
        self.offered_tools = False
        self.bad_tool_calls = 0

    def setup_client(self, config: Any) -> Any:
        raise NotImplementedError("made from a live policy, never from a ClientConfig")

    async def close(self) -> None:
        """The policy belongs to the worker."""

    async def to_native_tool(self, tool: Any) -> Tool:
        return wire_tool(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return (joined(messages) if self.completion else [wire(message) for message in messages]), {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: dict[str, Any], tools: list[Tool] | None = None, **kwargs: Any
    ) -> Answered:
        conversation = self._conversation(kwargs.get("state"))
        overrides = {key: sampling_args[key] for key in ("max_tokens", "stop", "seed") if key in sampling_args}
        overrides["max_tokens"] = sampling_args.get("max_completion_tokens", overrides.get("max_tokens"))
        try:
            if self.completion:
                turn, text = await conversation.complete(prompt, **overrides)
                answer = Answer(text, None, [], [])
            else:
                turn, answer = await conversation.answer(prompt, tools, **overrides)
        except OverlongError as error:
            self.overlong = True
            raise vf.OverlongPromptError(str(error)) from error
        except NotAppendOnlyError as error:
            self.fault = self.fault or ("not_append_only", str(error))
            raise
        except InferenceLostError as error:
            self.fault = self.fault or ("inference", str(error))
            raise
        except RendererError as error:  # the environment's messages or tools are nothing that this model's template can show
            self.fault = self.fault or ("environment", str(error))
            raise
        self.turns.append(turn)
        self.offered_tools = self.offered_tools or bool(tools)
        self.bad_tool_calls += len(answer.bad_tool_calls)
        return Answered(len(self.turns) - 1, turn, answer)

    def _conversation(self, state: Any) -> Conversation:
        """One for each trajectory: an environment can play others inside of one of its own."""
        key = state["trajectory_id"] if state else ""
        if key not in self.conversations:
            self.conversations[key] = self.policy.conversation(self.order.server, self.order.sampling)
        return self.conversations[key]

    async def raise_from_native_response(self, response: Answered) -> None:
        """An immediate end of turn is a legal answer, and can be trained on."""

    async def from_native_response(self, response: Answered) -> Response:
        turn, answer = response.turn, response.answer
        num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
        calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in answer.tool_calls]
        truncated = turn.finish_reason == "length"
        tokens = ResponseTokens.model_construct(  # unchecked: these are long lists of ours
            prompt_ids=turn.prompt_ids,
            prompt_mask=[0] * num_prompt,
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
        return Response.model_construct(id=str(response.place), created=0, model="policy", usage=usage, message=message)

    def kept_turns(self, trajectory: list[Any]) -> list[Turn]:
        """The answers that are steps of a trajectory, as the environment keeps it; all of them if it keeps none of ours."""
        ids = [step["response"].id for step in trajectory if step.get("response")]
        return [self.turns[int(id)] for id in ids if id.isdecimal() and int(id) < len(self.turns)] or list(self.turns)

    def messages(self) -> list[Message]:
        """The conversation as far as it came, for a rollout whose environment gave none."""
        seen = [entry for conversation in self.conversations.values() for entry in conversation.seen]
        return seen[-1].messages if seen else []


def endpoint_clients(endpoint: Endpoint) -> tuple[AsyncOpenAI, dict[bool, Client]]:
    """Clients of an endpoint for chat (False) and completion style (True), which share their connections."""
    key = os.environ.get(endpoint.api_key_var) or "EMPTY"
    shared = AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=ENDPOINT_RETRIES)
    return shared, {False: OpenAIChatCompletionsClient(shared), True: OpenAICompletionsClient(shared)}


def endpoint_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as OpenAI's interface takes them: its own by name, others in the body."""
    named = {key: sampling[key] for key in ("max_tokens", "temperature", "top_p", "stop", "seed") if sampling.get(key) is not None}
    extra = {key: sampling[key] for key in ("top_k", "min_p") if sampling.get(key) is not None}
    return named | ({"extra_body": extra} if extra else {})
