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
from rl.envs.v1.harness import opening
from rl.models.chat import Answer
from rl.wire.inference_client import PromptTooLongError
from rl.wire.rollouts import Cause, Episode, Rollout, Turn
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


Failure = tuple[Cause, str]
MAX_TRACEBACK = 2000


def as_episode(env: vf.Env, episode: vf.Episode, active: dict[str, ActiveTrace]) -> Episode:
    """A Rollout for each trace. Raises RolloutError for an episode that failed before its first
    trace.

    If the environment's `complete` rejects the episode, all rollouts fail, including successful
    ones: their rewards may depend on the others.
    """
    rollouts = [as_rollout(env, trace, active[trace.id]) for trace in episode.traces]
    if rollouts and env.complete(episode):
        return rollouts
    failures = [(rollout.cause, rollout.error) for rollout in rollouts if rollout.error]
    failure: Any = failures[0] if failures else episode_failure(env, episode)
    if not rollouts:
        raise RolloutError(*failure)
    for rollout in rollouts:
        if not rollout.error:
            fail(rollout, failure)
    return rollouts


def as_rollout(env: vf.Env, trace: vf.Trace, active: ActiveTrace) -> Rollout:
    """Converts a trace to a Rollout: the turns come from our conversation, the messages from
    verifiers' own record."""
    # an agent with its own endpoint is another model
    is_policy = getattr(env.config, trace.agent.name).client is None
    turns = active.kept_turns() if is_policy else Turns()
    metrics = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    if active.conversation and active.conversation.forced:
        metrics["forced_sampling"] = float(active.conversation.forced)
    stop = trace.stop_condition or ""
    messages, num_prompt = messages_of(trace)
    usages = [call.usage for call in trace.calls if call.usage and not turns]
    rollout = Rollout(
        turns=turns,
        text=messages,
        num_prompt_messages=num_prompt,
        reward=float(trace.reward),
        metrics=metrics,
        stop=stop,
        truncated=stop == OVERLONG or any(call.finish_reason == "length" for call in trace.calls),
        overlong=stop == OVERLONG,
        agent=trace.agent.name,
        trainable=trace.agent.trainable and is_policy,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
    )
    if not trace.ok:
        fail(rollout, trace_failure(trace, active))
    elif active.failure:  # verifiers scores what a harness makes of the error
        fail(rollout, active.failure)
    # since 0.4 a limit: verifiers scores the incomplete answer
    elif getattr(trace, "is_timeout", False):
        what = f"{stop.removesuffix('_timeout')} timed out; see timeout of the task and of "
        fail(rollout, ("timeout", f"{what}args.{trace.agent.name}"))
    return rollout


def fail(rollout: Rollout, failure: Failure) -> None:
    """Marks a rollout as failed."""
    rollout.cause, rollout.error = failure
    rollout.stop = "error"
    rollout.reward = 0.0


def trace_failure(trace: vf.Trace, active: ActiveTrace) -> Failure:
    """The last failure of a trace. The type of a verifiers error tells where it arose; only its
    text tells what it was."""
    error, cause = trace.last_error, "environment"
    if error is None:
        return cause, "the trace failed without an error"
    if error.type == "ProviderError":
        cause = active.failure[0] if active.failure else "inference"
    elif timed_out(error):
        cause = "timeout"
    elif trace.timing.scoring.start:  # only scoring can fail a trace after this
        cause = "reward"
    return cause, error_text(error)


def episode_failure(env: vf.Env, episode: vf.Episode) -> Failure:
    """A failure of the environment's own hooks. Agents are judged together in `finalize`."""
    error, name = episode.last_error, type(env).__name__
    if error is None:
        return "environment", (
            f"{name}.complete() does not accept the episode"
            if episode.traces
            else "the episode has no trace"
        )
    if timed_out(error) or getattr(episode, "is_timeout", False):
        return "timeout", error_text(error)
    judged = error.type == "EnvError" and error.message.startswith(f"{name}.finalize()")
    return "reward" if judged else "environment", error_text(error)


def timed_out(error: vf.Error) -> bool:
    """Whether an error is a timeout, which verifiers marks by these words, not by a class of its
    own."""
    return (
        error.type == "TimeoutError"
        or error.message.endswith(" timed out")
        or error.message.startswith("agent timeout: ")
    )


def error_text(error: vf.Error) -> str:
    """An error's message and the end of its traceback, which shows the place in the
    environment's code."""
    return f"{error.type}: {error.message}" + (
        f"\n{error.traceback[-MAX_TRACEBACK:]}" if error.traceback else ""
    )


def messages_of(trace: vf.Trace) -> tuple[list[dict[str, Any]], int]:
    """The messages of the conversation's last branch (the task's opening messages if nothing was
    answered), and the number of them before the first sampled one. If a harness rewrote the
    history, the rewritten messages are not the sampled ones."""
    if branches := trace.branches:
        nodes = branches[-1].nodes
        num_prompt = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
        return [message_to_wire(node.message) for node in nodes], num_prompt
    messages = opening(trace.task.data.system_prompt, trace.task.data.prompt)
    return messages, len(messages)
