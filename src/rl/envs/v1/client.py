"""How verifiers v1 asks our policy: its interception server gets a client that answers through one `Conversation` a trace."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from pydantic import PrivateAttr
from verifiers.v1.clients.client import RelayReply, resolve_client
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire, parse_message
from verifiers.v1.errors import OverlongPromptError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception
from verifiers.v1.types import Response, TurnTokens, Usage

from rl.envs.policy import Conversation, RolloutError
from rl.models.chat import Answer, assistant_message
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Cause, Turn


@dataclass
class ActiveTrace:
    """One trace while it is played: its conversation (None with an endpoint), and the cause if its last call failed."""

    conversation: Conversation | None
    failure: Cause | None = None

    def fail(self, error: RolloutError) -> vf.ProviderError:
        """Records the cause. The status is one that SDKs do not retry: our own client has retried what can be."""
        self.failure = error.cause
        return vf.ProviderError(str(error), status_code=400)


class PolicyClient(vf.Client):
    """Answers chat completions with the policy. `active` has the traces that are being played, by trace id."""

    def __init__(self) -> None:
        self.active: dict[str, ActiveTrace] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig | None = None,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One turn. `body` has the sampling that the harness and the agent's config ask for; the conversation has the run's."""
        trace = self.active.get(session_id or "")
        if trace is None or trace.conversation is None:
            raise vf.ProviderError(f"trace {session_id} is not being played", status_code=409)
        trace.failure = None
        if not isinstance(dialect, ChatDialect):
            problem = f"the harness uses {type(dialect).__name__}, the policy answers chat completions only; configure another harness"
            raise trace.fail(RolloutError("environment", problem))
        # In verifiers' own form, with tools' names at their results: a resumed conversation has it, and must continue one that has not.
        messages = [message_to_wire(message) for message in (turn.prompt if turn else dialect.parse_request(body).messages)]
        overrides = body | {"max_tokens": body.get("max_tokens") or body.get("max_completion_tokens")}
        try:
            sampled, answer = await trace.conversation.answer(messages, body.get("tools"), overrides)
        except PromptTooLongError as error:
            raise OverlongPromptError(str(error)) from error
        except RolloutError as error:
            raise trace.fail(error) from error
        return response(sampled, answer, body["model"])

    async def relay(
        self, dialect: Dialect, body: dict[str, Any], session_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> RelayReply:
        """One turn for a harness that wants a stream: the whole answer as one event."""
        answered = await self.get_response(dialect, body, session_id=session_id)

        async def chunks() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(answered.raw or {}):
                yield event

        async def close() -> None:
            pass

        return RelayReply(content_type="text/event-stream", chunks=chunks(), close=close)


class PolicyClientConfig(vf.EvalClientConfig):
    """The client that a trace records. The live client is a private attribute, which is neither compared nor written down."""

    base_url: str = "policy"
    api_key_var: str = ""
    _client: PolicyClient = PrivateAttr(default_factory=PolicyClient)

    @property
    def client(self) -> PolicyClient:
        return self._client


# The interception server makes its clients by this one name, from configs of two known kinds; there is no other way in, short of
# replacing the server, that also serves harnesses which run as programs.
interception.resolve_client = lambda config: config.client if isinstance(config, PolicyClientConfig) else resolve_client(config)


def response(turn: Turn, answer: Answer, model: str) -> Response:
    """An answer as verifiers records it, with the chat completion that the harness gets."""
    message = assistant_message(answer)
    finish = "length" if turn.finish_reason == "length" else "tool_calls" if answer.tool_calls else "stop"
    num_prompt, num_new = len(turn.prompt_ids), len(turn.completion_ids)
    head: dict[str, Any] = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    raw = head | {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new},
    }
    return Response(
        **head,
        message=parse_message(message),
        finish_reason=finish,
        usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_new),
        # Without the messages' spans the graph puts a turn's new ids into one node: right for tasks that look at a branch's ids.
        tokens=TurnTokens(prompt_ids=turn.prompt_ids, completion_ids=turn.completion_ids, completion_logprobs=turn.logprobs),
        raw=raw,
    )
