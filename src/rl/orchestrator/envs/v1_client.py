"""How verifiers v1 asks our policy: its interception server gets a client that answers through `Conversation`, one for each trace."""

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

from rl.orchestrator.envs.policy import Conversation, InferenceLostError, NotAppendOnlyError, OverlongError, assistant_message
from rl.orchestrator.rollouts import Cause, Turn
from rl.renderer import Answer, RendererError


@dataclass
class Seat:
    """One trace while it is played: its talk with the policy (none with an endpoint), and why its last call failed, if it did."""

    conversation: Conversation | None
    failed: Cause | None = None

    def fail(self, cause: Cause, error: Exception) -> vf.ProviderError:
        """Notes the cause. The status is one that SDKs do not repeat: our own client has repeated what can be."""
        self.failed = cause
        return vf.ProviderError(str(error), status_code=400)


class PolicyClient(vf.Client):
    """Answers chat completions with the policy. `seats` holds the traces that are being played, by trace id."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: vf.SamplingConfig | None = None,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One turn. `body` has what the harness and the seat's own sampling ask for; the run's sampling is the conversation's."""
        seat = self.seats.get(session_id or "")
        if seat is None or seat.conversation is None:
            raise vf.ProviderError(f"trace {session_id} is not being played", status_code=409)
        seat.failed = None
        if not isinstance(dialect, ChatDialect):
            problem = f"the harness speaks {type(dialect).__name__}, the policy answers chat completions only; configure another harness"
            raise seat.fail("environment", ValueError(problem))
        # In verifiers' own form, with tools' names at their results: a resumed talk comes in it, and has to continue one that did not.
        messages = [message_to_wire(message) for message in (turn.prompt if turn else dialect.parse_request(body).messages)]
        max_tokens = body.get("max_tokens") or body.get("max_completion_tokens")
        try:
            said, answer = await seat.conversation.answer(
                messages, body.get("tools"), max_tokens=max_tokens, stop=body.get("stop"), seed=body.get("seed")
            )
        except OverlongError as error:
            raise OverlongPromptError(str(error)) from error
        except NotAppendOnlyError as error:
            raise seat.fail("not_append_only", error) from error
        except (InferenceLostError, RendererError, ValueError) as error:
            raise seat.fail("inference", error) from error
        return response(said, answer, body["model"])

    async def relay(
        self, dialect: Dialect, body: dict[str, Any], session_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> RelayReply:
        """For a harness that wants a stream: the whole answer as one event."""
        answered = await self.get_response(dialect, body, session_id=session_id)

        async def chunks() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(answered.raw or {}):
                yield event

        async def close() -> None:
            pass

        return RelayReply(content_type="text/event-stream", chunks=chunks(), close=close)


class PolicyClientConfig(vf.EvalClientConfig):
    """What a trace records as its endpoint. The live client rides along where it is neither compared nor written down."""

    base_url: str = "policy"
    api_key_var: str = ""
    _client: PolicyClient = PrivateAttr()

    @classmethod
    def of(cls, client: PolicyClient) -> "PolicyClientConfig":
        config = cls()
        config._client = client
        return config


def client_of(config: vf.BaseClientConfig) -> vf.Client:
    return config._client if isinstance(config, PolicyClientConfig) else resolve_client(config)


# The interception server makes its clients by this one name, from configs of two known kinds; there is no other way in, short of
# replacing the server, that also serves harnesses which run as programs.
interception.resolve_client = client_of


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
