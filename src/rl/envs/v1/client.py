"""Connects verifiers v1 to the policy: its interception server gets a client that answers in
this process, and each trace in play has one conversation with the policy."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from pydantic import PrivateAttr
from verifiers.v1 import errors
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.dialects import Dialect
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire, parse_message
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception
from verifiers.v1.types import Response, TurnTokens, Usage

from rl.envs.policy import Conversation, RolloutError, chat_completion
from rl.models.chat import Answer
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Cause, Turn
from rl.wire.turns import Turns

OVERLONG = "context_length"
"""Stop condition of a trace whose prompt leaves no room for an answer: the name in verifiers
0.3; 0.4 has no such condition."""
OverlongPromptError: type[vf.ProviderError] = getattr(
    errors, "OverlongPromptError", vf.ProviderError
)
"""Makes verifiers 0.3 end a rollout as if by a limit; 0.4 tolerates any error once the trace is
stopped."""


@dataclass
class ActiveTrace:
    """One trace in play: its conversation (None with an endpoint), and its failed calls."""

    trace: vf.Trace
    conversation: Conversation | None
    failed: list[tuple[list[Any], tuple[Cause, str]]] = field(default_factory=list)
    """What was asked in calls that failed, and why they did. Kept because a harness may go on
    without the answer and have an incomplete trace scored; forgotten if the same is asked again
    and answered."""
    refused: set[int] = field(default_factory=set)
    """Indices of turns that verifiers refused, so that the harness never saw them."""

    @property
    def failure(self) -> tuple[Cause, str] | None:
        """Why the first call failed that was not answered later."""
        return self.failed[0][1] if self.failed else None

    async def answer(self, asked: list[Any], body: dict[str, Any]) -> tuple[Turn, Answer]:
        """Plays one turn. `asked` are verifiers' messages; `body` has the tools and the sampling
        parameters that the harness and the agent's config ask for; the conversation has the
        run's. Raises vf.ProviderError."""
        assert self.conversation
        # In verifiers' own form, where tool results name their tool: a resumed conversation has
        # that form, and must match the one before.
        messages = [message_to_wire(message) for message in asked]
        try:
            answered = await self.conversation.answer(messages, body.get("tools"), body)
        except PromptTooLongError as error:
            self.trace.stop(OVERLONG)
            raise OverlongPromptError(
                f"context length exceeded: {error}", status_code=400
            ) from error
        except RolloutError as error:
            raise self.fail(asked, error) from error
        self.failed = [call for call in self.failed if call[0] != asked]
        return answered

    def kept_turns(self) -> Turns:
        """The conversation's turns, without those that verifiers refused."""
        turns = self.conversation.turns if self.conversation else Turns()
        return (
            Turns.of(turn for i, turn in enumerate(turns) if i not in self.refused)
            if self.refused
            else turns
        )

    def fail(self, asked: list[Any], error: RolloutError) -> vf.ProviderError:
        """Records a failed call. SDKs do not retry the status 400: our own client has already
        retried what it can."""
        self.failed.append((asked, (error.cause, str(error))))
        return vf.ProviderError(str(error), status_code=400)


class PolicyClient(vf.Client):
    """Answers chat completions with the policy. `active` maps ids to the traces in play."""

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
        """Plays one turn; see ActiveTrace.answer."""
        active = self.active.get(session_id or "")
        if active is None or active.conversation is None:
            raise vf.ProviderError(f"trace {session_id} is not being played", status_code=409)
        asked = turn.prompt if turn else dialect.parse_request(body).messages
        if not isinstance(dialect, ChatDialect):
            problem = (
                f"the harness uses {type(dialect).__name__}, but the policy answers chat "
                "completions only; configure another harness"
            )
            raise active.fail(asked, RolloutError("environment", problem))
        answered = await active.answer(asked, body)
        # another call of the harness ended the trace meanwhile
        if active.trace.stop_condition is not None:
            active.refused.add(len(active.conversation.turns) - 1)
        return response(*answered, body["model"])

    async def relay(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        session_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> RelayReply:
        """Plays one turn for a harness that wants a stream: the whole answer is one event."""
        answered = await self.get_response(dialect, body, session_id=session_id)

        async def chunks() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(answered.raw or {}):
                yield event

        async def close() -> None:
            pass

        return RelayReply(content_type="text/event-stream", chunks=chunks(), close=close)


class PolicyClientConfig(vf.EvalClientConfig):
    """The client config that a trace records. The live client is a private attribute, which is
    neither compared nor serialized."""

    base_url: str = "policy"
    api_key_var: str = ""
    _client: PolicyClient = PrivateAttr(default_factory=PolicyClient)

    @property
    def client(self) -> PolicyClient:
        return self._client


# The interception server creates its clients by this name, from configs of two known kinds. Any
# other hook that also serves harnesses
# running as programs would mean replacing the server. A version without this name does not load.
resolve_client = interception.resolve_client
interception.resolve_client = lambda config: (
    config.client if isinstance(config, PolicyClientConfig) else resolve_client(config)
)


def response(turn: Turn, answer: Answer, model: str) -> Response:
    """An answer as verifiers records it, and in `raw` as a chat completion of OpenAI's API, for
    the harness."""
    raw = chat_completion(turn, answer, model)
    choice = raw["choices"][0]
    return Response(
        id=raw["id"],
        created=raw["created"],
        model=model,
        message=parse_message(choice["message"]),
        finish_reason=choice["finish_reason"],
        usage=Usage(**raw["usage"]),
        # Without spans of the messages, the graph puts a turn's new ids into one node, which is
        # right for tasks that read a branch's ids.
        tokens=TurnTokens(
            prompt_ids=turn.prompt_ids,
            completion_ids=turn.completion_ids,
            completion_logprobs=turn.logprobs,
        ),
        raw=raw,
    )
